"""DART: keep the tokens that repeat a few pivots least."""

from __future__ import annotations

import torch

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import one_by_one, stable_topk
from mmfast.ops.similarity import cosine_table


@register(
    "dart",
    paper="2502.11494",
    needs=("x", "query", "key_norm", "text_key_norm"),
    sites=("llm",),
)
def dart(tokens: Tokens, budget: int, *, pivots: int = 4, words: int = 4) -> Reduction:
    """Keep a few pivots of large key norm, and for each pivot the tokens least similar to it.

    Wen et al., EMNLP 2025: duplication, not importance, says what to drop. The pivots are visual
    and text tokens; one after the other, visual ones first and larger norms first, takes its share
    of the budget among the tokens that no pivot has taken. The reference gives every pivot
    `budget // 8` tokens, so that it keeps 4 more than asked or a few less, and visits pivots in
    the order of a hash table.

    Args:
        tokens: Hidden states `x` `[..., N, D]` and `query` `[..., T, D]`; `key_norm` `[..., N]` and
            `text_key_norm` `[..., T]`, the norms of keys in the layer before.
        budget: Tokens to keep, visual pivots included; ties go to the lowest index.
        pivots: Visual pivots, at least 1.
        words: Text tokens that are pivots too, from 0.
    """
    if pivots < 1 or words < 0:
        raise SpecError(
            f"knobs pivots={pivots}, words={words} of 'dart' are no numbers of tokens; "
            "choose pivots from 1 and words from 0"
        )

    def prune(item: Tokens) -> Reduction:
        keep = stable_topk(item.need("key_norm"), min(pivots, budget))
        said = stable_topk(item.need("text_key_norm"), words)
        rows = torch.cat([item.x[keep], item.need("query")[said]])
        taken = torch.zeros(item.n, dtype=torch.bool, device=keep.device)
        taken[keep] = True
        share, more = divmod(budget - len(keep), len(rows))
        for number, alike in enumerate(cosine_table(rows, item.x)):
            unlike = (-alike).masked_fill(taken, -torch.inf)
            taken[stable_topk(unlike, share + (number < more))] = True
        return Reduction.prune(taken.nonzero()[:, 0], item.n)

    return one_by_one(prune, tokens)
