"""Signals of the vision tower: attention received and keys, as rows of the tokens the LLM gets.

They come from the last block whose output reaches the language model: the last one for
LLaVA-OneVision (feature layer -1) and for the Qwen towers, whose last block attends over whole
frames. Attention is averaged over heads and queries, in float32; where the tower has a class
token, its row is taken instead. Keys are averaged over heads, as the attention sees them (rotated
where the tower has rotary positions). The adapter then folds both from patches to tokens.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.models.adapter import Adapter, Call
from mmfast.models.patching import override
from mmfast.models.probe import intercepting
from mmfast.models.scores import last_query_scores, received
from mmfast.models.towers import Tower, argument, attention_of

KINDS = ("image", "video")
# An attention module whose tokens were merged tells here how (see mmfast/models/vit.py).
MERGED = "_mmfast_merged"


@dataclass
class _Recording:
    """What one pass of the tower left: `[B, S]` per call and signal name."""

    calls: dict[str, list[Tensor]] = field(default_factory=dict)
    merged: Reduction | None = None


class Collector:
    """Signals of the items the tower saw last, per thread.

    Items are addressed by `("image", i)` or `("video", i)`, or by a plain number that counts the
    images first and then the videos.
    """

    def __init__(self, tower: Tower, adapter: Adapter, needs: Collection[str]) -> None:
        self._tower = tower
        self._adapter = adapter
        self._needs = tuple(need for need in ("attn", "keys") if need in needs)
        self._local = threading.local()

    def attn(self, item: int | tuple[str, int]) -> Tensor:
        """Attention received by the item's tokens, `[N]` float32.

        Raises:
            ModelError: The tower did not run for this item, or attention was not asked for.
        """
        return self._get("attn", item)

    def keys(self, item: int | tuple[str, int]) -> Tensor:
        """Keys of the item's tokens, mean over heads, `[N, d]`.

        Raises:
            ModelError: The tower did not run for this item, or keys were not asked for.
        """
        return self._get("keys", item)

    def count(self, kind: str) -> int:
        """How many images or videos there are signals for."""
        return len(self._items().get(kind, ()))

    def clear(self) -> None:
        """Forget the items: call it once they are used, so that none is taken for a later one's."""
        self._local.items = {}

    def _items(self) -> dict[str, list[dict[str, Tensor]]]:
        if not hasattr(self._local, "items"):
            self._local.items = {}
        items: dict[str, list[dict[str, Tensor]]] = self._local.items
        return items

    def _get(self, name: str, item: int | tuple[str, int]) -> Tensor:
        items = self._items()
        if isinstance(item, int):
            known = [entry for kind in KINDS for entry in items.get(kind, ())]
            index = item
        else:
            known, index = items.get(item[0], []), item[1]
        if not 0 <= index < len(known) or name not in known[index]:
            raise ModelError(
                f"no signal {name!r} for item {item!r}: the vision tower gave {self._needs} for "
                f"{len(known)} items; pass pixels, not precomputed features, and ask for the signal"
            )
        return known[index][name]

    def around_features(
        self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stand around `get_image_features` or `get_video_features` and keep the signals."""
        if getattr(self._local, "recording", None) is not None:
            return call(*args, **kwargs)  # Qwen3-VL's video method calls its image method
        method = getattr(self._tower.base, f"get_{kind}_features")
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
        block = self._tower.blocks[self._tower.last_used(arguments)]
        recording = self._local.recording = _Recording()
        try:
            around = {attention_of(block): partial(self._record, recording)}
            with intercepting(around, innermost=True):
                output = call(*args, **kwargs)
        finally:
            self._local.recording = None
        self._keep(kind, arguments, recording)
        return output

    @torch.no_grad()
    def _keep(self, kind: str, arguments: Call, recording: _Recording) -> None:
        named: dict[str, list[Tensor]] = {}
        for name in recording.calls:
            patches = _patches(self._tower, arguments, name, recording)
            rows = self._adapter.fold(self._tower.base, kind, patches, arguments)
            named[name] = [item[:, 0] for item in rows] if name == "attn" else rows
        items = zip(*named.values(), strict=True)
        self._items()[kind] = [dict(zip(named, item, strict=True)) for item in items]

    def _record(
        self,
        recording: _Recording,
        call: Callable[..., Any],
        module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Another thread may be passing through the same module at the same time.
        if getattr(self._local, "recording", None) is recording:
            query, key = args[0].detach(), args[1].detach()
            mask = args[3] if len(args) > 3 else kwargs.get("attention_mask")
            ends = kwargs.get("cu_seq_lens_q")  # flash takes all segments in one call
            lengths = [query.shape[2]] if ends is None else ends.diff().tolist()
            recording.merged = module.__dict__.get(MERGED, _nothing)()
            parts = zip(query.split(lengths, 2), key.split(lengths, 2), strict=True)
            for q, k in parts if "attn" in self._needs else ():
                self._add(recording, q, k, mask, kwargs.get("scaling"))
            width = getattr(module, "head_dim", key.shape[-1])  # more where sizes ride along
            if "keys" in self._needs:
                recording.calls.setdefault("keys", []).append(key[..., :width].mean(dim=1))
        return call(module, *args, **kwargs)

    def _add(
        self, recording: _Recording, q: Tensor, k: Tensor, mask: Any, scaling: float | None
    ) -> None:
        if self._tower.class_token:
            row = mask[:, :, :1] if isinstance(mask, Tensor) and mask.ndim == 4 else mask
            attn = last_query_scores(q[:, :, :1], k, row, scaling)
        else:
            attn = received(q, k, scaling, is_causal=False, mask=mask)
        recording.calls.setdefault("attn", []).append(attn[..., None])  # [B, S, 1]


def _nothing() -> None:
    return None


@contextmanager
def tower_signals(model: Any, adapter: Adapter, needs: Collection[str]) -> Iterator[Collector]:
    """Collect the tower's `attn` and `keys` whenever the model encodes images or videos.

    Args:
        model: A model of a known family.
        adapter: Its adapter, whose `fold` brings patches to tokens.
        needs: Signal names; those the tower cannot give are ignored, and without any that it can
            give nothing is hooked.

    Raises:
        ModelError: The family is unknown.
    """
    tower = adapter.tower(model.base_model)
    collector = Collector(tower, adapter, needs)
    with ExitStack() as stack:
        for kind in KINDS if {"attn", "keys"} & set(needs) else ():
            around = partial(collector.around_features, kind)
            stack.enter_context(override(tower.base, f"get_{kind}_features", around))
        yield collector


def _patches(tower: Tower, call: Call, name: str, recording: _Recording) -> Tensor:
    """A signal of every patch in the tower's order, `[P, d]` float32."""
    values = torch.cat(recording.calls[name], dim=1).float()  # [B, S, d]
    if recording.merged is not None:
        values = _unmerge(values, recording.merged, shared=name == "attn")
    if argument(tower.base, call, "vision_feature_select_strategy") == "default":
        values = values[:, 1:]  # the model drops the class token alike
    return values.flatten(0, 1)


def _unmerge(values: Tensor, merged: Reduction, shared: bool) -> Tensor:
    """Values `[B, S, d]` of merged tokens for every patch; attention is shared out, keys copied."""
    flat = values.flatten(0, 1)  # the Reduction spans all frames of the pass
    if shared:
        flat = flat / merged.sizes()[:, None]
    return merged.expand(flat).reshape(len(values), -1, values.shape[-1])
