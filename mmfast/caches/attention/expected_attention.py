"""Expected attention: what queries to come will look at, from those that have been."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import by_heads
from mmfast.ops.ranking import snap

_TINY = 1e-30  # an attention of nothing


@policy(
    "expected_attention",
    paper="2510.00636",
    needs=("x", "values", "query_mean", "query_cov"),
    role="score",
)
def expected_attention(
    tokens: Tokens,
    budget: int,
    *,
    sink: int = 4,
    future: int = 512,
    covariance: bool = True,
    epsilon: float = 0.0,
) -> Tensor:
    """Keep the first tokens, and those of the greatest expected attention times value length.

    Devoto et al. (2025): queries before RoPE are nearly normally distributed. Turned by the mean
    rotation of the positions to come, their mean and covariance give the mean of the exponential of
    each logit, which is softmaxed over the tokens and averaged over the query heads of a key head.
    As the bound of a stream it reads all queries that came, and the heads of a layer, which keep
    the same tokens there, add up their scores.

    Args:
        tokens: Keys `x` and `values` `[..., H, N, d]`; `query_mean` `[..., H, G, d]` and
            `query_cov` `[..., H, G, d, d]` of the queries to come, on the scale of logits.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, 4 as published, at most a quarter of the budget; as many
            queries at the beginning do not count.
        future: Positions behind the prompt that are averaged, 512 as published.
        covariance: Use the covariance, too.
        epsilon: What is added to each expected attention.

    Raises:
        SpecError: A negative sink or epsilon, or no position.
    """
    if min(sink, epsilon) < 0 or future < 1:
        raise SpecError(
            f"knobs sink={sink}, epsilon={epsilon}, future={future} of 'expected_attention': "
            "choose 0 or more, and 1 or more positions"
        )
    first = min(sink, budget // 4)
    mean, cov = (tokens.need(name) for name in ("query_mean", "query_cov"))
    read = partial(_expected, first, epsilon, covariance)
    score = by_heads(read, mean.shape[-2], tokens.x, tokens.need("values"), mean, cov)
    ends = score.new_full((*score.shape[:-1], first), torch.inf)
    return torch.cat([ends, score], -1)


def _expected(
    first: int,
    epsilon: float,
    covariance: bool,
    x: Tensor,
    values: Tensor,
    mean: Tensor,
    cov: Tensor,
) -> Tensor:
    """Scores `[H, N - first]` of keys `x` and values `[H, N, d]`, by queries of G heads each."""
    keys = x.double()[:, None]  # [H, 1, N, d]
    mean, cov = mean.double(), cov.double()
    logits = (keys @ mean[..., None]).squeeze(-1)  # [H, G, N]
    if covariance:
        logits = logits + ((keys @ cov) * keys).sum(-1) / 2
    expected = logits[..., first:].softmax(-1).mean(-2) + epsilon
    length = torch.linalg.vector_norm(values.double()[:, first:], dim=-1)
    return snap((expected * length).clamp_min(_TINY).log())
