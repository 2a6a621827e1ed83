"""VisPruner: important tokens by attention, diverse ones by removing duplicates."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import one_by_one, share_out, stable_topk
from mmfast.ops.similarity import cosine_table
from mmfast.ops.video import regions


@register("vispruner", paper="2412.01818", needs=("x", "attn"))
def vispruner(tokens: Tokens, budget: int, *, important: float = 0.5) -> Reduction:
    """Keep the most attended tokens of each frame or tile, and distinct ones of the others.

    Zhang et al., ICCV 2025. Of the tokens that are not important, by descending attention, those at
    even places are compared with those at odd places, and the even ones most similar to an odd one
    go, a few a round; the rest of them stand in front in the next round, by descending likeness.
    The paper removes 8 of 576 tokens a round; here it is a 72nd of a frame, and at least 8. The
    reference fails where an odd number of tokens, or less than 16, is left.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`, and `tile` `[..., N]` where there are
            tiles.
        budget: Tokens to keep, shared by frames or tiles in proportion to their size; ties go to
            the lower place.
        important: Share of important tokens, from 0 (distinct ones alone) to 1.
    """
    if not 0 <= important <= 1:
        raise SpecError(
            f"knob important={important} of 'vispruner' is no share; choose one from 0 to 1"
        )

    return one_by_one(lambda item: _prune(item, budget, important), tokens)


def _prune(item: Tokens, budget: int, important: float) -> Reduction:
    region = regions(item)
    size = region.bincount()
    counts = share_out(size, budget, size).tolist()
    groups: dict[tuple[int, int], list[Tensor]] = {}  # equal regions go through rounds together
    for place, count in zip(region.argsort(stable=True).split(size.tolist()), counts, strict=True):
        groups.setdefault((len(place), count), []).append(place)
    keep = []
    for (n, count), places in groups.items():
        place = torch.stack(places)  # [R, n]
        order = stable_topk(item.need("attn")[place], n)
        first = int(count * important)
        rest = _distinct(item.x[place], order[:, first:], count - first)
        keep.append(place.gather(1, torch.cat([order[:, :first], rest], 1)).flatten())
    return Reduction.prune(torch.cat(keep), item.n)


def _distinct(x: Tensor, rest: Tensor, count: int) -> Tensor:
    """Remove tokens `rest` `[R, r]` of `[R, n, D]` that repeat others until `count` are left."""
    if not count:
        return rest[:, :0]
    row = torch.arange(len(x), device=x.device)[:, None, None]
    table = cosine_table(x, x) if rest.shape[1] > count else x
    step = max(8, x.shape[1] // 72)
    while (left := rest.shape[1]) > count:
        even, odd = rest[:, ::2], rest[:, 1::2]
        copies = table[row, even[:, :, None], odd[:, None]].amax(-1)
        order = stable_topk(copies, even.shape[1])[:, min(step, left - count) :]
        rest = torch.cat([even.gather(1, order), odd], 1)
    return rest
