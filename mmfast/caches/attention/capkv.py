"""CapKV: tokens that add most to what the output of attention can still express."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import by_heads
from mmfast.ops.ranking import snap

_TINY = 1e-30  # a value of no length


@policy("capkv", paper="2604.25975", needs=("x", "values", "query_mean"), role="score")
def capkv(
    tokens: Tokens, budget: int, *, tau: float = 5.0, sink: int = 4, future: int = 512
) -> Tensor:
    """Keep the first tokens, and those whose values no other token's replace, weighted by queries.

    CapKV (Rethinking KV Cache Eviction via a Unified Information-Theoretic Objective, 2026) keeps
    what tells most of the output of attention. A token weighs as much as its key points the way of
    the mean query to come, and scores by its weight times the leverage of its value among all
    weighted values: a value that many others repeat can go, however much attention it gets.

    Args:
        tokens: Keys `x` and `values` `[..., H, N, d]`; `query_mean` `[..., H, G, d]`, the mean of
            the queries to come of the query heads of a key head.
        budget: Tokens to keep in every head; a share is of all tokens.
        tau: Factor of the cosine of key and mean query, in the exponent of a weight; 0 weighs all
            alike.
        sink: First tokens that stay, at most a quarter of the budget; as many queries at the
            beginning do not count.
        future: Positions behind the prompt that the mean query is turned to.

    Raises:
        SpecError: A negative tau or sink, or no position.
    """
    if min(tau, sink) < 0 or future < 1:
        raise SpecError(
            f"knobs tau={tau}, sink={sink}, future={future} of 'capkv': choose 0 or more, and 1 or "
            "more positions"
        )
    first = min(sink, budget // 4)
    mean = tokens.need("query_mean")
    keys, values = (x[..., first:, :] for x in (tokens.x, tokens.need("values")))
    score = by_heads(partial(_added, tau), mean.shape[-2], keys, values, mean)
    return F.pad(score, (first, 0), value=torch.inf)


def _added(tau: float, keys: Tensor, values: Tensor, mean: Tensor) -> Tensor:
    """Scores `[H, N]` of keys and values `[H, N, d]`, by mean queries `[H, G, d]`."""
    keys, values, mean = keys.double(), values.double(), mean.double()
    mean = F.normalize(mean, dim=-1, eps=_TINY)
    cosine = mean @ F.normalize(keys, dim=-1, eps=_TINY).transpose(-1, -2)  # [H, G, N]
    weight = (tau * (cosine - cosine.amax(-1, keepdim=True))).exp()
    weight = weight.transpose(-1, -2).contiguous()  # [H, N, G]
    # All query heads of a key head in one product.
    sizes = mean.shape[1], values.shape[-1]
    weighted = (weight[..., None] * values[:, :, None]).flatten(-2)  # [H, N, G * d]
    added = (weighted.transpose(-1, -2) @ values).unflatten(1, sizes)  # [H, G, d, d]
    capacity = torch.eye(sizes[1], dtype=added.dtype, device=added.device) + added
    inverse = torch.linalg.inv(capacity).flatten(1, 2)
    rest = torch.matmul(values, inverse.transpose(-1, -2), out=weighted)  # fresh memory is slow
    leverage = rest.unflatten(-1, sizes).mul_(values[:, :, None]).sum(-1)  # [H, N, G]
    return snap((weight * leverage).mean(-1).clamp_min(_TINY).log())
