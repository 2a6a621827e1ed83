"""How many tokens of each frame or window are left after each block of the vision tower.

A segment is what merging never crosses: a frame or tile, and inside it an attention window where
the tower has them. Every block takes the same number of tokens from a segment, give or take one,
so that after the last used block exactly the budget is left: from N to b tokens in L blocks,
N - floor((N - b) * i / L) after block i. With `until` L counts the first blocks only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from mmfast.core.errors import SpecError
from mmfast.core.spec import Spec, count
from mmfast.models.adapter import Adapter
from mmfast.models.towers import Tower


@dataclass(frozen=True)
class Plan:
    """The schedule of one pass of the tower.

    Attributes:
        start: Length of each segment, in the tower's order.
        final: Length of each segment after the last used block.
        items: Patches of each image or video.
        blocks: Number of used blocks L.
        raster: `[S]` place of each patch in its item's raster; None where that is its order.
        until: Share of the used blocks that merge, the first ones.
    """

    start: tuple[int, ...]
    final: tuple[int, ...]
    items: tuple[int, ...]
    blocks: int
    raster: Tensor | None = None
    until: float = 1.0

    @property
    def idle(self) -> bool:
        """Nothing is to be merged."""
        return self.start == self.final

    def after(self, block: int) -> tuple[int, ...]:
        """Length of each segment after `block` (from 0)."""
        merging = max(1, round(self.until * self.blocks))
        done = min(block + 1, merging)
        pairs = zip(self.start, self.final, strict=True)
        return tuple(n - (n - b) * done // merging for n, b in pairs)


def plan_pass(
    tower: Tower, adapter: Adapter, kind: str, call: Mapping[str, Any], spec: Spec
) -> Plan:
    """Plan a call of `get_image_features` or `get_video_features`.

    Raises:
        SpecError: The budget does not fit the frames; says which one would.
    """
    blocks, until = tower.last_used(call) + 1, float(spec.knobs.get("until", 1.0))
    if tower.packed:
        return replace(_packed(tower, call[f"{kind}_grid_thw"], spec, blocks), until=until)
    vision = tower.base.config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    if kind == "video":
        videos, frames = call["pixel_values_videos"].shape[:2]
        per_item = [frames] * videos
    else:
        per_item = adapter.tile_counts(tower.base, call)
    budgets = [b for f in per_item for b in _frame_budgets(spec, [patches] * f)]
    if len(set(budgets)) > 1:
        raise SpecError(
            f"budget {spec.budget} at site 'vit' leaves frames or tiles of unequal length in one "
            f"batch; choose a share such as 0.5, or a multiple of {' and '.join(_counts(per_item))}"
        )
    items = tuple(patches * f for f in per_item)
    return Plan((patches,) * len(budgets), tuple(budgets), items, blocks, until=until)


def _counts(per_item: Sequence[int]) -> list[str]:
    return [str(n) for n in sorted(set(per_item))]


def _packed(tower: Tower, grid: Tensor, spec: Spec, blocks: int) -> Plan:
    """Frames of all items in one sequence; windows are parts of frames."""
    visual = tower.module
    merge = visual.spatial_merge_size
    shapes = grid.tolist()
    places = get_vision_position_ids(grid, merge)  # [S, 2]
    raster = _raster(places, shapes)
    frames = [[h * w] * t for t, h, w in shapes]
    windows = [n for frame in frames for n in frame]
    if hasattr(visual, "window_size"):
        order, ends = get_vision_window_index(grid, merge, visual.window_size, visual.patch_size)
        windows = ends.diff().tolist()
        raster = raster.reshape(-1, merge**2)[order.to(raster.device)].flatten()
    final: list[int] = []
    rest = iter(windows)
    for frame in frames:
        for size, budget in zip(frame, _frame_budgets(spec, frame), strict=True):
            final += _share_out(budget, _take(rest, size), spec)
    items = tuple(sum(frame) for frame in frames)
    return Plan(tuple(windows), tuple(final), items, blocks, raster)


def _raster(places: Tensor, shapes: Sequence[Sequence[int]]) -> Tensor:
    """Place of each patch in its item, `[S]`, from its row and column in the frame."""
    parts, start = [], 0
    for t, h, w in shapes:
        rows, columns = places[start : start + t * h * w].unbind(-1)
        frame = torch.arange(t, device=rows.device).repeat_interleave(h * w)
        parts.append((frame * h + rows) * w + columns)
        start += t * h * w
    return torch.cat(parts)


def _take(lengths: Any, total: int) -> list[int]:
    taken: list[int] = []
    while sum(taken) < total:
        taken.append(next(lengths))
    return taken


def _frame_budgets(spec: Spec, frames: Sequence[int]) -> list[int]:
    """A share holds for every frame; a whole number is spread over the frames of an item."""
    if isinstance(spec.budget, float):
        return [count(spec.budget, n) or 1 for n in frames]
    return _share_out(count(spec.budget, sum(frames)) or 0, frames, spec)


def _share_out(budget: int, parts: Sequence[int], spec: Spec) -> list[int]:
    """Split a budget by size: largest remainder, first part first, at least 1 each.

    Raises:
        SpecError: There are more parts than tokens.
    """
    if budget < len(parts):
        raise SpecError(
            f"budget {spec.budget} at site 'vit' leaves {budget} tokens for {len(parts)} frames or "
            f"attention windows, which keep at least one each; choose {len(parts)} or more of "
            f"{sum(parts)}"
        )
    total = sum(parts)
    shares = [max(1, budget * n // total) for n in parts]
    by_rest = sorted(range(len(parts)), key=lambda i: (-(budget * parts[i] % total), i))
    open_parts = [i for i in by_rest if budget * parts[i] >= total]  # the others have their 1
    for index in open_parts[: max(0, budget - sum(shares))]:
        shares[index] += 1
    while sum(shares) > budget:  # the minimum of 1 took more than there is
        shares[max(range(len(parts)), key=lambda i: (shares[i], i))] -= 1
    return shares
