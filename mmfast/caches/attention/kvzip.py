"""KVzip: what the model looks at while it repeats its prompt."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("kvzip", paper="2505.23416", needs=("attn_repeated",), role="score")
def kvzip(tokens: Tokens, budget: int, *, chunk: int = 2048) -> Tensor:
    """Keep in each head what the model attends to when it is told to repeat its prompt.

    Kim et al. (NeurIPS 2025) need no question: behind the prompt the model reads it once more, in
    chunks, each behind a request to repeat it, with the whole cache in front. What a chunk needs of
    the cache to be written down again is what any later question may need. The prompt costs two to
    three times as much.

    Args:
        tokens: `attn_repeated` `[..., H, N]`, the largest attention that an entry receives while
            its chunk is repeated, over all queries and the query heads of a key head, among the
            entries of the chunk and the tokens of the pass.
        budget: Tokens to keep in every head; a share is of all tokens.
        chunk: Tokens of a chunk, at least 1, 2048 as published; read where passes are made.
    """
    return snap(tokens.need("attn_repeated").double())
