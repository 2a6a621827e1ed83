"""State of a frame cache: the reference frame of a stream, and the plan of a pass."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.models.families.adapter import Adapter, Call
from mmfast.models.families.tower import Tower, argument, numbers_of


@dataclass(frozen=True, eq=False)
class ReferenceFrame:
    """One frame as the tower saw it, patch by patch possibly at different times.

    Frames with the same `layout` (patches, rows, columns) are compared. `patches` `[n, D]` is the
    input of the first block; `kv` has the keys and values `[n, H, d]` of every block as attended;
    `outputs` by block `[n, D]` are those that are read: the last one, feature layers, DeepStack
    taps. `since` counts frames since one was computed whole. Of that one `key` is the brightness
    `[H, W]`, and `placed` how many patches (down, right) the picture has moved since then.
    """

    layout: tuple[int, ...]
    patches: Tensor
    kv: KVBlock
    outputs: Mapping[int, Tensor]
    since: int = 0
    key: Tensor | None = None
    placed: tuple[int, int] = (0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = [self.patches, *self.outputs.values()]
        tensors += [] if self.key is None else [self.key]
        return self.kv.nbytes + sum(t.nbytes for t in tensors)

    def snapshot(self) -> dict[str, Any]:
        """The frame as plain containers and tensors."""
        tree = {**vars(self), "layout": list(self.layout), "placed": list(self.placed)}
        tree["outputs"] = [[block, rows] for block, rows in self.outputs.items()]
        return {**tree, "kv": [self.kv.keys, self.kv.values]}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> ReferenceFrame:
        """The frame of a snapshot."""
        down, right = tree.get("placed", (0, 0))
        return cls(
            tuple(tree["layout"]),
            tree["patches"],
            KVBlock(*tree["kv"]),
            {int(block): rows for block, rows in tree["outputs"]},
            tree["since"],
            tree.get("key"),
            (down, right),
        )


MARGIN = 0.4  # share of the error that the goal allows, kept to on average
STEP = 0.01  # a mean change of patches below this one is not told from none
LONGEST_PAUSE = 8  # calls


@dataclass(frozen=True)
class ReuseLimits:
    """Bounds of reuse, from the errors that it would have had on frames computed whole.

    At most `frames` in a row are computed in part, none whose patches left out have changed by more
    than `change` on average. Both limits follow from the last error measured, and grow at most
    twofold. After `failures` calls in a row that could reuse nothing, the next `pause`
    calls go to the stock tower, so that trying costs little.
    """

    frames: int = 0
    change: float = 0.0
    failures: int = 0
    pause: int = 0

    def allow(self, age: int, change: float) -> bool:
        """Return True if a frame of that age and change may be computed in part."""
        return age <= self.frames and change <= self.change

    def measured(self, error: float, age: int, change: float, goal: float) -> ReuseLimits:
        """The limits after an `error` (1 - cosine) at that age and change; `goal` is a cosine."""
        ratio = MARGIN * (1.0 - goal) / max(error, 1e-6)
        step = max(change, STEP)
        longer = min(ratio, ratio**0.5)  # errors add up faster than frames
        frames = int(min(age * longer, max(2 * age, self.frames)))
        most = min(step * ratio, max(2 * step, self.change))
        return replace(self, frames=frames, change=most)

    def after(self, saved: bool) -> ReuseLimits:
        """The limits after a call that reused some patches, or after one that could not."""
        if saved:
            return replace(self, failures=0)
        failures = self.failures + 1
        return replace(self, failures=failures, pause=min(2 ** (failures - 1) - 1, LONGEST_PAUSE))


@dataclass(eq=False)
class FrameCacheState:
    """A stream's place in a frame cache: one reference frame (None at first), and counts so far.

    `FrameCache.using` puts the next reference in once a pass has succeeded; tensors are replaced,
    never written, so a snapshot costs nothing. `frames` counts temporal patches where the tower
    takes two frames at once. `flat` is the pass over a picture of one colour (see `motion`),
    and `limits` says how far reuse may go; a cache without a goal leaves both as they are.
    """

    reference: ReferenceFrame | None = field(default=None, repr=False)
    frames: int = 0
    whole: int = 0
    patches: int = 0
    computed: int = 0
    flat: ReferenceFrame | None = field(default=None, repr=False)
    limits: ReuseLimits = ReuseLimits()
    small: bool = False  # the last call was less work than a cache is worth

    @property
    def nbytes(self) -> int:
        """Bytes held, the same after any number of frames once a flat picture is known."""
        return sum(each.nbytes for each in (self.reference, self.flat) if each is not None)

    def count(self, patches: int, computed: int, frames: int, whole: int) -> None:
        """Add to the counts."""
        self.frames += frames
        self.whole += whole
        self.patches += patches
        self.computed += computed

    def stats(self) -> dict[str, int]:
        """The counts, and the bytes held."""
        names = ("frames", "whole", "patches", "computed", "nbytes")
        return {name: getattr(self, name) for name in names}

    def snapshot(self) -> dict[str, Any]:
        """The state as plain containers and tensors."""
        tree = {name: getattr(self, name) for name in ("frames", "whole", "patches", "computed")}
        for name in ("reference", "flat"):
            kept = getattr(self, name)
            tree[name] = None if kept is None else kept.snapshot()
        return {**tree, "limits": dict(vars(self.limits)), "small": self.small}

    @classmethod
    def restore(cls, tree: Mapping[str, Any]) -> FrameCacheState:
        """The state of a snapshot."""
        frames = {
            name: None if tree.get(name) is None else ReferenceFrame.restore(tree[name])
            for name in ("reference", "flat")
        }
        return cls(**{**tree, **frames, "limits": ReuseLimits(**tree.get("limits", {}))})


Layouts = list[tuple[int, ...]]


@dataclass(frozen=True)
class FramePlan:
    """Facts about a pass before it begins.

    `streams` has the number of each frame's state; `layouts` per frame its number of rows, and what
    else must match to compare frames; `taps` the blocks whose output is read. Every tile begins
    with `prefix` rows that are no patches (class, distillation and register tokens).
    """

    streams: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    taps: frozenset[int]
    prefix: int

    @property
    def sizes(self) -> list[int]:
        """Patches of each frame."""
        return [layout[0] for layout in self.layouts]


def plan_pass(
    tower: Tower, adapter: Adapter, kind: str, arguments: Call, hidden: Tensor, states: int
) -> FramePlan:
    """Plan a pass of `states` streams from the call of `get_…_features` that caused it.

    `hidden` is the input of the first block, `[B, N, D]` or `[S, D]`. ModelError where media and
    streams do not match, or the tower got other patches than the call brings.
    """
    items = _packed(kind, arguments) if tower.packed else _batch(tower, adapter, arguments, hidden)
    if len(items) % states:
        raise ModelError(
            f"{len(items)} {kind}s came for {states} states of a frame cache; give equally many "
            "for each state"
        )
    share = len(items) // states
    layouts = tuple(chain.from_iterable(items))
    owners = tuple(i // share for i, frames in enumerate(items) for _ in frames)
    found, planned = hidden.shape[:-1].numel(), sum(layout[0] for layout in layouts)
    if found != planned:
        raise ModelError(
            f"the vision tower got {found} patches where the call brings {planned}; a frame cache "
            "does not work with reduction at sites 'pixel' and 'vit'"
        )
    return FramePlan(owners, layouts, taps_of(tower, arguments), tower.prefix)


def _packed(kind: str, arguments: Call) -> list[Layouts]:
    grids: list[list[int]] = arguments[f"{kind}_grid_thw"].tolist()
    return [[(h * w, h, w)] * t for t, h, w in grids]


def _batch(tower: Tower, adapter: Adapter, arguments: Call, hidden: Tensor) -> list[Layouts]:
    """Frames of a batch `[B, N, D]`: those of a video, or the tiles of an image together."""
    rows, n = hidden.shape[:2]
    videos = arguments.get("pixel_values_videos")
    if videos is not None:
        items, frames = videos.shape[:2]
        return [[(n, 1)] * frames] * items
    tiles = adapter.tile_counts(tower.base, arguments)
    if sum(tiles) != rows:  # padding among the pictures of a batch
        return [[(n, 1)]] * rows
    # A family without a call for videos encodes a clip as an image whose raster has many frames.
    found = adapter.layout(tower.base, "image", arguments)
    clips = [
        layout.grid is not None and layout.grid[0] == count > 1
        for layout, count in zip(found, tiles, strict=True)
    ]
    return [
        [(n, 1)] * count if clip else [(count * n, count)]
        for clip, count in zip(clips, tiles, strict=True)
    ]


def taps_of(tower: Tower, arguments: Call) -> frozenset[int]:
    """Blocks whose whole output is read: the last, feature layers and DeepStack taps."""
    blocks = len(tower.blocks)
    states = tower.states(arguments)
    if not tower.packed:
        layers = argument(tower.base, arguments, "vision_feature_layer")
        states |= numbers_of(layers, blocks + 1)
    taps = {state - 1 for state in states if state} | {blocks - 1}
    return frozenset(taps | {*getattr(tower.module, "deepstack_visual_indexes", ())})


Group = tuple[slice, int, slice]  # chosen rows, the frame they lie in, their keys in that frame


def groups(rows: Tensor, sizes: Sequence[int], ends: Tensor) -> list[Group]:
    """Chosen rows `[K]` by segment: frame, tile or window; segments without any are left out.

    `ends` `[W + 1]` has where segments begin and end, none of them across two frames.
    """
    begins = list(accumulate(sizes, initial=0))
    cuts = torch.searchsorted(rows.cpu(), ends).tolist()
    found: list[Group] = []
    for (start, stop), (low, high) in zip(pairwise(ends.tolist()), pairwise(cuts), strict=True):
        frame = bisect_right(begins, start) - 1
        if high > low:
            inside = slice(start - begins[frame], stop - begins[frame])
            found.append((slice(low, high), frame, inside))
    return found
