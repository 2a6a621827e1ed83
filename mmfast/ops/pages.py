"""Pages of cache entries: bounds of their keys, a copy in few bits, attention to some of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.reduction import gather_rows


def selected_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor | None = None,
    *,
    real: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attention of one query per row to some of the entries; no others are read.

    Args:
        query: `[B, Hq, 1, d]`; neighbouring query heads share a key head.
        keys: `[B, H, n, d]`, a slice of a longer buffer included; values are alike.
        values: `[B, H, n, w]`.
        index: `[B, 1 or H, m]`, the places that are read; None reads all.
        real: `[B, 1 or H, m]`, False at places that fill up a row and count for nothing.
        bias: `[B, 1 or Hq, n]`, added to the logits.
        scale: Factor of the logits; None is 1 / sqrt(d).

    Returns:
        `[B, Hq, 1, w]`.
    """
    batch, heads = keys.shape[:2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if index is not None and _fits_kernel(query, keys, values):
        from mmfast.kernels import selected_attention as kernel

        in_place: Tensor = kernel.selected_attention(query, keys, values, index, scale, real, bias)
        return in_place
    added = selected_bias(index, real, bias, query, heads)
    if index is not None:
        keys, values = selected(keys, values, index)
    rows = query.reshape(batch, heads, -1, query.shape[-1])  # [B, H, G, d]
    found = F.scaled_dot_product_attention(rows, keys, values, attn_mask=added, scale=scale)
    return found.reshape(batch, -1, 1, values.shape[-1])


def _fits_kernel(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernel reads the entries in place: no copy, but no gradients either."""
    if not (query.is_cuda and keys.is_cuda):
        return False
    from mmfast.kernels.selected_attention import MAX_WIDTH

    all_of = (query, keys, values)
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in all_of)
    alike = len({x.dtype for x in all_of}) == 1 and all(x.stride(-1) == 1 for x in all_of)
    widest = max(x.shape[-1] for x in all_of)
    return alike and widest <= MAX_WIDTH.get(query.dtype, 0) and not learning


def selected_bias(
    index: Tensor | None, real: Tensor | None, bias: Tensor | None, query: Tensor, heads: int
) -> Tensor | None:
    """The addend `[B, H, G, m]` to the logits of `selected_attention`; None where it needs none."""
    if bias is None and real is None:
        return None
    batch, groups = len(query), query.shape[1] // heads
    if bias is None:
        added = query.new_zeros(1, 1, 1, 1)
    else:
        bias = bias.to(query.dtype)
        added = bias[:, :, None] if bias.shape[1] == 1 else bias.unflatten(1, (heads, groups))
        added = added.expand(batch, heads, groups, -1)
        if index is not None:
            where = index.expand(batch, heads, -1)[:, :, None].expand(-1, -1, groups, -1)
            added = added.gather(-1, where)
    if real is not None:
        fillers = ~real.expand(batch, heads, -1)[:, :, None]
        added = added.expand(batch, heads, groups, fillers.shape[-1])
        added = added.masked_fill(fillers, -torch.inf)
    return added


def selected(keys: Tensor, values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values `[B, H, m, d]` at `index` `[B, 1 or H, m]`; no other row is read."""
    batch, heads, n, width = keys.shape
    index = index.expand(batch, heads, -1)
    over_rows, over_heads, step, one = keys.stride()
    even = (step, one) == (width, 1) and not (over_rows % width or over_heads % width)
    if not even or values.stride() != keys.stride() or values.shape[3] != width:
        return gather_rows(keys, index), gather_rows(values, index)
    # Slices of alike buffers, whose rows have the same numbers in both: found once, copied twice.
    rows, each_head = over_rows // width, over_heads // width
    if heads > 1:
        starts = 0, heads * each_head, each_head
        if index.is_cpu and type(index) is Tensor:  # a third of the time of the same calls of torch
            index = torch.from_numpy(index.numpy() + np.arange(*starts)[:, None])
        else:
            index = index + torch.arange(*starts, device=index.device)[:, None]
    if batch > 1:
        place = torch.arange(0, batch * rows, rows, device=index.device)
        index = index + place[:, None, None]
    size, flat = (batch - 1) * rows + (heads - 1) * each_head + n, index.reshape(-1)
    keys, values = (
        x.as_strided((size, width), (width, 1)).index_select(0, flat).view(*index.shape, width)
        for x in (keys, values)
    )
    return keys, values


class PageTable:
    """Facts about the complete pages of a layer, found once for each page.

    `describe` makes them of keys `[B, H, P, page, d]`: a tensor `[B, H, P, w]`. With `columns`, the
    same fact of all pages lies together, which makes a product with one query a third shorter.
    """

    def __init__(
        self, page: int, describe: Callable[[Tensor], Tensor], columns: bool = False
    ) -> None:
        self._page, self._describe, self._columns = page, describe, columns
        self._count, self._rows = 0, torch.empty(0)

    def grow(self, keys: Tensor, count: int, device: torch.device | None = None) -> Tensor:
        """Return the facts `[B, H, count, w]` about the first pages of keys `[B, H, n, d]`.

        They lie on `device`; None is where the keys are.
        """
        new = count - self._count
        if new > 0:
            part = keys[:, :, self._count * self._page : count * self._page]
            part = part if device is None else part.to(device)
            self._append(self._describe(part.unflatten(2, (new, self._page))))
        return self._rows[:, :, :count]

    def trim(self, entries: int) -> bool:
        """Forget pages that are no longer complete."""
        self._count = min(self._count, entries // self._page)
        return True

    def _append(self, rows: Tensor) -> None:
        batch, heads, new, width = rows.shape
        total = self._count + new
        if not self._rows.numel() or self._rows.shape[2] < total:
            room = total + max(16, total // 8)
            if self._columns:
                wider = rows.new_empty(batch, heads, width, room).transpose(2, 3)
            else:
                wider = rows.new_empty(batch, heads, room, width)
            if self._count:
                wider[:, :, : self._count] = self._rows[:, :, : self._count]
            self._rows = wider
        self._rows[:, :, self._count : total] = rows
        self._count = total


def key_bounds(pages: Tensor) -> Tensor:
    """Largest and smallest number of every channel, `[..., 2 d]`, of pages `[..., page, d]`."""
    return torch.cat([pages.amax(-2), pages.amin(-2)], -1)


def bound_scores(query: Tensor, bounds: Tensor) -> Tensor:
    """Largest product that a key within `bounds` `[B, H, P, 2 d]` can have, `[B, H, P]`.

    Of queries `[B, H, G, d]` it is the mean over G. Channels above 0 meet the largest number,
    others the smallest.
    """
    wide = query.float()
    # The sum over channels and the mean over queries change places.
    split = torch.cat([wide.clamp_min(0).mean(2), wide.clamp_max(0).mean(2)], -1)
    return (split[:, :, None] @ bounds.float().transpose(2, 3))[:, :, 0]


def key_means(pages: Tensor) -> Tensor:
    """Mean key `[..., d]` of pages `[..., page, d]`."""
    return pages.float().mean(-2).to(pages.dtype)


def mean_scores(query: Tensor, means: Tensor) -> Tensor:
    """Products `[B, H, P]` of mean keys `[B, H, P, d]` and queries `[B, H, G, d]`, mean over G."""
    wide = query.float().mean(2, keepdim=True)
    return (wide @ means.float().transpose(2, 3))[:, :, 0]


def level_codes(pages: Tensor, bits: int = 4) -> Tensor:
    """Codes `[..., page * d * bits / 8]` uint8 of pages `[..., page, d]`, several in a byte.

    Each channel of a page has 2^bits even levels between its bounds; a byte holds whole numbers.
    """
    most = 2**bits - 1
    low, high = pages.amin(-2, keepdim=True).float(), pages.amax(-2, keepdim=True).float()
    step = ((high - low) / most).masked_fill(high == low, 1.0)
    codes = ((pages.float() - low) / step).round_().clamp_(0, most).to(torch.uint8)
    first, *rest = codes.chunk(8 // bits, -1)  # [..., page, d * bits / 8]
    for number, part in enumerate(rest, 1):
        first = first | part << bits * number
    packed: Tensor = first.flatten(-2)
    return packed


def level_logits(query: Tensor, codes: Tensor, bounds: Tensor, page: int, bits: int = 4) -> Tensor:
    """Products `[B, H, G, P * page]` of queries `[B, H, G, d]` and keys in few bits.

    `codes` `[B, H, P, page * d * bits / 8]` and `bounds` `[B, H, P, 2 d]` are those of
    `level_codes` and `key_bounds`.
    """
    high, low = bounds.float().chunk(2, -1)  # [B, H, P, d]
    most, wide = 2**bits - 1, query.float()
    steps = wide[:, :, None] * ((high - low) / most)[:, :, :, None]  # [B, H, P, G, d]
    bytes_ = codes.unflatten(-1, (page, -1))
    parts = [bytes_ >> shift & most for shift in range(0, 8, bits)]
    levels = torch.cat(parts, -1).float()  # [B, H, P, page, d]
    inside = steps @ levels.transpose(3, 4)  # [B, H, P, G, page]
    found: Tensor = (inside.transpose(2, 3) + (wide @ low.transpose(2, 3))[..., None]).flatten(3)
    return found


def heaviest(mass: Tensor, share: float) -> Tensor:
    """Mark the fewest entries of each row of `mass` `[..., N]` that reach `share` of it.

    No mass is negative; entries alike stay together.
    """
    ordered = mass.sort(dim=-1, descending=True).values
    sums = ordered.cumsum(-1)
    last = (sums < share * sums[..., -1:]).sum(-1, keepdim=True).clamp_max(mass.shape[-1] - 1)
    return mass >= ordered.gather(-1, last)


def marked_places(marks: Tensor) -> tuple[Tensor, Tensor | None]:
    """Places `[B, H, m]` that `marks` `[B, H, n]` has True, m of the head with the most.

    At least one. Also False at fillers of heads with fewer, None where there are none.
    """
    counts = marks.sum(-1, keepdim=True)
    most = max(1, int(counts.max()))
    order = marks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :most]
    real = torch.arange(most, device=order.device) < counts
    return order, None if bool(real.all()) else real
