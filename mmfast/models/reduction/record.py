"""Records of encoded features: their layout and the signals of the tower.

`generate` encodes images and videos long before the forward pass that uses them, and drops the
grids on the way. So the encoding methods of the one attached model are observed, and a record is
stored with the output object that they return.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.models.encoder_names import FEATURES, bound_arguments, features_of, planes_of
from mmfast.models.families.adapter import Adapter, Layout
from mmfast.models.families.tower import KINDS, PIXELS, kinds_of
from mmfast.models.patching import override
from mmfast.models.reduction.tower_signals import from_tower, tower_signals

_FIELD = "_mmfast_record"
# On an encoder's output: the reductions before the tower (see models/vision/pixel.py).
CHAINS = "_mmfast_pixel_chains"


@dataclass
class Record:
    """Facts about the features of all media of one kind in one call, item by item.

    Attributes:
        signals: Tower signals that a stage needs, `place` `[N, 3]` and, of images, `tile` `[N]`.
        planes: The features, then the DeepStack planes, each a list of tensors. Chunked prefill
            brings them in slices, but a method must see whole items; dropped once used in full.
        ends: Under chunked prefill: features that each batch row has had so far.
        plans: Under chunked prefill: decisions of the stages before the LLM for whole items.
        dropped: Reductions at site `pixel` of each item, a Chain; [] without such.
    """

    kind: str
    layouts: list[Layout]
    signals: list[dict[str, Tensor]]
    planes: list[list[Tensor]] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)
    plans: dict[tuple[str, int], Any] = field(default_factory=dict)
    dropped: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.signals = [
            {**given, **_from_layout(self.kind, layout)}
            for given, layout in zip(self.signals, self.layouts, strict=True)
        ]

    def flat(self, plane: int = 0) -> Tensor | None:
        """All features `[tokens, D]`, or those of a DeepStack plane (from 1), if still held."""
        return flat(self.planes[plane]) if self.planes else None

    def features(self, item: int, plane: int = 0) -> Tensor:
        """Features of a whole item's content tokens, `[N, D]`."""
        rows = self.flat(plane)
        assert rows is not None
        start = sum(each.length for each in self.layouts[:item])
        return rows[start + self.layouts[item].content().to(rows.device)]


def _from_layout(kind: str, layout: Layout) -> dict[str, Tensor]:
    """`place` where it is known; `tile` of images, 0 throughout where there is one tile."""
    found, place = {}, layout.place()
    if place is not None:
        found["place"] = place
    if layout.tile is not None:
        found["tile"] = layout.tile
    elif kind == "image" and layout.grid is not None:
        found["tile"] = torch.zeros(math.prod(layout.grid), dtype=torch.int64)
    return found


def flat(features: Iterable[Tensor]) -> Tensor:
    """Features of all items, in whatever container a family returns them, as `[tokens, D]`."""
    return torch.cat([each.reshape(-1, each.shape[-1]) for each in features])


def _list(plane: Any) -> list[Tensor]:
    """Return sounds, which come joined `[tokens, D]`, and everything else as a list of items."""
    return [plane] if isinstance(plane, Tensor) and plane.ndim == 2 else list(plane)


class Recorder:
    """Observes the encoding methods of one base model; holds the last records of each thread."""

    def __init__(self, base: Any, adapter: Adapter, needs: Collection[str], collector: Any) -> None:
        self._base = base
        self._adapter = adapter
        self._needs = from_tower(needs)
        self._collector = collector
        self._local = threading.local()
        self._uncompiled: Any = torch.compiler.disable(self._note)

    def around(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record a call of `get_image_features` or that of another kind."""
        if getattr(self._local, "busy", False):
            return call(*args, **kwargs)  # Qwen3-VL's video method calls its image method
        self._local.busy = True
        try:
            output = call(*args, **kwargs)
        finally:
            self._local.busy = False
        self._uncompiled(kind, output, args, kwargs)
        return output

    def _note(
        self, kind: str, output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Record what a call gave, out of compiled code."""
        bound = bound_arguments(self._base, f"get_{kind}_features", args, kwargs)
        layouts = self._adapter.layout(self._base, kind, {**bound.get("kwargs", {}), **bound})
        record = Record(kind, layouts, [self._signals(kind, i) for i in range(len(layouts))])
        if hasattr(output, "pooler_output"):
            planes = [features_of(self._base, kind, output), *planes_of(output)]
            record.planes = [_list(plane) for plane in planes]
            record.dropped = output.__dict__.get(CHAINS, [])
            remember(output, record)
        if self._needs:
            self._collector.clear()
        self.last[kind] = record

    @property
    def last(self) -> dict[str, Record]:
        """The latest record of each kind in this thread."""
        if not hasattr(self._local, "last"):
            self._local.last = {}
        last: dict[str, Record] = self._local.last
        return last

    def _signals(self, kind: str, item: int) -> dict[str, Tensor]:
        return {need: self._collector.signal(need, (kind, item)) for need in self._needs}


def record_of(output: Any) -> Record | None:
    """The record of an encoder output, if it was encoded while attached."""
    return getattr(output, _FIELD, None)


def remember(output: Any, record: Record | None) -> None:
    """Store a record with an encoder output."""
    output.__dict__[_FIELD] = record


@contextmanager
def recording(base: Any, adapter: Adapter, needs: Collection[str]) -> Iterator[Recorder]:
    """Observe the encoding methods of `base`, which are stock again at the end."""
    with ExitStack() as stack:
        collector = None
        if from_tower(needs):
            collector = stack.enter_context(tower_signals(base, adapter, needs))
        recorder = Recorder(base, adapter, needs, collector)
        for kind in kinds_of(base):
            around = partial(recorder.around, kind)
            stack.enter_context(override(base, f"get_{kind}_features", around))
        yield recorder


def features_given(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Encoder outputs handed to a forward call, by kind; None where it is yet to encode pixels."""
    outputs = kwargs.get(FEATURES) or {}
    return {
        kind: outputs.get(kind)
        for kind in KINDS
        if outputs.get(kind) is not None or kwargs.get(PIXELS[kind]) is not None
    }
