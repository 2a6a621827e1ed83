"""SAINT: tokens with many similar neighbours are redundant."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction, gather_rows
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import even_edges
from mmfast.ops.ranking import complement, snap, stable_topk
from mmfast.ops.similarity import cosine_parts, nearest, unit_rows


@register(
    "saint",
    paper="2503.11549",
    sites=("pre", "vit", "llm"),
    inner=("key_mean",),
    adaptive=True,
)
def saint(
    tokens: Tokens,
    budget: int | None,
    *,
    tau: float = 0.75,
    neighbours: int = 5,
    gamma: float = 10.0,
    full: int = 0,
) -> Reduction:
    """Drop tokens at even places that many at odd places resemble.

    A bipartite graph joins even and odd tokens whose cosine is at least `tau` (Jeddi et
    al., 2025). Without a budget one round drops as many even tokens as have `neighbours` edges,
    those of most redundancy: degree times `exp(gamma * (mean cosine of the edges - tau))`. Inside
    LLaVA's decoder the authors do that behind each of layers 7 to 16 with a `tau` of 0.83, from
    `saint@llm8?tau=0.83` to `llm17` here. Rounds that meet a budget, by half of the
    even tokens at most, are ours.

    Args:
        tokens: `x` `[..., N, D]`; likeness is the cosine of keys where they are given (`keys`, and
            `key_mean` of the layer before the cut), else of `x`. With `sizes` (inside a vision
            tower, whose output needs every patch) a dropped token takes the value of the most
            similar kept one.
        budget: Tokens to keep; None lets the vote decide.
        tau: Least cosine of two neighbours, above 0.
        neighbours: Neighbours with which a token votes to go.
        gamma: Weight of the mean cosine of the edges against their number; 0 counts edges alone.
        full: From 1 on, rounds over the graph of all tokens that meet a budget, as in LLaVA's tower
            with 16: one in `full` goes, of the largest sums of cosines, and the number that went
            is `full` of the next round.

    Raises:
        SpecError: A negative `full`, or one above 0 without a budget.
    """
    if full < 0 or (full and budget is None):
        raise SpecError(
            f"knob full={full} of 'saint' is negative or has no budget; choose 0, "
            "or 1 or more with a budget such as 'saint:0.5?full=16'"
        )
    metric = next(k for name in _LIKENESS if (k := tokens.signal(name)) is not None)
    if full and budget is not None:
        return _outcome(tokens, _least_alike(metric, budget, full), metric)
    kept = torch.arange(tokens.n, device=metric.device).expand(metric.shape[:-1])
    while kept.shape[-1] > (budget or 1):
        degree, total, mean = even_edges(gather_rows(metric, kept), tau)
        if budget is None:  # run() hands over one item at a time
            count = int((degree >= neighbours).sum())
        else:
            count = min(kept.shape[-1] - budget, (degree.shape[-1] + 1) // 2)
        # The logarithm of the redundancy, so that no gamma overflows; tokens without an edge come
        # last, by the mean of all cosines, which is below tau.
        edged = degree.log() + gamma * (total / degree - tau)
        redundancy = edged.where(degree > 0, mean - 1)
        going = 2 * stable_topk(redundancy, count)
        kept = kept.gather(-1, complement(going, kept.shape[-1]))
        if budget is None:
            break
    return _outcome(tokens, kept, metric)


_LIKENESS = ("key_mean", "keys", "x")


def _least_alike(metric: Tensor, budget: int, part: int) -> Tensor:
    """Places `[..., budget]` that rounds over the full graph leave of `metric` `[..., N, d]`."""
    rows = unit_rows(metric.double())
    kept = torch.arange(rows.shape[-2], device=rows.device).expand(rows.shape[:-1])
    while (n := kept.shape[-1]) > budget:
        left = gather_rows(rows, kept)
        alike = snap((left * left.sum(-2, keepdim=True)).sum(-1))  # a sum of cosines each
        part = min(n - budget, max(1, n // part))
        kept = kept.gather(-1, complement(stable_topk(alike, part), n))
    return kept


def _outcome(tokens: Tokens, kept: Tensor, metric: Tensor) -> Reduction:
    """Drop all but `kept`, or have them stand for the others in a tower."""
    if tokens.signal("sizes") is None:
        return Reduction.prune(kept, tokens.n)
    return _represented(kept, metric)


def _represented(kept: Tensor, metric: Tensor) -> Reduction:
    """Keep `kept` `[..., M]`; every other token joins the most similar one with weight 0."""
    rows = gather_rows(metric, kept)
    closest = torch.cat([nearest(part) for part in cosine_parts(metric, rows)], -1)
    target = kept.gather(-1, closest).scatter_(-1, kept, kept)
    own = target == torch.arange(metric.shape[-2], device=kept.device)
    return Reduction.merge(kept, target, own.to(torch.get_default_dtype()))
