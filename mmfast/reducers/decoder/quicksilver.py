"""QuickSilver: tokens that have settled halt, and neighbours that are alike go on as one."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import one_by_one, stable_topk


@register(
    "quicksilver",
    paper="2506.22396",
    needs=("x", "drift"),
    sites=("llm",),
    stages=tuple(part / 128 for part in range(1, 128)),
    adaptive=True,
    halts=True,
    text=True,
)
def quicksilver(
    tokens: Tokens,
    budget: int | None,
    *,
    drift: float = 0.15,
    fuse: float = 0.1,
    start: float = 0.25,
) -> Reduction:
    """Halt the tokens whose hidden state has settled, and fuse neighbours that are nearly equal.

    Khanna et al. (2025), before every layer: a token that the last layer changed little halts. It
    keeps its hidden state up to the end of the model, and later layers store no keys and values of
    it. Of two neighbours that are nearly equal one goes on, as their mean and at the place of the
    later one, so that nothing sees the future; both have its output. With a budget the tokens that
    change least halt, in equal shares per layer, until so many run. Bit widths that follow a
    token, the paper's fourth part, are missing, and tokens of the answer run through all layers.

    Args:
        tokens: Hidden states `x` `[..., N, D]` and `drift` `[..., N]`, the length of a token's
            change in the layer before over that of its state; a pair has the mean of both.
        budget: Tokens that still run behind the last cut, fused ones included; ties go to the
            lowest index. None halts all that drift less than `drift`.
        drift: Drift below which a token halts, without a budget.
        fuse: Distance of two neighbours, over their mean length, below which they fuse; 0 is never.
        start: Depth of the first cut, a share of the layers from 0 up to 1.
    """
    if drift < 0 or fuse < 0:
        raise SpecError(
            f"knobs drift={drift}, fuse={fuse} of 'quicksilver' are no distances; choose 0 or more"
        )

    def halt(item: Tokens) -> Reduction:
        change = item.need("drift").float()
        most = item.n if budget is None else item.n - budget
        first = _pairs(item.x.float(), fuse, most)
        change = change.index_copy(0, first + 1, (change[first] + change[first + 1]) / 2)
        running = torch.ones(item.n, dtype=torch.bool, device=change.device)
        running[first] = False
        able = running.nonzero()[:, 0]
        best = able[stable_topk(change[able], len(able) if budget is None else budget)]
        if budget is None:
            best = best[: int((change[best] >= drift).sum())]
        joins = torch.isin(first + 1, best)
        if not bool(joins.any()):
            return Reduction.prune(best, item.n)
        target = torch.full((item.n,), -1, dtype=torch.int64, device=best.device)
        target[best] = best
        target[first[joins]] = first[joins] + 1
        return Reduction.merge(best, target)

    return one_by_one(halt, tokens)


def _pairs(x: Tensor, fuse: float, most: int) -> Tensor:
    """First tokens of at most so many disjoint pairs of neighbours in `x` `[N, D]`, ascending.

    Of more pairs the closest; along a run of tokens that are all alike every other one begins one.
    """
    size = x.norm(dim=-1)
    mean = ((size[1:] + size[:-1]) / 2).clamp_min(torch.finfo(x.dtype).tiny)
    gap = (x[1:] - x[:-1]).norm(dim=-1) / mean  # [N - 1]
    at = torch.arange(len(gap), device=x.device)
    alike = gap < fuse
    run = at - (at + 1).masked_fill(alike, 0).cummax(0).values  # place in its run
    first = (alike & (run % 2 == 0)).nonzero()[:, 0]
    closest: Tensor = first[stable_topk(-gap[first], most)].sort().values
    return closest
