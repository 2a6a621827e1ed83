"""KV-Squared: what the tokens of the oddest keys look at when they come once more."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("kvsquared", needs=("attn_repeated",), role="score")
def kvsquared(tokens: Tokens, budget: int, *, chunk: int = 2048, asks: float = 0.02) -> Tensor:
    """Keep in each head what the few tokens attend to whose keys differ most from the others.

    Known from the press of this name in kvpress, which has no paper: `kvzip` with few queries. Of
    each chunk of the prompt, the tokens whose keys `keydiff` would keep, in the mean over heads and
    layers, are read behind the prompt in a row, with the whole cache in front and unasked. What
    they need of their chunk stays, and a prompt costs a few per cent more instead of twice as much.

    Args:
        tokens: `attn_repeated` `[..., H, N]`, the largest attention that an entry receives from the
            tokens that are read again of its chunk, over them and the query heads of a key head,
            among the entries of the chunk and the tokens of the pass.
        budget: Tokens to keep in every head; a share is of all tokens.
        chunk: Tokens of a chunk, at least 1.
        asks: Share of a chunk that is read again, at least one token.
    """
    return snap(tokens.need("attn_repeated").double())
