"""How much a token has to do with the question."""

from __future__ import annotations

from torch import Tensor

from mmfast.ops.cosine_table import cosine_table
from mmfast.ops.snap import snap


def relevance(x: Tensor, query: Tensor) -> Tensor:
    """Relevance of each token to the words of the question, `[..., N]` float64.

    The cosine with a word counts as far as it exceeds that word's mean over all tokens, so that a
    word near everything says nothing; a token has the relevance of its best word.

    Args:
        x: `[..., N, D]`.
        query: `[..., T, D]`, in the space of `x`.
    """
    table = cosine_table(x, query)
    return snap((table - table.mean(dim=-2, keepdim=True)).amax(dim=-1))
