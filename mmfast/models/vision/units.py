"""Units of media for the vision tower: grouped for a call, split again, and joined."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.trace import Trace
from mmfast.models.encoder_names import encode_media, encoder_arguments, output_of, planes_of
from mmfast.models.families.adapter import Adapter, Layout
from mmfast.models.families.prompt_ids import prompt_ids
from mmfast.models.families.tower import PIXELS
from mmfast.models.reduction.record import Record, flat, record_of, recording, remember
from mmfast.models.vision.merge import vit_stage
from mmfast.models.vision.pixel import pixel_stage


@dataclass(frozen=True, eq=False)
class MediaUnit:
    """Media of one kind that their family encodes together; a single one where it can be split."""

    kind: str
    key: tuple[Any, ...]  # kind, context, and the key of each medium
    call: Mapping[str, Any]
    ids: Tensor  # token ids `[L]` of its prompt

    @property
    def shape(self) -> tuple[Any, ...]:
        """Description of the call; units of one shape can share it."""
        rest = {
            name: (value.shape[1:], value.dtype) if isinstance(value, Tensor) else repr(value)
            for name, value in self.call.items()
        }
        return (self.kind, *sorted(rest.items(), key=lambda pair: pair[0]))

    @property
    def count(self) -> int:
        """Number of media."""
        return len(self.key) - 2

    @property
    def work(self) -> int:
        """Number of values that enter the tower."""
        pixels = self.call.get(PIXELS[self.kind])
        return int(pixels.numel()) if isinstance(pixels, Tensor) else 0


@dataclass(frozen=True, eq=False)
class Merge:
    """Patches of a medium that merged inside the tower."""

    found: Reduction
    ms: float
    method: str


@dataclass(frozen=True, eq=False)
class UnitFeatures:
    """The result of encoding a unit."""

    output: type[Any]
    features: Tensor  # `[n, D]` of all its media
    planes: tuple[Tensor, ...]  # DeepStack features `[n, D]` each
    layouts: tuple[Layout, ...]
    signals: tuple[dict[str, Tensor], ...]  # signals of the tower, one dictionary per medium
    ms: float = 0.0  # milliseconds of the tower, its share of a call
    merges: tuple[Merge, ...] = ()  # inside the tower, one per medium
    chains: tuple[Any, ...] = ()  # reductions before the tower, one per medium
    tags: Tensor | None = None  # embeddings of tags of the prompt (Ovis2), the same for all media
    single: bool = False  # the family returns one tensor for all media, not one for each

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        signals = (each for one in self.signals for each in one.values())
        return sum(each.nbytes for each in (self.features, *self.planes, *signals))


def units(
    base: Any, kind: str, inputs: Mapping[str, Any], keys: Sequence[str], context: tuple[Any, ...]
) -> list[MediaUnit]:
    """Return the media of one kind of one prompt, split where that is safe.

    `context` holds the other parts of the key: tenant, signals and adapter.
    """
    together = whole(base, kind, inputs, keys, context)
    parts = _split(kind, together.call, len(keys))
    if parts is None:
        return [together]
    return [
        MediaUnit(kind, (kind, context, key), part, together.ids)
        for key, part in zip(keys, parts, strict=True)
    ]


def whole(
    base: Any, kind: str, inputs: Mapping[str, Any], keys: Sequence[str], context: tuple[Any, ...]
) -> MediaUnit:
    """Return all media of one kind of one prompt as one unit; arguments as for `units`."""
    names = encoder_arguments(base, kind)
    call = {name: inputs[name] for name in names if inputs.get(name) is not None}
    return MediaUnit(kind, (kind, context, *keys), call, inputs["input_ids"][0])


def _split(kind: str, call: Mapping[str, Any], count: int) -> list[dict[str, Any]] | None:
    """Return the arguments of each medium; None where the media cannot be split."""
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    if len(tensors) < len(call):
        return None
    grid = tensors.get(f"{kind}_grid_thw")
    rows = {name: [1] * count for name in tensors}
    if grid is not None and PIXELS[kind] in tensors:
        rows[PIXELS[kind]] = grid.prod(-1).tolist()
    if any(sum(rows[name]) != len(value) for name, value in tensors.items()):
        return None
    cut = {name: value.split(rows[name]) for name, value in tensors.items()}
    return [{name: parts[i] for name, parts in cut.items()} for i in range(count)]


def grouped(waiting: Sequence[MediaUnit], most: int) -> Iterator[list[MediaUnit]]:
    """Yield groups of units for one call of the tower, of at most `most` values each."""
    groups: dict[tuple[Any, ...], list[MediaUnit]] = {}
    for unit in waiting:
        if not all(isinstance(value, Tensor) for value in unit.call.values()):
            yield [unit]
            continue
        mine = groups.setdefault(unit.shape, [])
        if mine and sum(each.work for each in mine) + unit.work > most:
            yield groups.pop(unit.shape)
            mine = groups.setdefault(unit.shape, [])
        mine.append(unit)
    yield from groups.values()


@torch.no_grad()
def encode(
    base: Any,
    adapter: Adapter,
    needs: Collection[str],
    group: Sequence[MediaUnit],
    specs: Sequence[Spec] = (),
) -> list[UnitFeatures]:
    """Run the tower once for all units of a group, with reducers before and inside it."""
    kind, first = group[0].kind, group[0].call
    call = dict(first)
    if len(group) > 1:
        call = {name: torch.cat([unit.call[name] for unit in group]) for name in first}
    longest = max(len(unit.ids) for unit in group)
    ids = torch.stack([F.pad(u.ids, (longest - len(u.ids), 0), value=-1) for u in group])
    trace, before = Trace(), [spec for spec in specs if spec.site == "pixel"]
    with ExitStack() as stack:
        for spec in (spec for spec in specs if spec.site == "vit"):
            stack.enter_context(vit_stage(base, adapter, spec, trace))
        if before:
            stack.enter_context(pixel_stage(base, adapter, before))
        stack.enter_context(prompt_ids(ids))
        stack.enter_context(recording(base, adapter, needs))
        output = encode_media(base, kind, call, return_dict=True)
    record = record_of(output)
    if record is None:
        raise ModelError(f"the {kind} encoder of {adapter.family!r} gives no layout")
    return _split_output(output, record, _shares(record, group), _merges(trace, record))


def _merges(trace: Trace, record: Record) -> list[Merge]:
    """Return what merged of each medium; none where nothing did."""
    found = trace.reductions
    if found and len(found) != len(record.layouts):
        raise ModelError(f"{len(record.layouts)} {record.kind}s were merged as {len(found)}")
    pairs = zip(found, trace.rows, strict=True)
    return [Merge(reduction, row.ms, row.method) for (_, _, reduction), row in pairs]


def _shares(record: Record, group: Sequence[MediaUnit]) -> list[int]:
    if len(group) == 1:
        return [len(record.layouts)]
    shares, found = [unit.count for unit in group], len(record.layouts)
    if found != sum(shares):
        raise ModelError(f"{sum(shares)} {record.kind}s became {found} of features")
    return shares


def _split_output(
    output: Any, record: Record, shares: Sequence[int], merges: Sequence[Merge]
) -> list[UnitFeatures]:
    features = flat(output.pooler_output)
    planes = [flat(plane) for plane in planes_of(output)]
    found, item, start = [], 0, 0
    for share in shares:
        layouts = tuple(record.layouts[item : item + share])
        stop = start + sum(each.length for each in layouts)
        found.append(
            UnitFeatures(
                type(output),
                features[start:stop].clone(),
                tuple(plane[start:stop].clone() for plane in planes),
                layouts,
                tuple(record.signals[item : item + share]),
                merges=tuple(merges[item : item + share]),
                chains=tuple(record.dropped[item : item + share]),
                tags=getattr(output, "visual_indicator_features", None),
                single=isinstance(output.pooler_output, Tensor),
            )
        )
        item, start = item + share, stop
    if start != len(features):
        raise ModelError(f"{len(features)} features of kind {record.kind!r} fit no {start} places")
    return found


def joined(kind: str, parts: Sequence[UnitFeatures]) -> Any:
    """Return an encoder output of the stock class for all media of one kind of one prompt."""
    cls = parts[0].output
    features = [part.features for part in parts]
    planes = [list(each) for each in zip(*(part.planes for part in parts), strict=True)]
    needed = {f.name: None for f in fields(cls) if f.default is MISSING}
    extra: dict[str, Any] = {"deepstack_features": planes} if planes else {}
    if parts[0].tags is not None:
        extra["visual_indicator_features"] = parts[0].tags
    together = torch.cat(features)[None] if parts[0].single else features
    output = output_of(cls, {**needed, "pooler_output": together, **extra})
    layouts = [layout for part in parts for layout in part.layouts]
    signals = [signal for part in parts for signal in part.signals]
    chains = [chain for part in parts for chain in part.chains]
    remember(output, Record(kind, layouts, signals, [features, *planes], dropped=chains))
    return output
