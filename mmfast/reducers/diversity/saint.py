"""SAINT: tokens with many similar neighbours are redundant."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction, gather_rows
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import graph_redundancy
from mmfast.ops.ranking import complement, stable_topk
from mmfast.ops.similarity import cosine_parts, nearest


@register("saint", paper="2503.11549", sites=("pre", "vit", "llm"), adaptive=True)
def saint(
    tokens: Tokens, budget: int | None, *, tau: float = 0.9, neighbours: int = 5
) -> Reduction:
    """Drop tokens at even places that many tokens at odd places resemble.

    Edges of a bipartite graph join even and odd tokens whose cosine is above `tau`. Tokens vote by
    their degree on how many go, and redundancy (degree times mean cosine) says which (Jeddi et
    al., 2025). Repeated rounds until no token votes, or until the budget is met, are a choice
    of this project, as is that a round with a budget drops at most half of the even tokens: to
    drop all of them would be blind sampling.

    Args:
        tokens: `x` `[..., N, D]`; likeness is the cosine of `keys` where they are given, else of
            `x`. With `sizes` (inside a vision tower, whose output needs every patch) a dropped
            token takes the value of the most similar kept one.
        budget: Tokens to keep; None lets the vote decide.
        tau: Cosine above which two tokens are neighbours; 0.9 answered better on the embedded model
            than 0.75.
        neighbours: Neighbours with which a token votes to go, or all odd tokens if they are fewer.
    """
    keys = tokens.signal("keys")
    metric = tokens.x if keys is None else keys
    kept = torch.arange(tokens.n, device=metric.device).expand(metric.shape[:-1])
    while kept.shape[-1] > (budget or 1):
        rows = gather_rows(metric, kept)
        redundancy, degree = graph_redundancy(rows, tau)
        if budget is None:  # run() hands over one item at a time
            count = int((degree >= min(neighbours, kept.shape[-1] // 2)).sum())
        else:
            count = min(kept.shape[-1] - budget, (redundancy.shape[-1] + 1) // 2)
        if not count:
            break
        going = 2 * stable_topk(redundancy, count)
        kept = kept.gather(-1, complement(going, kept.shape[-1]))
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
