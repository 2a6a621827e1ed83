"""FINCH: the question says of every chunk of the context what is needed of it."""

from __future__ import annotations

import torch

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import with_last
from mmfast.ops.ranking import grouped_topk, marked, share_out


@policy("finch", paper="2408.00167", needs=("attn_counted",), role="score")
def finch(tokens: Tokens, budget: int, *, window: int = 32, chunk: int = 1024) -> Reduction:
    """Keep the question, and in each head of every chunk what its queries attend to.

    Corallo & Papotti (TACL 2024): the context is read chunk by chunk beside the question, whose
    queries say what stays of each chunk. A query that sees many tokens gives each of them little,
    so its attention is multiplied by the number of tokens it sees before the mean is taken.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_counted` `[..., H, N]`, the attention of the
            last `window` queries, each times the number of tokens that it sees, sum over the
            queries and mean over the query heads of a key head.
        budget: Tokens to keep in every head; a share is of all tokens. The window is among them,
            with at most half of the budget; chunks share the rest by their length.
        window: Queries of the question at the end of the prompt, at least 1.
        chunk: Tokens of a chunk; 0 is one chunk of all that stands before the window.

    Raises:
        SpecError: A window of no query, or a negative chunk.
    """
    if window < 1 or chunk < 0:
        raise SpecError(
            f"knobs window={window}, chunk={chunk} of 'finch': choose at least 1 query, and 0 or "
            "more tokens"
        )
    last = min(window, max(budget // 2, 1))
    before = tokens.n - last
    score = tokens.need("attn_counted")[..., :before].double()
    group = torch.arange(before, device=score.device) // (chunk or before)
    sizes = group.bincount()
    counts = share_out(sizes.double(), budget - last, sizes)
    return with_last(marked(grouped_topk(score, group, counts)), last, tokens.n)
