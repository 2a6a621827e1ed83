"""TOVA: what the last token attends to, over all heads."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("tova", paper="2401.06104", needs=("attn_window",), role="score")
def tova(tokens: Tokens, budget: int, *, window: int = 1) -> Tensor:
    """Keep the tokens that the last query attends to most, the same in all heads.

    Oren et al. (EMNLP 2024): the token of the least attention leaves, whatever its place, and the
    heads of a layer decide by their mean. The paper repeats this at every step; here it is done
    once, behind the prompt. The last token has no privilege, as in the paper.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens to keep; a share is of all tokens.
        window: Queries at the end of the prompt that decide, 1 as published.

    Raises:
        SpecError: A window of no query.
    """
    if window < 1:
        raise SpecError(f"knob window={window} of 'tova' holds no query; choose 1 or more")
    votes = tokens.need("attn_window").double()
    if votes.ndim > 1:
        votes = snap(votes.mean(-2, keepdim=True))
    return votes.expand(tokens.x.shape[:-1])
