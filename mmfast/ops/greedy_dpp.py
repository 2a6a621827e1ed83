"""Greedy search for the most probable subset of a determinantal point process."""

from __future__ import annotations

import torch
from torch import Tensor

# A token keeps this little of its length only by rounding: the picks before it span it.
_SPANNED = 2.0**-30
# Gains this close differ by rounding only; the lowest index wins.
_SAME = 1 - 2.0**-36


def greedy_dpp(rows: Tensor, quality: Tensor, count: int) -> Tensor:
    """Pick rows that are long and far from the span of the picks before.

    Every pick maximises the squared distance to the span of all before it, which is what the
    determinant of the kernel `rows @ rows.T` grows by; updates run along, so the whole search
    costs `count * N * (D + count)`. Once the picks span all rows, the others follow by quality.

    Args:
        rows: `[..., N, D]`, features times quality; computed in float64.
        quality: `[..., N]` in order of preference for what the picks span already.
        count: At most N.

    Returns:
        `[..., count]` int64 in the order of picking, no index twice; ties to the lowest index.
    """
    lead, (n, width) = rows.shape[:-2], rows.shape[-2:]
    flat = rows.double().reshape(-1, n, width)
    picks = _greedy(flat, min(count, width, n))  # [B, k]
    batch = torch.arange(len(flat), device=rows.device)[:, None]
    rank = torch.full((len(flat), n + 1), count, device=rows.device)
    rank[batch, picks] = torch.arange(picks.shape[-1], device=rows.device)
    rank = rank[:, :n]  # the last column took the picks that were none
    by_quality = quality.reshape(-1, n).sort(dim=-1, descending=True, stable=True).indices
    first = rank.gather(-1, by_quality).sort(dim=-1, stable=True).indices
    return by_quality.gather(-1, first)[:, :count].reshape(*lead, count)


def _greedy(rows: Tensor, count: int) -> Tensor:
    """Picks `[B, count]` of `rows` `[B, N, D]`; N once the picks span all rows."""
    items, n, _ = rows.shape
    batch = torch.arange(items, device=rows.device)
    gain = rows.square().sum(-1)  # [B, N]
    floor = gain * _SPANNED
    done = rows.new_zeros(items, n, count)  # coordinates along the picks so far
    picks = torch.full((items, count), n, device=rows.device)
    for step in range(count):
        live = gain.masked_fill(gain <= floor, -torch.inf)
        best = live.amax(-1, keepdim=True)
        pick = (live >= best * _SAME).byte().argmax(-1)  # [B]
        there = best[:, 0] > 0
        if rows.device.type == "cpu" and not bool(there.any()):
            break
        picks[:, step] = torch.where(there, pick, n)
        overlap = (rows @ rows[batch, pick][..., None])[..., 0]
        known = (done[..., :step] @ done[batch, pick, :step][..., None])[..., 0]
        along = (overlap - known) / gain[batch, pick].clamp_min(1e-300).sqrt()[:, None]
        along = torch.where(there[:, None], along, 0)
        done[..., step] = along
        gain = gain - along.square()
        gain[batch, pick] = -torch.inf
    return picks
