"""Fold evicted tokens into the kept ones they resemble most."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.segments import Segments
from mmfast.ops.complement import complement
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.nearest import nearest
from mmfast.ops.segment_merge import segment_merge
from mmfast.ops.unit import unit_rows

FOLDS = ("averaged", "pivotal", "weighted", "none")
_ROWS = 256  # evicted tokens compared at once, in a table that stays in the cache of a core


def fold_evicted(keep: Tensor, keys: Tensor, joins: Tensor, fold: str) -> Reduction:
    """Every evicted token joins the kept one whose key points most nearly the same way.

    Args:
        keep: `[..., M]` kept tokens, ascending.
        keys: `[..., N, d]`.
        joins: `[..., N]` bool; evicted tokens that do not join are dropped.
        fold: How a kept token k takes in its m tokens e: `averaged`, the mean of all; `pivotal`,
            the mean of k and of every (k + e) / 2; `weighted`, the mean by cosine, k at 1 and
            opposite ones at 0; `none`, not at all.

    Returns:
        A Reduction onto M tokens whose weights add up to 1.

    Raises:
        SpecError: Another fold.
    """
    if fold not in FOLDS:
        raise SpecError(f"unknown merge {fold!r}; choices: {', '.join(sorted(FOLDS))}")
    n = keys.shape[-2]
    if fold == "none" or keep.shape[-1] == n:
        return Reduction.prune(keep, n)
    gone = complement(keep, n)  # [..., E]
    units = unit_rows(keys)
    slot, cosine = _partners(gather_rows(units, gone), gather_rows(units, keep))
    lost = ~joins.expand(*keep.shape[:-1], n).gather(-1, gone)
    pull = {"averaged": torch.ones_like(cosine), "weighted": cosine.clamp_min(0)}.get(fold)
    pull = torch.full_like(cosine, 0.5) if pull is None else pull  # what it weighs, a kept one 1
    pull = pull.masked_fill(lost, 0)
    pulls = segment_merge(pull[..., None], Segments(slot, keep.shape[-1]))[..., 0]  # [..., M]
    own = 1 + pulls if fold == "pivotal" else torch.ones_like(pulls)
    total = own + pulls
    target = torch.arange(n, device=keep.device).expand(*keep.shape[:-1], n)
    target = target.scatter(-1, gone, keep.gather(-1, slot).masked_fill(lost, -1))
    weight = torch.zeros_like(target, dtype=pull.dtype).scatter_(-1, keep, own / total)
    return Reduction.merge(keep, target, weight.scatter_(-1, gone, pull / total.gather(-1, slot)))


def _partners(gone: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The first most similar kept row of each evicted row, and their cosine, both `[..., E]`."""
    slots, cosines = [], []
    for rows in gone.split(_ROWS, dim=-2):
        table = rows @ kept.transpose(-1, -2)  # [..., e, M]
        slots.append(nearest(table))
        cosines.append(table.gather(-1, slots[-1][..., None]).squeeze(-1))
    return torch.cat(slots, -1), torch.cat(cosines, -1)
