"""Channels that vary least over the tokens."""

from __future__ import annotations

from torch import Tensor


def steady_channels(x: Tensor, count: int) -> Tensor:
    """The `count` channels of smallest population variance over the tokens, smallest first.

    Args:
        x: `[..., N, D]`, best in float64.
        count: 1 to D.

    Returns:
        `[..., count]` int64; ties go to the lowest channel.
    """
    # From the first token on: a channel that never changes then has a variance of exactly 0.
    change = x - x[..., :1, :]
    variance = (change - change.mean(-2, keepdim=True)).square().mean(-2)
    return variance.sort(dim=-1, stable=True).indices[..., :count]


def take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Channels `[..., C]` of `x` `[..., N, D]`: `[..., N, C]`."""
    index = channels[..., None, :].expand(*x.shape[:-1], channels.shape[-1])
    return x.gather(-1, index)
