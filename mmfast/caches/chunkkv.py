"""ChunkKV: runs of tokens that belong together, kept or dropped as one."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import with_last
from mmfast.ops.ranking import snap, stable_topk


@policy("chunkkv", paper="2502.00299", needs=("attn_window",), role="score")
def chunkkv(tokens: Tokens, budget: int, *, window: int = 32, chunk: int = 10) -> Reduction:
    """Keep the last tokens, and before them the chunks of tokens that those attend to most.

    Liu et al. (2025): tokens that stand together carry a meaning together, so chunks compete
    instead of tokens. A chunk scores by the mean attention of its tokens over all heads, which
    keep the same; the mean, where the paper has the sum, does not harm a short chunk at the end.
    Of the last chunk that does not fit, the first tokens stay.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens to keep; a share is of all tokens. The window is among them, with at most
            half of the budget.
        window: Queries of the observation window, at least 1.
        chunk: Tokens of a chunk, 10 as published.

    Raises:
        SpecError: A window or chunk of no token.
    """
    if window < 1 or chunk < 1:
        raise SpecError(f"knobs window={window}, chunk={chunk} of 'chunkkv': choose 1 or more")
    last = min(window, max(budget // 2, 1))
    votes = tokens.need("attn_window")[..., : tokens.n - last].double()
    score = _means(votes.mean(-2, keepdim=True) if votes.ndim > 1 else votes, chunk)
    chosen = stable_topk(score, budget - last).expand(*tokens.x.shape[:-2], -1)
    return with_last(chosen, last, tokens.n)


def _means(score: Tensor, size: int) -> Tensor:
    """Mean of the chunk of each token, `[..., N]`."""
    owner = torch.arange(score.shape[-1], device=score.device) // size
    sums = score.new_zeros(*score.shape[:-1], score.shape[-1] // size + 1)
    sums.index_add_(-1, owner, score)
    return snap(sums / owner.bincount(minlength=sums.shape[-1]).clamp_min(1))[..., owner]
