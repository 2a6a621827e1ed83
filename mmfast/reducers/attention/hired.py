"""HiRED: one budget for the tiles of a high-resolution image."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.image import tile_cover
from mmfast.ops.ranking import grouped_topk, marked, share_out, stable_topk


@register("hired", paper="2408.10945", needs=("attn", "attn_first"))
def hired(tokens: Tokens, budget: int, *, alpha: float = 0.5, parity: bool = False) -> Reduction:
    """Share the budget among the tiles of an image by the saliency of its overview.

    The overview gets `alpha` of the budget, rounded up; the other tiles share the rest by how many
    of the overview's most attended tokens of the first layer lie in each. Within a tile the most
    attended of the late layer stay (Arif et al., AAAI 2025). An image that is not cut into tiles
    keeps its most attended tokens.

    Args:
        tokens: `attn` (late layer) and `attn_first` `[..., N]`; `tile` `[..., N]` int, 0 for the
            overview; `place` `[..., N, 3]` says where tiles lie, else they are taken as
            consecutive strips of the overview.
        budget: Tokens to keep of the whole image.
        alpha: Share of the overview, 0 to 1.
        parity: As the reference: strips, single-precision shares that are cut to whole numbers,
            nothing handed on, so fewer than `budget` tokens may be left. Tiles of equal size.
    """
    if not 0.0 <= alpha <= 1.0:
        raise SpecError(f"knob alpha={alpha} of 'hired' is no share; choose one from 0 to 1")
    late, first = tokens.need("attn"), tokens.need("attn_first")
    tile, place = tokens.signal("tile"), tokens.signal("place")
    if tile is None and not parity:
        return Reduction.prune(stable_topk(late, budget), tokens.n)
    lead = late.shape[:-1]
    tile = torch.zeros_like(late, dtype=torch.int64) if tile is None else tile.long()
    tiles = tile.expand(late.shape).reshape(-1, tokens.n)
    salient, score = first.reshape(-1, tokens.n), late.reshape(-1, tokens.n)
    keep: list[Tensor] = []
    for item, (number, saliency) in enumerate(zip(tiles, salient, strict=True)):
        where = None if parity or place is None else place.reshape(-1, tokens.n, 3)[item]
        rule = _reference_counts if parity else _counts
        counts = rule(number, where, saliency, budget, alpha)
        keep.append(marked(grouped_topk(score[item], number, counts)))
    return Reduction.prune(torch.stack(keep).reshape(*lead, -1), tokens.n)


def _counts(
    tile: Tensor, place: Tensor | None, saliency: Tensor, budget: int, alpha: float
) -> Tensor:
    """Tokens that each tile keeps, `[P]`; they sum to `budget`."""
    sizes = tile.bincount()
    if len(sizes) == 1:
        return sizes.new_full((1,), budget)
    caps = sizes.clone()
    caps[0] = 0
    whole = min(math.ceil(budget * alpha), int(sizes[0]))
    rest = min(budget - whole, int(caps.sum()))
    weights = sizes if not sizes[0] else _salient(tile, place, saliency, alpha)
    counts = share_out(weights, rest, caps)
    counts[0] = budget - rest
    return counts


def _salient(tile: Tensor, place: Tensor | None, saliency: Tensor, alpha: float) -> Tensor:
    """Number of the overview's most attended tokens in each tile, `[P]`."""
    cover = tile_cover(tile, place)
    best = stable_topk(saliency[tile == 0], int(len(cover) * (1 - alpha)))
    return (cover[best] + 1).bincount(minlength=int(tile.max()) + 2)[1:]


def _reference_counts(
    tile: Tensor, place: Tensor | None, saliency: Tensor, budget: int, alpha: float
) -> Tensor:
    """Counts of the reference, `[P]`; they may sum to less than `budget`."""
    sizes = tile.bincount()
    n = int(sizes[0])
    whole = min(int(budget * alpha), n)
    rest = min(budget - whole, (len(sizes) - 1) * n)
    counts = torch.zeros_like(sizes)
    if rest > 0 and len(sizes) > 1:
        salient = _salient(tile, None, saliency, alpha).float()
        counts = (salient / salient.sum() * rest).long().clamp(max=n)
    counts[0] = whole
    return counts
