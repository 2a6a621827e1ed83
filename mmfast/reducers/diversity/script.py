"""Script: a similarity graph removes near-duplicates, the question chooses among the rest."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import even_edges
from mmfast.ops.dpp import greedy_dpp
from mmfast.ops.ranking import one_by_one, rescale, stable_topk
from mmfast.ops.similarity import relevance, unit_rows


@register("script", paper="2512.01949", needs=("x", "query"), sites=("pre", "llm"))
def script(tokens: Tokens, budget: int, *, tau: float = 0.8, floor: float = 0.8) -> Reduction:
    """Drop near-duplicates in a similarity graph, then keep tokens relevant to the question.

    Even tokens with an edge to an odd one go, the most redundant first (degree times mean cosine),
    as long as `budget` are left; a determinantal point process whose quality is the relevance to
    the question picks among the others (Yang et al., TMLR 2025). The paper takes what both parts
    keep; running them in turn, which meets a budget, and the scale of relevance are choices of
    this project.

    Args:
        tokens: `x` `[..., N, D]` and `query` `[..., T, D]`.
        budget: Tokens to keep.
        tau: Cosine above which two tokens are joined by an edge.
        floor: Quality of the least relevant token, where the most relevant has 1; from 0 (the
            question decides) to 1 (diversity alone).
    """

    def prune(item: Tokens) -> Reduction:
        free = torch.ones(item.n, dtype=torch.bool, device=item.x.device)
        if item.n > 1:
            degree, redundancy, _ = even_edges(item.x, tau)
            count = min(int((degree > 0).sum()), item.n - budget)
            free[2 * stable_topk(redundancy, count)] = False
        rest = free.nonzero()[:, 0]
        score = rescale(relevance(item.x, item.need("query"))[rest])
        quality = floor + (1 - floor) * score
        rows = unit_rows(item.x[rest].double()) * quality[:, None]
        return Reduction.prune(rest[greedy_dpp(rows, quality, budget)], item.n)

    return one_by_one(prune, tokens)
