"""FastVID: cut a video into segments; keep attended and dense tokens in each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import dpc_knn
from mmfast.ops.ranking import grouped_topk, one_by_one, share_out
from mmfast.ops.similarity import cosine_parts, nearest
from mmfast.ops.video import shots


@dataclass(frozen=True)
class _FastVidKnobs:
    segments: int
    tau: float
    context: float
    every: int
    neighbours: int
    beta: float


@register("fastvid", paper="2503.11187", needs=("x", "attn"), temporal=True)
def fastvid(
    tokens: Tokens,
    budget: int,
    *,
    segments: int = 8,
    tau: float = 0.9,
    context: float = 0.4,
    every: int = 4,
    neighbours: int = 4,
    beta: float = 0.6,
) -> Reduction:
    """Keep the most attended tokens of every frame and merge the others into dense anchors.

    Segments end at the least similar adjacent frames and wherever similarity falls below `tau`;
    in a segment, cluster centres of every fourth frame are anchors, which other tokens join
    (Shen et al., NeurIPS 2025). A budget is shared among segments, anchor frames and frames by
    size, so that it is met exactly; that, and that anchors are chosen before the attended tokens,
    without noise in the density, are choices of this project.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`; without a `grid` it is one frame.
        budget: Tokens to keep.
        segments: Segments to cut at least, of 32 frames; of fewer frames a quarter of them.
        tau: Adjacent frames below this cosine are always cut.
        context: Share of anchors in the budget, from 0 (the rest is dropped) to 1.
        every: Frames from one anchor frame to the next.
        neighbours: K of the density.
        beta: Least weight of an anchor against the mean of what joined it; of c tokens that
            joined, an anchor has `max(beta, 1 / (c + 1))`.
    """
    knobs = _FastVidKnobs(segments, tau, context, every, neighbours, beta)
    return one_by_one(lambda item: _reduce(item, budget, knobs), tokens)


def _reduce(item: Tokens, budget: int, knobs: _FastVidKnobs) -> Reduction:
    frames = 1 if item.grid is None else item.grid[0]
    n = item.n // frames
    video = item.x.unflatten(0, (frames, n))
    attn = item.need("attn").unflatten(0, (frames, n))
    parts = shots(video, min(knobs.segments, -(-frames // 4)), knobs.tau)
    sizes = torch.tensor([(last - first + 1) * n for first, last in parts])
    quotas = share_out(sizes, budget, sizes).tolist()
    target = torch.full((item.n,), -1, dtype=torch.int64, device=item.x.device)
    for (first, last), quota in zip(parts, quotas, strict=True):
        if quota:
            rows = slice(first, last + 1)
            joined = _segment(video[rows], attn[rows], quota, knobs)
            place = slice(first * n, (last + 1) * n)
            target[place] = torch.where(joined < 0, -1, joined + first * n)
    own = target == torch.arange(item.n, device=target.device)
    keep = own.nonzero()[:, 0]
    merged = Reduction.merge(keep, target)
    return Reduction(merged.keep, merged.owner, _weights(merged, own, knobs.beta))


def _segment(video: Tensor, attn: Tensor, quota: int, knobs: _FastVidKnobs) -> Tensor:
    """Output token that each token of a segment joins, `[F * n]`; itself if kept, -1 if dropped."""
    frames, n, _ = video.shape
    anchor_frames = torch.arange(0, frames, knobs.every)
    room = torch.full((len(anchor_frames),), n)
    count = min(round(quota * knobs.context), len(anchor_frames) * n)
    anchor = torch.zeros(frames, n, dtype=torch.bool, device=video.device)
    each = share_out(torch.ones(len(room)), count, room).tolist()
    for frame, centres in zip(anchor_frames.tolist(), each, strict=True):
        if centres:
            anchor[frame, dpc_knn(video[frame].float(), centres, knobs.neighbours)[0]] = True
    free = (~anchor).sum(-1)
    salient = grouped_topk(
        attn.double().masked_fill(anchor, -torch.inf),
        torch.zeros_like(anchor, dtype=torch.int64),
        share_out(free, quota - count, free)[:, None],
    )
    itself = torch.arange(frames * n, device=video.device)
    kept = (anchor | salient).flatten()
    if not count:
        return torch.where(kept, itself, -1)
    anchors = anchor.flatten().nonzero()[:, 0]
    rows = video.flatten(0, 1)
    closest = torch.cat([nearest(part) for part in cosine_parts(rows, rows[anchors])])
    return torch.where(kept, itself, anchors[closest])


def _weights(merged: Reduction, own: Tensor, beta: float) -> Tensor:
    """Weight of each source: an anchor's own part, the rest shared by what joined it."""
    others = (merged.sizes() - 1).gather(-1, merged.owner.clamp_min(0)).double()
    anchor = (1 / (others + 1)).clamp_min(beta).where(others > 0, 1.0)
    return torch.where(own, anchor, (1 - anchor) / others.clamp_min(1)).float()
