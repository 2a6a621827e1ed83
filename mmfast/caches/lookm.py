"""LOOK-M: text first, and what leaves of the pictures is folded into what stays."""

from __future__ import annotations

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import fold_evicted, with_last
from mmfast.ops.ranking import stable_topk


@policy("lookm", paper="2406.18139", needs=("x", "attn_sum", "kind"), role="score")
def lookm(tokens: Tokens, budget: int, *, recent: float = 0.5, merge: str = "pivotal") -> Reduction:
    """Keep recent tokens, text, then the most attended; merge evicted visual ones into those.

    Wan et al. (EMNLP Findings 2024). In each head an evicted visual token joins the kept token
    whose key has the highest cosine, and takes its value along. Merged pairs are weighted means:
    the weights of the published `weighted` merge do not add up to 1 and are scaled here.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, `attn_sum` `[..., H, N]`, the attention each token
            received from all queries, and `kind` `[..., N]`.
        budget: Tokens to keep in every head; a share is of all tokens.
        recent: Share of the budget that goes to the last tokens, half as published.
        merge: `averaged`, `pivotal` (each evicted one first averaged with what it joins),
            `weighted` by cosine, or `none`. Evicted text is dropped.

    Raises:
        SpecError: `recent` outside [0, 1] or another merge.
    """
    if not 0 <= recent <= 1:
        raise SpecError(f"knob recent={recent} of 'lookm' is no share; choose from 0 to 1")
    attn, kind = tokens.need("attn_sum").double(), tokens.need("kind")
    if kind.ndim < attn.ndim and tokens.x.ndim > 2:
        kind = kind[..., None, :]  # the same for all heads
    text = (kind == 0).expand(attn.shape)
    score = attn + text * (attn.amax(-1, keepdim=True) + 1)
    last = min(round(recent * budget), budget)
    chosen = stable_topk(score[..., : tokens.n - last], budget - last)
    return fold_evicted(with_last(chosen, last, tokens.n).keep, tokens.x, ~text, merge)
