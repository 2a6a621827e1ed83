"""Script: a similarity graph removes near-duplicates, the question chooses among the rest."""

from __future__ import annotations

from functools import partial

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.clustering import even_edges
from mmfast.ops.dpp import greedy_dpp
from mmfast.ops.ranking import one_by_one, rescale, snap, stable_topk
from mmfast.ops.similarity import relevance, unit_rows


@register("script", paper="2512.01949", needs=("x", "query"), sites=("pre", "llm"))
def script(
    tokens: Tokens, budget: int, *, tau: float = 0.8, floor: float = 0.8, parity: bool = False
) -> Reduction:
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
        parity: As the reference: greedy picks that are large and unlike each pick alone, among
            tokens unlike the words; `joint` may have embeddings in the space of the words.
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

    return one_by_one(partial(_reference, budget=budget) if parity else prune, tokens)


def _reference(item: Tokens, budget: int) -> Reduction:
    """Return the choice of the authors' code, where the graph changes nothing.

    The choice on which graph and greedy picks agree is filled up from these picks, which are as
    many as the budget. Half of the words count, those that match all tokens best.
    """
    joint = item.signal("joint")
    space = (item.x if joint is None else joint).double()
    match = space @ item.need("query").double().T  # [N, T]
    words = stable_topk(snap(match.mean(0)), max(1, match.shape[1] // 2))
    score = snap(-match[:, words].mean(-1))
    quality = (score - score.min()) / (score.max() - score.min() + 1e-6)
    rows = unit_rows(item.x.double()) * quality[:, None]
    gain = snap(quality.square())
    picks = []
    for _ in range(budget):
        (best,) = stable_topk(gain, 1).tolist()
        picks.append(best)
        if gain[best] > 0:
            gain = snap(gain - (rows @ rows[best] / (gain[best].sqrt() + 1e-6)).square())
        gain[best] = -torch.inf
    return Reduction.prune(torch.tensor(picks, dtype=torch.int64, device=gain.device), item.n)
