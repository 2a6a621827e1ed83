"""PruMerge: attention outliers, with their neighbours merged in."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import neighbour_merge
from mmfast.ops.ranking import complement, even_spots, outlier_count, stable_topk


@register("prumerge", paper="2403.15388", needs=("x", "attn", "keys"), adaptive=True, coupled=True)
def prumerge(
    tokens: Tokens,
    budget: int | None,
    *,
    neighbours: int = 32,
    parity: bool = False,
    ratio: float | None = None,
) -> Reduction:
    """Keep the tokens of outlying attention, merged with neighbours, and one summary token.

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
            last; without a budget `int(N * share of outliers)` tokens, which may lose one. A
            batch has one share, and where all tokens are kept the summary is a row of zeros.
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
    listed = stable_topk(attn, count)
    rest = complement(listed, tokens.n)
    merged = neighbour_merge(
        attn, tokens.need("keys"), listed, rest, neighbours=neighbours, raw=parity
    )
    return merged if parity else Reduction(merged.keep, merged.owner, mix=merged.mix)


def kept_tokens(attn: Tensor, parity: bool, ratio: float | None) -> int:
    """Tokens to keep of `attn` `[..., N]` beside the summary when there is no budget."""
    return int(attn.shape[-1] * reference_share(attn, ratio)) if parity else outlier_count(attn)


def reference_share(attn: Tensor, ratio: float | None) -> float:
    """Share of tokens that the reference keeps: `ratio`, or that of the outliers in all items."""
    share = outlier_count(attn) / attn.numel() if ratio is None else ratio
    if not 0.0 <= share <= 1.0:
        raise SpecError(f"knob ratio={ratio} is no share of the tokens; choose one from 0 to 1")
    return share


@register("prumerge_plus", paper="2403.15388", needs=("x", "attn", "keys"), adaptive=True)
def prumerge_plus(
    tokens: Tokens,
    budget: int | None,
    *,
    spatial: float = 0.75,
    neighbours: int = 32,
    parity: bool = False,
    ratio: float | None = None,
) -> Reduction:
    """Keep attention outliers and evenly spaced tokens, merged with neighbours, and one summary.

    PruMerge whose kept tokens also cover the picture (Shang et al., ICCV 2025): three quarters of
    them are evenly spaced over the tokens that attention did not choose, which is the share the
    paper's strides give. The summary is part of the budget, and outputs are weighted means.

    Args:
        tokens: `x` `[..., N, D]`, `attn` `[..., N]` and `keys` `[..., N, d]`.
        budget: Tokens to keep, the summary included; None keeps the attention outliers and every
            s-th token, with s a third of N over their number.
        spatial: Share of evenly spaced tokens under a budget, 0 to 1.
        neighbours: Tokens that a kept one takes in.
        parity: As the reference, without a budget: sums instead of means, kept tokens in the
            order of the paper's list, and a row of zeros where it leaves no token for the summary.
            Needs outliers, a third of the tokens at most. One item.
        ratio: With `parity=true`, a fixed share instead of the outliers': half a stride in, every
            1 / ratio-th token, also those kept already, each of which takes a token from the rest.
    """
    attn, keys = tokens.need("attn"), tokens.need("keys")
    if not 0.0 <= spatial <= 1.0 or neighbours < 0:
        raise SpecError(
            f"'prumerge_plus' got spatial={spatial} and neighbours={neighbours}; choose a share "
            "from 0 to 1 and a number from 0"
        )
    if (parity and budget is not None) or (ratio is not None and not parity):
        raise SpecError(
            f"'prumerge_plus' got parity={parity}, ratio={ratio} and budget {budget}; write "
            "'prumerge_plus?parity=true&ratio=0.125' without a budget, or only a budget"
        )
    if parity:
        listed = reference_list(attn, ratio)
        return neighbour_merge(
            attn, keys, listed, _reference_rest(listed, tokens.n), neighbours=neighbours, raw=True
        )
    if budget is None:
        listed = _strided(attn)
    else:
        samples = round(spatial * (budget - 1))
        top = stable_topk(attn, budget - 1 - samples)
        free = complement(top, tokens.n)
        listed = torch.cat(
            [top, free[..., even_spots(samples, free.shape[-1], free.device)]], dim=-1
        )
    merged = neighbour_merge(
        attn, keys, listed, complement(listed, tokens.n), neighbours=neighbours
    )
    return Reduction(merged.keep, merged.owner, mix=merged.mix)


def _strided(attn: Tensor) -> Tensor:
    n = len(attn)
    outliers = min(max(outlier_count(attn), 1), n - 1)
    top = stable_topk(attn, outliers)
    strided = torch.arange(0, n, max(1, n // outliers // 3), device=attn.device)
    listed = torch.cat([top, strided[~torch.isin(strided, top)]])
    return listed[: n - 1]  # one token at least for the summary


def reference_list(attn: Tensor, ratio: float | None) -> Tensor:
    """The list of kept tokens of the reference for `attn` `[N]`, repeats included."""
    n = len(attn)
    share = reference_share(attn, ratio)
    step = int(1 / share) if share else 0
    if step < (3 if ratio is None else 1):
        raise SpecError(
            f"'prumerge_plus' with parity=true: share {share:g} of kept tokens gives no stride; "
            "leave parity out"
        )
    top = stable_topk(attn, int(n * share))
    if ratio is not None:
        return torch.cat([top, torch.arange(step // 2, n - 1, step, device=attn.device)])
    strided = torch.arange(0, n - 1, step // 3, device=attn.device)
    return torch.cat([top, strided[~torch.isin(strided, top)]])


def _reference_rest(listed: Tensor, n: int) -> Tensor:
    """Rest of the tokens in the reference: every repeat in the list costs the lowest token."""
    free = complement(listed.unique(), n)
    return free[len(listed) - len(listed.unique()) :]
