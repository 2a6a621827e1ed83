"""FastVID: cut a video into segments; keep attended and dense tokens in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmfast.core.reduction import Mix, Reduction
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
    of each segment the last frame and every fourth before it have anchors, cluster centres of the
    tokens that are left (Shen et al., NeurIPS 2025). As in the authors' code every such token of
    the segment, anchors included, joins one anchor in each of these frames. A budget is shared
    among segments, anchor frames and frames by size, so that it is met exactly; that, and a density
    without noise, are choices of this project.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`; without a `grid` it is one frame.
        budget: Tokens to keep.
        segments: Segments to cut at least, of 32 frames; of fewer frames a quarter of them.
        tau: Adjacent frames below this cosine are always cut.
        context: Share of anchors in the budget, from 0 (the rest is dropped) to 1.
        every: Frames from one anchor frame to the next.
        neighbours: K of the density.
        beta: Least weight of an anchor against the mean of what joined it, itself included; where
            c tokens joined it is `max(beta, 1 / (c + 1))`.
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
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    for (first, last), quota in zip(parts, quotas, strict=True):
        if quota:
            rows = slice(first, last + 1)
            for into, source, weight in _segment(video[rows], attn[rows], quota, knobs):
                columns.append((into + first * n, source + first * n, weight))
    into, source, weight = map(torch.cat, zip(*columns, strict=True))
    target = torch.full((item.n,), -1, dtype=torch.int64, device=item.x.device)
    target[source] = into  # of the anchors that a token joins the last one owns it
    keep = into.unique()
    target[keep] = keep
    merged = Reduction.merge(keep, target)
    return replace(merged, mix=Mix(merged.owner[into], source, weight))


def _segment(
    video: Tensor, attn: Tensor, quota: int, knobs: _FastVidKnobs
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield what a segment keeps: places of outputs, of their sources, and the weights."""
    frames, n, _ = video.shape
    anchor_frames = torch.arange(frames - 1, -1, -knobs.every).flip(0)
    room = torch.full((len(anchor_frames),), n)
    count = min(round(quota * knobs.context), len(anchor_frames) * n)
    each = torch.zeros(frames, dtype=torch.int64)
    each[anchor_frames] = share_out(torch.ones(len(room)), count, room)
    salient = grouped_topk(
        attn.double(),
        torch.zeros_like(attn, dtype=torch.int64),
        share_out(torch.ones(frames), quota - count, n - each)[:, None].to(attn.device),
    ).flatten()
    chosen = salient.nonzero()[:, 0]
    yield chosen, chosen, torch.ones(len(chosen), device=chosen.device)
    rows, others = video.flatten(0, 1), (~salient).nonzero()[:, 0]
    for frame in anchor_frames[each[anchor_frames] > 0].tolist():
        left = others[others // n == frame]
        centres, _ = dpc_knn(rows[left].float(), int(each[frame]), knobs.neighbours, few=False)
        anchors = left[centres]
        parts = cosine_parts(rows[others], rows[anchors])
        joined = torch.cat([nearest(part) for part in parts])
        own, share = _weights(joined.bincount(minlength=len(anchors)), knobs.beta)
        yield anchors, anchors, own
        yield anchors[joined], others, share[joined]


def _weights(count: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Weight of an anchor itself and of each of the `count` tokens that joined it."""
    own = (1 / (count + 1)).clamp_min(beta).where(count > 0, 1.0)
    return own, (1 - own) / count.clamp_min(1)
