"""LagKV: tokens that vary most on the scale of the tokens behind them."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, share_out, snap


@policy("lagkv", paper="2504.04704", needs=("x", "values"), role="score")
def lagkv(tokens: Tokens, budget: int, *, sink: int = 16, lag: int = 128) -> Reduction:
    """Keep the first and last tokens, and of each part those that vary most beside the next part.

    Liang et al. (2025): between sink and end the tokens form parts of `lag`. Keys and values of a
    part are scaled by the minima and maxima of the channels of the next part; a token scores by
    the standard deviation over its channels, softmax within the part, sum of keys and values.
    Every part keeps the same share. The last whole part, and what is left behind it, stay.

    Args:
        tokens: Keys `x` and `values`, both `[..., H, N, d]`.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, 16 as published, at most a quarter of the budget.
        lag: Tokens of a part, at most a quarter of the budget, so that parts can be thinned.

    Raises:
        SpecError: A negative sink, or a part of no token.
    """
    if sink < 0 or lag < 1:
        raise SpecError(f"knobs sink={sink}, lag={lag} of 'lagkv': choose at least 0 and 1")
    first, size = min(sink, budget // 4), max(1, min(lag, budget // 4))
    parts = (tokens.n - first) // size - 1
    end = first + parts * size
    kept = budget - first - (tokens.n - end)
    both = tokens.x, tokens.need("values")
    keys, values = (_score(rows[..., first : end + size, :], size) for rows in both)
    score = snap(keys + values)
    group = torch.arange(end - first, device=score.device) // size
    caps = torch.full((max(parts, 1),), size if parts else 0, device=score.device)
    chosen = marked(grouped_topk(score, group, share_out(caps.double(), kept, caps))) + first
    ends = [torch.arange(first), torch.arange(end, tokens.n)]
    wide = [e.to(chosen.device).expand(*chosen.shape[:-1], -1) for e in ends]
    return Reduction.prune(torch.cat([wide[0], chosen, wide[1]], -1), tokens.n)


def _score(rows: Tensor, size: int) -> Tensor:
    """Softmax score `[..., P * size]` of `rows` `[..., (P + 1) * size, d]`, but the last part."""
    parts = rearrange(rows.double(), "... (p s) d -> ... p s d", s=size)
    mine, lag = parts[..., :-1, :, :], parts[..., 1:, :, :]
    low = lag.amin(-2, keepdim=True)
    span = lag.amax(-2, keepdim=True) - low
    scaled = mine.sub(low).div_(span.masked_fill_(span == 0, 1))
    scaled.sub_(scaled.mean(-1, keepdim=True))  # `std` of torch takes four times as long
    spread = torch.linalg.vector_norm(scaled, dim=-1) / max(rows.shape[-1] - 1, 0) ** 0.5
    return snap(spread).softmax(-1).flatten(-2)
