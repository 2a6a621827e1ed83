"""Downsampling: the input at a lower resolution, the baseline that every method has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Mix, Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens

Grid = tuple[int, int, int]


@register("downsample", sites=("pixel", "pre"), resizes=True)
def downsample(tokens: Tokens, budget: int) -> Reduction:
    """Resize to the largest raster whose tokens do not exceed the budget.

    The baseline of VTC-Bench (arXiv 2510.07143). Rows and columns shrink alike, the aspect ratio
    kept to half a token; below one token a frame, so does the number of frames. At `pixel` the
    pictures are resized, so that positions, too, are those of the smaller picture. Elsewhere
    features are interpolated bilinearly, as LLaVA-OneVision pools its frames. An image cut into
    tiles keeps its overview, and its mosaic gets what is left; where the overview alone exceeds the
    budget, the mosaic goes.

    Args:
        tokens: `x` `[..., N, D]`, with a `grid`, or with `place` and `tile`; else one row.
        budget: Tokens to keep at most; fewer are kept where no raster has exactly so many.

    Raises:
        SpecError: The tokens are what another stage left of a raster.
    """
    whole = tokens.grid or (1, 1, tokens.n)
    tiled = tokens.grid is None and (tokens.has("place") or tokens.has("tile"))
    found = _in_tiles(tokens, budget) if tiled else resize_plan(whole, fit(whole, budget))
    lead, device = tokens.x.shape[:-2], tokens.x.device
    keep, owner, *mix = (each.to(device).expand(*lead, -1).contiguous() for each in found)
    return Reduction(keep, owner, mix=Mix(*mix))


def fit(grid: Grid, budget: int) -> Grid:
    """The largest `(frames, rows, columns)` of a raster's shape with at most `budget` tokens."""
    t, h, w = grid
    room = budget // t
    if room == 0:
        return budget, 1, 1
    sides = {(y, max(1, (2 * y * w + h) // (2 * h))) for y in range(1, h + 1)}
    sides |= {(max(1, (2 * x * h + w) // (2 * w)), x) for x in range(1, w + 1)}
    small = [(y, x) for y, x in sides if y * x <= room]
    return t, *max(small, key=lambda s: (s[0] * s[1], -abs(s[0] * w - s[1] * h), s))


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def resize_plan(grid: Grid, small: Grid) -> Sequence[Tensor]:
    """`keep` `[M]`, `owner` `[N]` and triplets `[K]` that take a raster to a smaller one."""
    keep = owner = output = source = torch.zeros(1, dtype=torch.int64)
    weight = torch.ones(1)
    for n, m in zip(grid, small, strict=True):
        share = _shares(n, m)
        o, s = share.nonzero(as_tuple=True)
        step, place = torch.arange(m), torch.arange(n)
        keep = _outer(keep * n, (2 * step + 1) * n // (2 * m))
        owner = _outer(owner * m, (2 * place + 1) * m // (2 * n))
        output, source = _outer(output * m, o), _outer(source * n, s)
        weight = (weight[:, None] * share[o, s]).flatten()
    return keep, owner, output, source, weight


def _outer(one: Tensor, other: Tensor) -> Tensor:
    return (one[:, None] + other).flatten()


def _shares(n: int, m: int) -> Tensor:
    """Weights `[m, n]` of linear interpolation from n places to m."""
    eye = torch.eye(n, dtype=torch.float64)[None, None]  # a column for each source
    return F.interpolate(eye, (m, n), mode="bilinear", align_corners=False)[0, 0].float()


def _in_tiles(tokens: Tokens, budget: int) -> Sequence[Tensor]:
    """As `resize_plan`, for an overview (tile 0) and the mosaic of the other tiles."""
    first = (0,) * (tokens.x.ndim - 2)  # items of a batch are alike
    tile, place = tokens.signal("tile"), tokens.signal("place")
    tile = torch.zeros(tokens.n, dtype=torch.int64) if tile is None else tile[first].cpu()
    if place is None:  # tiles follow each other whole, and each is resized
        side = math.isqrt(int(tile.bincount()[-1]))
        inside = torch.arange(tokens.n) % side**2
        place = torch.stack([tile, inside // side, inside % side], dim=-1)
    else:
        place = place[first].cpu()
    owner, parts, start = torch.full((tokens.n,), -1), [], 0
    for mine in (tile == 0, tile > 0):
        where = mine.nonzero()[:, 0]
        if len(where) and (start == 0 or int((tile == 0).sum()) == start < budget):
            inside = place[where] - place[where].amin(0)
            t, h, w = (inside.amax(0) + 1).tolist()
            if t * h * w != len(where):
                raise SpecError("'downsample' resizes full rasters; write it before other stages")
            where = where[(inside @ torch.tensor([h * w, w, 1])).argsort()]
            small = fit((t, h, w), min(budget - start, len(where)))
            keep, slot, output, source, weight = resize_plan((t, h, w), small)
            owner[where] = slot + start
            parts.append((where[keep], output + start, where[source], weight))
            start += len(keep)
    keep, output, source, weight = (torch.cat(each) for each in zip(*parts, strict=True))
    rank = keep.argsort().argsort()  # tiles that follow each other whole are in no raster order
    return [
        keep.sort().values,
        torch.where(owner < 0, -1, rank[owner]),
        rank[output],
        source,
        weight,
    ]
