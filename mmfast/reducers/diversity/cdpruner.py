"""CDPruner: relevant to the question and different from each other."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.dpp import greedy_dpp
from mmfast.ops.ranking import snap
from mmfast.ops.similarity import cosine_table, unit_rows


@register("cdpruner", paper="2506.10967", needs=("x", "query"))
def cdpruner(
    tokens: Tokens, budget: int, *, opposite: bool = False, parity: bool = False
) -> Reduction:
    """Keep tokens that are relevant to the question and unlike each other.

    Greedy maximum of a determinantal point process whose kernel is the cosine of two tokens times
    the relevance of both (Zhang et al., NeurIPS 2025). Once the kept tokens span all others, the
    most relevant of those follow.

    Args:
        tokens: `x` `[..., N, D]` and `query` `[..., T, D]`, the embedded question; where the model
            has image and text embeddings of a common space, give those as signal `joint`
            `[..., N, C]` and as `query` `[..., T, C]`.
        budget: Tokens to keep.
        opposite: Relevance is the negative cosine, which the authors found to work in the common
            space of CLIP. In the space of a language model the cosine itself measures nearness.
        parity: As the reference: `opposite`, scaled over a whole batch; `order` has the picks.
    """
    joint = tokens.signal("joint")
    source = tokens.x if joint is None else joint
    score = relevance(source, tokens.need("query"), opposite=opposite or parity, together=parity)
    found = picks(tokens.x, score, budget)
    pruned = Reduction.prune(found, tokens.n)
    return replace(pruned, order=pruned.owner.gather(-1, found)) if parity else pruned


def picks(x: Tensor, score: Tensor, count: int) -> Tensor:
    """Tokens in the order of picking, `[..., count]`, for `x` `[..., N, D]`, `score` `[..., N]`."""
    return greedy_dpp(unit_rows(x.double()) * score[..., None], snap(score), count)


def relevance(x: Tensor, query: Tensor, *, opposite: bool, together: bool = False) -> Tensor:
    """Mean cosine of each token with the text, scaled to (0, 1], `[..., N]` float64.

    `opposite` takes the negative; `together` scales all items alike, not each by itself.
    """
    score = snap(cosine_table(x, query).mean(-1))
    score = -score if opposite else score
    low, high = score.amin(-1, keepdim=True), score.amax(-1, keepdim=True)
    if together:
        low, high = low.amin(), high.amax()
    scaled = (score - low + 1e-6) / (high - low)
    return torch.where(high > low, scaled, torch.ones_like(score))
