"""State of one pass of a vision tower whose tokens are merged on the way.

A segment is a set of tokens that merging never leaves: a frame or tile, and inside it an attention
window where the tower has them. Every block takes the same number of tokens from a segment, give or
take one, so that after the last used block exactly the budget is left: from N to b tokens in L
blocks, N - floor((N - b) * i / L) after block i. With `until` L counts the first blocks only.

Neighbouring blocks find nearly the same pairs (LiteVGGT), so one matching may serve several: it is
made for all the tokens that these blocks are to lose, and each of them merges its part, the most
similar pairs first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec, count, run
from mmfast.core.tokens import Tokens
from mmfast.models.families.adapter import Adapter
from mmfast.models.families.tower import SEGMENTS, Tower
from mmfast.ops.similarity import paired_cosine


@dataclass(frozen=True)
class MergePlan:
    """The schedule of one pass of the tower.

    `start` and `final` are the length of each segment before, and after the last used block;
    `raster` `[S]` is the place of each patch in its item's raster, None where that is its order;
    `until` is the share of the used blocks that merge, the first ones. `prefix` rows in front of
    each segment (class, distillation and register tokens) stay as they are and are not counted.
    """

    start: tuple[int, ...]
    final: tuple[int, ...]
    items: tuple[int, ...]
    blocks: int
    raster: Tensor | None = None
    until: float = 1.0
    prefix: int = 0

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
) -> MergePlan:
    """Plan a call of `get_…_features`; a budget that does not fit the frames is a SpecError."""
    blocks, until = tower.last_used(call) + 1, float(spec.knobs.get("until", 1.0))
    if tower.packed:
        return replace(_packed(tower, call[f"{kind}_grid_thw"], spec, blocks), until=until)
    alone = tower.alone and adapter.layout(tower.base, kind, call)[0].length
    patches = alone or tower.raster()
    if kind == "video":
        videos, frames = call["pixel_values_videos"].shape[:2]
        per_item = [frames] * videos
    else:
        per_item = adapter.tile_counts(tower.base, call)
    budgets = [b for f in per_item for b in frame_budgets(spec, [patches] * f)]
    if len(set(budgets)) > 1:
        raise SpecError(
            f"budget {spec.budget} at site 'vit' leaves frames or tiles of unequal length in one "
            f"batch; choose a share such as 0.5, or a multiple of {' and '.join(_counts(per_item))}"
        )
    items = tuple(patches * f for f in per_item)
    start, final, prefix = (patches,) * len(budgets), tuple(budgets), tower.prefix
    return MergePlan(start, final, items, blocks, until=until, prefix=prefix)


def _counts(per_item: Sequence[int]) -> list[str]:
    return [str(n) for n in sorted(set(per_item))]


def _packed(tower: Tower, grid: Tensor, spec: Spec, blocks: int) -> MergePlan:
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
        for size, budget in zip(frame, frame_budgets(spec, frame), strict=True):
            final += _share_out(budget, _take(rest, size), spec)
    items = tuple(sum(frame) for frame in frames)
    return MergePlan(tuple(windows), tuple(final), items, blocks, raster)


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


def frame_budgets(spec: Spec, frames: Sequence[int]) -> list[int]:
    """Budget of every frame: a share holds for each, a whole number is spread over an item's."""
    if isinstance(spec.budget, float):
        return [count(spec.budget, n) or 1 for n in frames]
    return _share_out(count(spec.budget, sum(frames)) or 0, frames, spec)


def _share_out(budget: int, parts: Sequence[int], spec: Spec) -> list[int]:
    """Split a budget by size: largest remainder, first part first, at least 1 (else SpecError)."""
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


class Carried:
    """The rest of a matching, carried over from an earlier block.

    `plan` maps the S tokens there are to those after the last block it serves, by similarity of
    `keys` `[S, d]`; no pair crosses the segments of `lengths`.
    """

    def __init__(self, plan: Reduction, keys: Tensor, lengths: Sequence[int]) -> None:
        device = plan.owner.device
        self._target = plan.keep[plan.owner]  # [S] the token each one joins, itself if it stands
        self._left = torch.arange(plan.n, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._segment = torch.arange(len(lengths), device=device).repeat_interleave(self._lengths)
        score = paired_cosine(keys, keys[self._target])
        score = score.masked_fill(self._target == self._left, -torch.inf)
        order = score.argsort(descending=True, stable=True)
        order = order[self._segment[order].argsort(stable=True)]
        begins = torch.tensor([0, *accumulate(lengths)], device=device)
        self._rank = torch.empty_like(order)  # place of each token among those to go, by segment
        self._rank[order] = self._left - begins[self._segment[order]]

    def step(self, targets: Sequence[int]) -> Reduction:
        """From the tokens that are left to `targets` tokens per segment."""
        going = self._lengths - torch.tensor(targets, device=self._rank.device)
        stands = self._rank >= going[self._segment]  # [S]
        place = stands.cumsum(0) - 1
        stays = stands[self._left]
        owner = torch.where(stays, place[self._left], place[self._target[self._left]])
        self._left = self._left[stays]
        return Reduction(stays.nonzero()[:, 0], owner)


class MergePass:
    """The merging so far; all frames lie in one sequence, in towers of any layout.

    `merged` maps patches `[S]` onto the tokens that are left; `keys` are those of the block at
    work.
    """

    def __init__(self, plan: MergePlan, spec: Spec) -> None:
        self.plan = plan
        self.reuse = int(spec.knobs.get("reuse", 1))
        knobs = {name: spec.knobs[name] for name in spec.knobs if name not in ("reuse", "until")}
        self.spec = replace(spec, knobs=knobs)
        self.merged: Reduction | None = None
        self.keys: list[Tensor] = []
        self.lengths = plan.start
        self.rope: Tensor | None = None  # rotary rows of a timm encoder's tokens
        self.whole = False  # the output of every block is read, so it has all patches
        self.over = False  # the last used block is done: what follows sees all patches
        self._sizes: Tensor | None = None  # [S] patches behind each token, once some are merged
        self._bias: Tensor | None = None
        self._cursor = 0
        self._carried: Carried | None = None
        self._until = 0  # the block that makes a plan again

    def enter(self) -> None:
        """Begin a block."""
        self.keys, self._cursor = [], 0

    def bias(self, batch: int, length: int, like: Tensor) -> Tensor | None:
        """Log of the sizes of the next `batch * length` tokens, `[batch, 1, 1, length]`.

        Proportional attention: a token that holds s patches weighs as s keys would.
        """
        if self._bias is None:
            return None
        prefix = self.plan.prefix
        count = batch * (length - prefix)
        part = self._bias[self._cursor : self._cursor + count]
        self._cursor += count
        part = part.to(like.dtype).reshape(batch, 1, 1, -1)
        return F.pad(part, (prefix, 0)) if prefix else part

    def note(self, key: Tensor) -> None:
        """Keep the keys `[B, H, n, d]` of an attention call, the mean of the heads."""
        self.keys.append(key.detach().mean(dim=1)[:, self.plan.prefix :])

    def _split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden[..., : self.plan.prefix, :], hidden[..., self.plan.prefix :, :]

    def merge(self, block: int, hidden: Tensor) -> Tensor:
        """Merge after a block's attention: `[B, n, D]` to `[B, m, D]`, `[S, D]` to `[M, D]`."""
        targets = self.plan.after(block)
        if targets == self.lengths:
            return hidden
        first, rest = self._split(hidden)
        flat = rest.reshape(-1, hidden.shape[-1])
        keys = torch.cat([k.flatten(0, 1) for k in self.keys])  # [S, d]
        sizes = torch.ones(len(flat), device=flat.device) if self._sizes is None else self._sizes
        if self.reuse > 1:
            step = self._carry(block, flat.detach(), keys, sizes, targets)
        else:
            step = self._step(flat.detach(), keys, sizes, targets)
        out = step.apply(flat)
        self._advance(step, sizes, targets)
        return out if hidden.ndim == 2 else _behind(first, out)

    def _carry(
        self, block: int, flat: Tensor, keys: Tensor, sizes: Tensor, targets: tuple[int, ...]
    ) -> Reduction:
        if self._carried is None or block >= self._until:
            self._until = block + self.reuse
            last = self.plan.after(self._until - 1)
            self._carried = Carried(self._step(flat, keys, sizes, last), keys, self.lengths)
        step = self._carried.step(targets)
        return replace(step, weight=_shares(step, sizes))

    def _step(
        self, flat: Tensor, keys: Tensor, sizes: Tensor, targets: tuple[int, ...]
    ) -> Reduction:
        if len({*zip(self.lengths, targets, strict=True)}) == 1:
            return self._step_alike(flat, keys, sizes, targets[0])
        keep = torch.empty(sum(targets), dtype=torch.int64, device=flat.device)
        owner = torch.empty(len(flat), dtype=torch.int64, device=flat.device)
        weight = torch.empty(len(flat), device=flat.device)
        begins = torch.tensor([0, *accumulate(self.lengths)], device=flat.device)
        places = torch.tensor([0, *accumulate(targets)], device=flat.device)
        groups: dict[tuple[int, int], list[int]] = {}
        for index, pair in enumerate(zip(self.lengths, targets, strict=True)):
            groups.setdefault(pair, []).append(index)
        for (n, m), members in groups.items():
            which = torch.tensor(members, device=flat.device)
            old, new = begins[which][:, None], places[which][:, None]  # [G, 1]
            rows = old + torch.arange(n, device=flat.device)  # [G, n]
            found = self._reduce(flat[rows], keys[rows], sizes[rows], m)
            keep[new + torch.arange(m, device=flat.device)] = old + found.keep
            owner[rows] = new + found.owner
            weight[rows] = _shares(found, sizes[rows])
        return Reduction(keep, owner, weight)

    def _step_alike(self, flat: Tensor, keys: Tensor, sizes: Tensor, m: int) -> Reduction:
        """Merge segments of one length: nothing has to be looked up, which on a GPU is time."""
        count, n = len(self.lengths), self.lengths[0]
        x, keys, sizes = (each.unflatten(0, (count, n)) for each in (flat, keys, sizes))
        found = self._reduce(x, keys, sizes, m)
        segment = torch.arange(count, device=flat.device)[:, None]  # [G, 1]
        keep, owner = found.keep + n * segment, found.owner + m * segment
        weight = _shares(found, sizes)
        return Reduction(keep.flatten(), owner.flatten(), weight.flatten())

    def _reduce(self, x: Tensor, keys: Tensor, sizes: Tensor, budget: int) -> Reduction:
        tokens = Tokens(x, signals={"keys": keys, "sizes": sizes})
        found = run(replace(self.spec, budget=budget), tokens)
        if isinstance(found, list) or found.mix is not None or (found.pure and found.m < found.n):
            raise SpecError(
                f"{self.spec.method.name!r} cannot run at site 'vit': it drops tokens, and the "
                "tower's output needs every patch; use a method that merges, such as 'tome@vit:0.5'"
            )
        return found

    def _advance(self, step: Reduction, sizes: Tensor, targets: tuple[int, ...]) -> None:
        before = self.merged
        keep = step.keep if before is None else before.keep[step.keep]
        owner = step.owner if before is None else step.owner[before.owner]
        # Size-weighted merging of merged tokens is the plain mean over the patches.
        self.merged = Reduction(keep, owner)
        self.lengths = targets
        # Whole numbers: exact in any order of summation.
        self._sizes = sizes.new_zeros(step.m).index_add_(0, step.owner, sizes)
        self._bias = self._sizes.log()

    def ends(self, boundaries: Tensor) -> Tensor:
        """Current places of the boundaries `[K]` between whole segments of patches."""
        old = torch.tensor([0, *accumulate(self.plan.start)], device=boundaries.device)
        new = torch.tensor([0, *accumulate(self.lengths)], device=boundaries.device)
        return new[torch.searchsorted(old, boundaries.long())].to(boundaries.dtype)

    def rows(self, table: Tensor) -> Tensor:
        """Rows `[S, d]` of a table per patch, for the tokens that are left."""
        return table if self.merged is None else table[self.merged.keep]

    def expand(self, hidden: Tensor) -> Tensor:
        """Back to all patches: every patch takes the value of its token."""
        first, rest = self._split(hidden)
        if self.merged is None or rest.shape[:-1].numel() == len(self.merged.owner):
            return hidden
        full = self.merged.expand(rest.flatten(0, -2))
        return full if hidden.ndim == 2 else _behind(first, full)

    def shrink(self, hidden: Tensor) -> Tensor:
        """The tokens that are left, `[B, m, D]`, of what `expand` made of them."""
        first, rest = self._split(hidden)
        full = self.merged is not None and rest.shape[:-1].numel() == len(self.merged.owner)
        return _behind(first, self.rows(rest.flatten(0, 1))) if full else hidden

    def per_item(self) -> list[Reduction]:
        """The merging of each image or video, in raster order of its patches."""
        if self.merged is None:
            return [Reduction.identity(n) for n in self.plan.items]
        parts: list[Reduction] = []
        ends = (accumulate(lengths, initial=0) for lengths in (self.plan.start, self.lengths))
        slots, start, slot = dict(zip(*ends, strict=True)), 0, 0
        for size in self.plan.items:
            owner = self.merged.owner[start : start + size]
            tokens = slots[start + size] - slot
            keep = self.merged.keep[slot : slot + tokens] - start
            raster = None if self.plan.raster is None else self.plan.raster[start : start + size]
            parts.append(_in_raster(Reduction(keep, owner - slot), raster))
            start, slot = start + size, slot + tokens
        return parts


def _behind(first: Tensor, flat: Tensor) -> Tensor:
    """Rows `[B * n, D]` behind the protected ones `[B, P, D]`."""
    rest = flat.unflatten(0, (first.shape[0], -1))
    return torch.cat([first, rest], dim=1) if first.shape[1] else rest


def _shares(found: Reduction, sizes: Tensor) -> Tensor:
    """Weight of each source: the method's own, else its share of the patches in its output."""
    if found.weight is not None:
        return found.weight
    total = torch.zeros(found.keep.shape, device=sizes.device)
    total.scatter_add_(-1, found.owner, sizes)
    return sizes / total.gather(-1, found.owner)


def _in_raster(found: Reduction, raster: Tensor | None) -> Reduction:
    """The same map with patches numbered by `raster` `[N]`; outputs ascend by their new place."""
    if raster is None:
        return found
    raster = raster.to(found.owner.device)
    keep, order = raster[found.keep].sort()
    owner = torch.empty_like(found.owner)
    owner[raster] = order.argsort()[found.owner]
    return Reduction(keep, owner)


def add_bias(module: Any, q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor) -> Any:
    """Queries, keys and mask that bring `bias` `[B, 1, 1, S]` into the logits.

    sdpa and eager take an additive mask that broadcasts. Flash takes none, so the bias rides in
    eight extra channels of q and k, which leave the scaled product larger by exactly that much.
    """
    name = str(module.config._attn_implementation)
    if "flash" in name and name != SEGMENTS:  # that one takes a bias as it is
        return (*_widen(q, k, bias, module), mask)
    if "flex" in name:
        bias = bias.expand(-1, -1, q.shape[2], -1)
    return q, k, bias if mask is None else mask + bias


def _widen(q: Tensor, k: Tensor, bias: Tensor, module: Any) -> tuple[Tensor, Tensor]:
    scaling = module.scaling if hasattr(module, "scaling") else module.scale
    # Two channels, value and rounding error, against a power of two: exact enough in bf16.
    lift = 2.0 ** torch.tensor(1 / scaling).log2().ceil()
    value = (bias.double() / (scaling * lift)).transpose(2, 3)  # [B, 1, S, 1]
    high = value.to(k.dtype)
    low = (value - high.double()).to(k.dtype)
    extra_k = torch.cat([high, low, high.new_zeros(*high.shape[:-1], 6)], dim=-1)
    extra_q = torch.zeros_like(extra_k[..., :1, :])
    extra_q[..., :2] = lift
    wide_q = extra_q.expand(-1, q.shape[1], q.shape[2], -1)
    return torch.cat([q, wide_q], -1), torch.cat([k, extra_k.expand(-1, k.shape[1], -1, -1)], -1)
