"""ToMe: merge similar tokens by bipartite soft matching."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import Matching, adjacent_merge, match, refuse_block_knobs
from mmfast.ops.ranking import one_by_one


@register("tome", paper="2210.09461", sites=("pre", "vit"))
def tome(
    tokens: Tokens,
    budget: int,
    *,
    class_token: bool = False,
    distill_token: bool = False,
    reuse: int = 1,
    until: float = 1.0,
    parity: bool = False,
) -> Reduction:
    """Merge the most similar pairs of tokens until the budget is met.

    Tokens at even places look for their most similar token at an odd place, the best pairs merge
    into a size-weighted mean (Bolya et al., ICLR 2023). One round removes at most half of the
    tokens; rounds repeat on the merged tokens, in their order of place, until `budget` are left.

    Args:
        tokens: `x` `[..., N, D]`; similarity is the cosine of `keys` where they are given, else
            of `x`; `sizes` `[..., N]` counts the patches each token already holds.
        budget: Tokens to keep.
        class_token: Token 0 is a class token and is never merged.
        distill_token: Token 1 is a distillation token and is never merged.
        reuse: At site `vit`, blocks that one matching serves (after LiteVGGT, 2025).
        until: At site `vit`, the share of the blocks by whose end the budget is reached; 1.0 is
            as published. Ending early saves more (at 0.5 a budget of a half leaves 0.62 of the
            blocks' work instead of 0.75) and may cost accuracy.
        parity: One round as in the reference, even if that leaves more than `budget` tokens, with
            its order of emission: unmerged even tokens, then odd ones.
    """
    refuse_block_knobs("tome", reuse, until)
    protected = class_token + distill_token
    if budget <= protected and not parity:
        raise SpecError(
            f"'tome' cannot keep {budget} tokens beside {protected} protected ones; "
            f"choose at least {protected + 1}"
        )
    sizes = tokens.signal("sizes")
    metric, mass = tokens.signal("keys"), sizes
    metric = tokens.x if metric is None else metric
    mass = torch.ones(metric.shape[:-1], device=metric.device) if mass is None else mass.float()
    total = Reduction.identity(tokens.n, tuple(metric.shape[:-2]), metric.device)
    while total.m > budget:
        count = min(total.m - budget, (total.m - protected) // 2)
        found = match(metric, count, class_token=class_token, distill_token=distill_token)
        step = _merge(found, total.m)
        if parity:
            total = replace(step, order=_emission(found, step, distill_token))
            break
        total = Reduction(total.keep.gather(-1, step.keep), step.owner.gather(-1, total.owner))
        if total.m <= budget:
            break  # only another round needs to know the merged tokens
        step = replace(step, weight=mass)
        mass = step.apply(mass[..., None])[..., 0]
        metric = step.apply(metric.float()) / mass[..., None]
    return total if sizes is None else replace(total, weight=_shares(total, sizes.float()))


def _merge(found: Matching, n: int) -> Reduction:
    """One round as a Reduction: even tokens `source` join the odd ones `target`."""
    lead = found.source.shape[:-1]
    target = torch.arange(n, device=found.source.device).expand(*lead, n).contiguous()
    target.scatter_(-1, 2 * found.source, 2 * found.target + 1)
    odd = torch.arange(1, n, 2, device=target.device).expand(*lead, n // 2)
    return Reduction.merge(torch.cat([2 * found.unmerged, odd], dim=-1), target)


def _emission(found: Matching, step: Reduction, distill_token: bool) -> Tensor:
    """Order of the reference: unmerged even tokens, then odd ones, special tokens in front."""
    even = 2 * found.unmerged
    odd = torch.arange(1, step.n, 2, device=even.device).expand(*even.shape[:-1], step.n // 2)
    parts = [even[..., :1], odd[..., :1], even[..., 1:], odd[..., 1:]]
    emitted = torch.cat(parts if distill_token else [even, odd], dim=-1)
    return step.owner.gather(-1, emitted)


def _shares(total: Reduction, sizes: Tensor) -> Tensor:
    """Weight of each source in its size-weighted mean, `[..., N]`."""
    summed = sizes.new_zeros(total.keep.shape).scatter_add_(-1, total.owner, sizes)
    return sizes / summed.gather(-1, total.owner)


@register("a_tome", paper="2306.16009", adaptive=True)
def a_tome(tokens: Tokens, budget: int | None, *, threshold: float = 0.85) -> Reduction:
    """Merge adjacent tokens of a sequence, the most similar first, into means of whole runs.

    Order in time stays, and steady sounds shrink while quick ones keep their frames (Li et al.,
    Interspeech 2023). Even tokens join the more similar of their two neighbours; rounds repeat on
    the means until `budget` are left, or until no neighbours are above `threshold`. The paper
    spreads such steps over the layers of an encoder; taking them all at once is a choice of this
    project.

    Args:
        tokens: `x` `[..., N, D]`, one sequence whatever its `grid`; likeness is the cosine of
            `keys` where they are given, else of `x`.
        budget: Tokens to keep; None merges by `threshold`.
        threshold: Cosine above which neighbours merge, without a budget.
    """

    def merge(item: Tokens) -> Reduction:
        keys = item.signal("keys")
        return adjacent_merge(item.x if keys is None else keys, budget, threshold)

    return one_by_one(merge, tokens)
