"""Who stood where before: neighbours in time and space of tokens whose raster has holes."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.tokens import Tokens
from mmfast.ops.paired_cosine import paired_cosine

BEFORE, LEFT, ABOVE = (1, 0, 0), (0, 0, 1), (0, 1, 0)


def raster_links(tokens: Tokens, step: tuple[int, int, int]) -> Tensor:
    """The token that lies `step` earlier, `[N]` int64; -1 where there is none.

    Args:
        tokens: One item with the signal `place` `[N, 3]`; of an image cut into tiles, `tile` tells
            the overview from the mosaic, which share places.
        step: Distance in frames, rows and columns, such as `BEFORE`, `LEFT` or `ABOVE`.
    """
    place, tile = tokens.need("place").long(), tokens.signal("tile")
    plane = torch.zeros_like(place[:, 0]) if tile is None else (tile > 0).long()
    sizes = (place.amax(0) + 1).tolist()

    def code(where: Tensor) -> Tensor:
        t, y, x = where.unbind(-1)
        flat: Tensor = ((plane * sizes[0] + t) * sizes[1] + y) * sizes[2] + x
        return flat

    table = torch.full((2 * sizes[0] * sizes[1] * sizes[2],), -1, device=place.device)
    table[code(place)] = torch.arange(tokens.n, device=place.device)
    earlier = place - torch.tensor(step, device=place.device)
    found = table[code(earlier.clamp_min(0))]
    return found.masked_fill((earlier < 0).any(-1), -1)


def likeness(x: Tensor, link: Tensor) -> Tensor:
    """Cosine of each token `[N, D]` with the one it is linked to, `[N]`; -inf without a link."""
    alike = paired_cosine(x, x.index_select(0, link.clamp_min(0)))
    return alike.masked_fill(link < 0, -torch.inf)
