"""PruMerge: the tokens that stick out in attention, with their neighbours merged in."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.complement import complement
from mmfast.ops.neighbour_merge import neighbour_merge
from mmfast.ops.outliers import outlier_count
from mmfast.ops.ranking import stable_topk


@register("prumerge", paper="2403.15388", needs=("x", "attn", "keys"), adaptive=True)
def prumerge(
    tokens: Tokens,
    budget: int | None,
    *,
    neighbours: int = 32,
    parity: bool = False,
    ratio: float | None = None,
) -> Reduction:
    """Keep the tokens whose attention sticks out, merged with neighbours, and one summary token.

    A kept token takes in its nearest tokens by their keys, weighted by attention, and one more
    token sums up all that are not kept (Shang et al., ICCV 2025). The summary is part of the
    budget: M - 1 tokens are kept. Every output is scaled to a weighted mean, so that it has the
    length of an ordinary token.

    Args:
        tokens: `x` `[..., N, D]`, `attn` `[..., N]` and `keys` `[..., N, d]`.
        budget: Tokens to keep, the summary included; None keeps those whose attention is above
            Q3 + 1.5 (Q3 - Q1).
        neighbours: Tokens that a kept one takes in.
        parity: As the reference: sums instead of means, emitted by attention with the summary
            last; without a budget `int(N * share of outliers)` tokens, which may lose one.
        ratio: Without a budget and with `parity=true`, that share instead of the outliers'.
    """
    attn = tokens.need("attn")
    if neighbours < 0:
        raise SpecError(f"knob neighbours={neighbours} of 'prumerge' is negative; choose 0 or more")
    if ratio is not None and (budget is not None or not parity):
        raise SpecError(
            f"knob ratio={ratio} of 'prumerge' is the reference's count; add parity=true "
            "and give no budget"
        )
    count = kept_tokens(attn, parity, ratio) if budget is None else budget - 1
    listed = stable_topk(attn, min(count, tokens.n - 1))
    rest = complement(listed, tokens.n)
    merged = neighbour_merge(
        attn, tokens.need("keys"), listed, rest, neighbours=neighbours, raw=parity
    )
    return merged if parity else Reduction(merged.keep, merged.owner, mix=merged.mix)


def kept_tokens(attn: Tensor, parity: bool, ratio: float | None) -> int:
    """Tokens to keep of `attn` `[..., N]` beside the summary when there is no budget."""
    outliers = outlier_count(attn)
    if not parity:
        return outliers
    return int(attn.shape[-1] * (outliers / attn.numel() if ratio is None else ratio))
