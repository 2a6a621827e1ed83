"""HoliTom: merge static tokens over windows of frames, prune the rest by attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction, gather_rows
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import dpc_knn
from mmfast.ops.ranking import complement, index_mask, stable_topk
from mmfast.ops.similarity import nearest_rows, unit_rows
from mmfast.ops.video import (
    Quota,
    Segment,
    exact_quota,
    paper_quota,
    static_places,
    static_windows,
    temporal_cosine,
)


@dataclass(frozen=True)
class _HoliTomKnobs:
    tau: float
    beta: float
    neighbours: int
    window: int
    ratio: float


@register("holitom", paper="2505.21334", needs=("x", "attn"), adaptive=True, temporal=True)
def holitom(
    tokens: Tokens,
    budget: int | None,
    *,
    tau: float | None = None,
    beta: float = 0.6,
    neighbours: int = 7,
    window: int = 1024,
    ratio: float = 1.0,
    parity: bool = False,
) -> Reduction:
    """Merge tokens that stay the same over a window of frames, prune the others by attention.

    Windows maximise the tokens saved by static places (Shao et al., NeurIPS 2025). Static places
    are averaged over their window and clustered; of each frame's other tokens the most attended
    stay. Counts follow the paper (clusters rounded, frames rounded up); then the least attended
    are given up, or the best of those left out taken back, until the budget is met exactly.

    Args:
        tokens: `x` `[..., N, D]`, `attn` `[..., N]`; without a `grid` it is one frame.
        budget: Tokens to keep; None takes the paper's own counts for `ratio`.
        tau: Cosine above which a place is static; by default 0.65 up to an eighth of the tokens
            and 0.80 above, after the paper's two settings.
        beta: Weight of a cluster's centre against the mean of what joined it.
        neighbours: K of the density.
        window: Most frames in a window.
        ratio: Share to keep without a budget; 1 merges static places and keeps everything else.
        parity: Emit in the order of the reference: by segment, static tokens first.
    """
    share = ratio if budget is None else budget / tokens.n
    cut = (0.65 if share <= 0.125 else 0.80) if tau is None else tau
    knobs = _HoliTomKnobs(cut, beta, neighbours, window, share)
    frames = 1 if tokens.grid is None else tokens.grid[0]
    lead, width = tokens.x.shape[:-2], tokens.x.shape[-1]
    attn = tokens.need("attn").reshape(-1, frames, tokens.n // frames)
    x = tokens.x.reshape(*attn.shape, width)
    items = [_reduce(*item, budget, knobs) for item in zip(x, attn, strict=True)]
    items = items if parity else [replace(item, order=None) for item in items]
    return Reduction.stack(items, tuple(lead))


def static_plan(
    x: Tensor, tau: float, window: int, share: float
) -> tuple[Tensor, list[Segment], int, float]:
    """Cosine with the next frame `[T - 1, n]`, windows, tokens they save, share of the others."""
    total = len(x) * x.shape[1]
    similarity = temporal_cosine(x.flatten(0, 1), len(x))
    segments, saved = static_windows(similarity > tau, window)
    return similarity, segments, saved, min(share / ((total - saved) / total), 1)


def _reduce(x: Tensor, attn: Tensor, budget: int | None, knobs: _HoliTomKnobs) -> Reduction:
    """One video: `x` `[T, n, D]`, `attn` `[T, n]`."""
    similarity, segments, _, ratio = static_plan(x, knobs.tau, knobs.window, knobs.ratio)
    alike = similarity > knobs.tau
    static = [static_places(alike, segment) for segment in segments]
    dynamic = torch.ones_like(attn, dtype=torch.bool)
    late = torch.zeros_like(dynamic)
    for (first, last), places in zip(segments, static, strict=True):
        dynamic[first : last + 1, places] = False
        late[first + 1 : last + 1, places] = True
    sizes = torch.stack(static).sum(-1).tolist()
    quota = paper_quota(sizes, dynamic, attn, ratio)
    if budget is not None:
        quota = exact_quota(quota, sizes, dynamic, late, attn, budget)
    return _build(x, segments, static, quota, knobs)


def _build(
    x: Tensor, segments: list[Segment], static: list[Tensor], quota: Quota, knobs: _HoliTomKnobs
) -> Reduction:
    """The Reduction of a quota; its `order` is segment by segment, static tokens first."""
    frames, n, _ = x.shape
    index = torch.arange(frames * n, device=x.device).reshape(frames, n)
    target, weight = torch.full_like(index, -1), torch.ones(frames, n, device=x.device)
    emitted: list[Tensor] = []
    for segment, places, clusters in zip(segments, static, quota.clusters, strict=True):
        rows = slice(segment[0], segment[1] + 1)
        if clusters:
            spots = places.nonzero()[:, 0]
            centres, member = _cluster(x[rows, spots], clusters, knobs.neighbours)
            standing = index[segment[0], spots[centres]]
            target[rows, spots] = standing[member]
            alone = quota.released[rows, spots]
            weight[rows, spots] = _weights(centres, member, knobs.beta) / (~alone).sum(0)
            emitted.append(standing)
        single = (quota.chosen | quota.released)[rows]
        emitted.append(index[rows][single])
    single = quota.chosen | quota.released
    target = torch.where(single, index, target).flatten()
    weight = weight.masked_fill(single, 1.0).flatten()
    order = torch.cat(emitted)
    merged = Reduction.merge(order, target, weight)
    pure = not any(quota.clusters)
    return replace(merged, weight=None if pure else weight, order=merged.owner[order], pure=pure)


def _cluster(x: Tensor, count: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Cluster the static places `x` `[frames, places, D]` of a window by their mean."""
    if count == x.shape[1]:  # every place is a centre
        centres = torch.arange(count, device=x.device)
        return centres, centres
    return dpc_knn(x.float().mean(0), count, neighbours)


def _weights(centres: Tensor, member: Tensor, beta: float) -> Tensor:
    """Weight of each place in its cluster: `beta` for a centre, the rest shared by what joined."""
    joined = member.bincount(minlength=len(centres)) - 1  # per cluster
    weight = ((1 - beta) / joined.clamp_min(1))[member]
    weight[centres] = torch.where(joined > 0, beta, 1.0)
    return weight


@register("holitom_inner", paper="2505.21334", needs=("x", "attn"), sites=("llm",), layer=2)
def holitom_inner(tokens: Tokens, budget: int) -> Reduction:
    """Keep the most attended tokens and fold each other one into its most similar kept one.

    Tokens are folded in ascending order, each time halving earlier weights (Shao et al., NeurIPS
    2025): of c tokens joining a kept one, the last has weight 1/2, the one before 1/4, and the
    kept token itself 2^-c. The paper runs it before layer 18 of 28; the default layer is 2 so
    that it exists in small models.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`.
        budget: Tokens to keep.
    """
    attn, n = tokens.need("attn"), tokens.n
    keep = stable_topk(attn, budget)  # [..., M], by rank: ties of similarity go to the best
    kept, rest = index_mask(keep, n), complement(keep, n)
    rows = unit_rows(tokens.x)
    partner = nearest_rows(gather_rows(rows, rest), gather_rows(rows, keep))
    target = torch.arange(n, device=attn.device).expand(attn.shape).contiguous()
    target.scatter_(-1, rest, keep.gather(-1, partner))
    merged = Reduction.merge(keep, target)
    weight = _halvings(merged.owner, kept)
    return Reduction(merged.keep, merged.owner, weight=weight)


def _halvings(owner: Tensor, kept: Tensor) -> Tensor:
    """Weights `[..., N]` of repeated halving: 2^-(joins from this one on), 2^-joins if kept."""
    # Within each output: joined sources in ascending order, the kept one in front of them.
    n = owner.shape[-1]
    place = torch.arange(n, device=owner.device).expand_as(owner)
    key = owner * (n + 1) + torch.where(kept, 0, place + 1)
    order = key.argsort(dim=-1, stable=True)
    sorted_owner = owner.gather(-1, order)
    ends = torch.searchsorted(sorted_owner, sorted_owner, right=True)
    after = torch.empty_like(owner).scatter_(-1, order, ends - place)  # sources from here on
    return torch.exp2(-(after - kept.long()).float())
