"""Signals of the vision tower: attention received and keys, as rows of the tokens the LLM gets.

`TOWER_SIGNALS` names the block and the queries of each one; the last used block is the last one
whose output reaches the language model. Attention is averaged over heads, in float32.
Keys are averaged over heads, as the attention sees them (rotated where the tower has rotary
positions). The adapter then folds them from patches to tokens.

    attn         last used block: the class token's row, or the mean over queries without one
    attn_visual  last used block: the mean over all queries, a class token's included (HiPrune)
    attn_middle  as `attn_visual`, from the middle block, where attention is on objects (HiPrune)
    attn_first   as `attn`, from the first block (HiRED)
    keys         last used block: keys, averaged over heads

No method needs a class token: in a tower without one, `attn` is the mean over all patches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.models.encoder_names import bound_arguments
from mmfast.models.families.adapter import Adapter, Call
from mmfast.models.families.tower import (
    KINDS,
    Tower,
    argument,
    attention_of,
    check_blocks,
    kinds_of,
)
from mmfast.models.patching import override
from mmfast.models.reduction.probe import (
    Levels,
    intercepting,
    last_query_scores,
    received,
    received_within,
)
from mmfast.models.wrappers import base_of

# Name: one of the used blocks, and its reading: `row` (the class token's, where there is one),
# `mean` (over all queries) or `keys`.
TOWER_SIGNALS: Mapping[str, tuple[str, str]] = {
    "attn": ("last", "row"),
    "attn_visual": ("last", "mean"),
    "attn_middle": ("middle", "mean"),
    "attn_first": ("first", "row"),
    "keys": ("last", "keys"),
}


@dataclass(frozen=True)
class SignalSource:
    """Source of one signal in one call: the number of a block, and `row`, `mean` or `keys`."""

    block: int
    what: str


def from_tower(needs: Collection[str]) -> tuple[str, ...]:
    """Those of `needs` that come from the vision tower, in a fixed order."""
    return tuple(name for name in TOWER_SIGNALS if name in needs)


def sources_of(
    tower: Tower, names: Collection[str], call: Mapping[str, Any]
) -> dict[str, SignalSource]:
    """The source of each signal in one call of the tower.

    A tower without a class token has no row to prefer, so `attn` and `attn_visual` are one
    reading there.
    """
    last = tower.last_used(call)
    blocks = {"first": 0, "middle": middle_block(tower, last), "last": last}
    found = {}
    for name in names:
        where, what = TOWER_SIGNALS[name]
        what = "mean" if what == "row" and not tower.class_token else what
        found[name] = SignalSource(blocks[where], what)
    return found


def middle_block(tower: Tower, last: int) -> int:
    """The block three eighths up the used ones, of full attention where others have windows."""
    whole = getattr(tower.module, "fullatt_block_indexes", None)
    used = last + 1
    if whole:
        return int(min(sorted(whole), key=lambda index: abs(index - last / 2)))
    return max(0, round(3 / 8 * used) - 1)


# On an attention module: gives the merging of its tokens (see models/vision/merge.py).
MERGED = "_mmfast_merged"
# On a tower's module: gives the patches of the current pass (see models/vision/pixel.py).
KEPT = "_mmfast_kept"


@dataclass
class _Recording:
    """Readings of one pass of the tower: `[B, S, d]` per call and source."""

    calls: dict[SignalSource, list[Tensor]] = field(default_factory=dict)
    merged: dict[int, Reduction | None] = field(default_factory=dict)  # by block
    kept: Reduction | None = None


class Collector:
    """Signals of the items the tower saw last, per thread, by `("image", i)` or by a plain number.

    A number counts the images first, then the videos, then the sounds.
    """

    def __init__(self, tower: Tower, adapter: Adapter, needs: Collection[str]) -> None:
        self._tower = tower
        self._adapter = adapter
        self._needs = from_tower(needs)
        self._local = threading.local()

    def count(self, kind: str) -> int:
        """Number of items of a kind that there are signals for."""
        return len(self._items().get(kind, ()))

    def clear(self) -> None:
        """Forget the items once they are used, so that none is taken for a later one."""
        self._local.items = {}

    def _items(self) -> dict[str, list[dict[str, Tensor]]]:
        if not hasattr(self._local, "items"):
            self._local.items = {}
        items: dict[str, list[dict[str, Tensor]]] = self._local.items
        return items

    def signal(self, name: str, item: int | tuple[str, int]) -> Tensor:
        """A signal of the item's tokens: attention `[N]` float32, keys `[N, d]`.

        ModelError where the tower did not run for this item, or the signal was not asked for.
        """
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
        """Keep the signals of a call of `get_image_features` or `get_video_features`."""
        if getattr(self._local, "recording", None) is not None:
            return call(*args, **kwargs)  # Qwen3-VL's video method calls its image method
        name = f"get_{kind}_features"
        arguments = bound_arguments(self._tower.base, name, args, kwargs)
        tower = self._adapter.tower_of(self._tower.base, kind)
        sources = sources_of(tower, self._needs, arguments)
        recording = self._local.recording = _Recording()
        try:
            with intercepting(self._arounds(tower, recording, sources), innermost=True):
                output = call(*args, **kwargs)
        finally:
            self._local.recording = None
        self._keep(kind, arguments, recording, sources)
        return output

    def _arounds(
        self, tower: Tower, recording: _Recording, sources: dict[str, SignalSource]
    ) -> dict[nn.Module, Any]:
        readings: dict[int, list[SignalSource]] = {}
        for source in dict.fromkeys(sources.values()):
            readings.setdefault(source.block, []).append(source)
        return {
            attention_of(tower.blocks[block]): partial(self._record, recording, found)
            for block, found in readings.items()
        }

    @torch.no_grad()
    def _keep(
        self, kind: str, arguments: Call, recording: _Recording, sources: dict[str, SignalSource]
    ) -> None:
        folded = {}
        for source in recording.calls:
            patches = _patches(self._tower, arguments, source, recording)
            rows = self._adapter.fold(self._tower.base, kind, patches, arguments)
            folded[source] = rows if source.what == "keys" else [item[:, 0] for item in rows]
        count = len(next(iter(folded.values()), []))
        named = [{n: folded[s][i] for n, s in sources.items()} for i in range(count)]
        self._items()[kind] = named

    def _record(
        self,
        recording: _Recording,
        sources: list[SignalSource],
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
            cut = ends is not None and isinstance(mask, Tensor)  # sizes of merged tokens, by key
            masks = [mask] * len(lengths) if mask is None or not cut else mask.split(lengths, -1)
            recording.merged[sources[0].block] = module.__dict__.get(MERGED, _nothing)()
            recording.kept = self._tower.module.__dict__.get(KEPT, _nothing)()
            width = getattr(module, "head_dim", key.shape[-1])  # more where sizes ride along
            with Levels() as levels:
                output = call(module, *args, **kwargs)
            scaling, lse = kwargs.get("scaling"), levels.of(query) if ends is None else None
            for source in sources:
                found = recording.calls.setdefault(source, [])
                if source.what == "keys":
                    found.append(key[..., :width].mean(dim=1))
                elif source.what == "mean" and ends is not None and not cut:
                    found.append(received_within(query, key, ends, scaling)[..., None])
                else:
                    split = (query.split(lengths, 2), key.split(lengths, 2), masks)
                    for q, k, seen in zip(*split, strict=True):
                        found.append(_attention(q, k, seen, scaling, source.what, lse))
            return output
        return call(module, *args, **kwargs)


def _attention(
    q: Tensor, k: Tensor, mask: Any, scaling: float | None, what: str, lse: Tensor | None
) -> Tensor:
    """Attention received `[B, S, 1]`: the class token's row, or the mean over queries."""
    if what == "row":
        row = mask[:, :, :1] if isinstance(mask, Tensor) and mask.ndim == 4 else mask
        return last_query_scores(q[:, :, :1], k, row, scaling)[..., None]
    return received(q, k, scaling, False, _padding(mask), lse)[..., None]


def _padding(mask: Any) -> Any:
    """`[B, S]` where all queries see the same keys, so that queries at padding do not count."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1:
        return mask
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask < -1e4)).all()):
        return mask  # merged tokens weigh by their size
    first = seen[:, 0, :1]  # [B, 1, S]
    return first[:, 0] if bool((seen[:, 0] == first).all()) else mask


def _nothing() -> None:
    return None


@contextmanager
def tower_signals(model: Any, adapter: Adapter, needs: Collection[str]) -> Iterator[Collector]:
    """Collect the tower's signals whenever the model encodes images or videos.

    Signals that the tower cannot give are ignored, and without any that it can nothing is hooked.
    ModelError where the family is unknown, or its tower attends to nothing.
    """
    tower = adapter.tower(base_of(model))
    for name in from_tower(needs)[:1]:
        check_blocks(tower, adapter.family, f"signal {name!r}")
    collector = Collector(tower, adapter, needs)
    with ExitStack() as stack:
        for kind in kinds_of(tower.base) if from_tower(needs) else ():
            around = partial(collector.around_features, kind)
            stack.enter_context(override(tower.base, f"get_{kind}_features", around))
        yield collector


def _patches(tower: Tower, call: Call, source: SignalSource, recording: _Recording) -> Tensor:
    """A signal of every patch in the tower's order, `[P, d]` float32."""
    values = torch.cat(recording.calls[source], dim=1).float()  # [B, S, d]
    merged = recording.merged[source.block]
    if merged is not None:
        values = _unmerge(values, merged, shared=source.what != "keys")
    if recording.kept is not None:
        values = recording.kept.expand(values[0])[None]  # packed towers only; 0 where dropped
    if argument(tower.base, call, "vision_feature_select_strategy") == "default":
        values = values[:, 1:]  # the model drops the class token alike
    return values.flatten(0, 1)


def _unmerge(values: Tensor, merged: Reduction, shared: bool) -> Tensor:
    """Values `[B, S, d]` of merged tokens for every patch; attention is shared out, keys copied."""
    prefix = values.shape[1] - merged.m // len(values)  # a class token in front of each frame
    flat = values[:, prefix:].flatten(0, 1)  # the Reduction spans all frames of the pass
    if shared:
        flat = flat / merged.sizes()[:, None]
    full = merged.expand(flat).reshape(len(values), -1, values.shape[-1])
    return torch.cat([values[:, :prefix], full], dim=1)
