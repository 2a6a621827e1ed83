"""Channels that vary least over the tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from torch import Tensor

_CHUNK = 1 << 18  # float64 numbers of a temporary on the host, 2 MB: they stay in cache


def steady_channels(x: Tensor, count: int) -> Tensor:
    """The `count` channels of smallest population variance over the tokens, smallest first.

    Args:
        x: `[..., N, D]`; sums are float64.
        count: 1 to D.

    Returns:
        `[..., count]` int64; ties go to the lowest channel.
    """
    n = x.shape[-2]
    # From the first token on: a channel that never changes then has a variance of exactly 0.
    first = x[..., :1, :].double()
    mean = sum_of((part.double() - first).sum(-2, keepdim=True) for part in parts(x)) / n
    start = first + mean
    square = sum_of((part.double() - start).square_().sum(-2) for part in parts(x))
    return (square / n).sort(dim=-1, stable=True).indices[..., :count]


def parts(x: Tensor, least: int = 1) -> tuple[Tensor, ...]:
    """`x` `[..., N, D]` some tokens at a time, `least` or a multiple; all at once on a device."""
    if x.device.type != "cpu" or not x.numel():
        return (x,)
    rows = max(1, _CHUNK * x.shape[-2] // (x.numel() * least)) * least
    some: tuple[Tensor, ...] = x.split(rows, -2)
    return some


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """Sum of at least one tensor."""
    return reduce(Tensor.add, terms)


def take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Channels `[..., C]` of `x` `[..., N, D]`: `[..., N, C]`."""
    if channels.shape[:-1].numel() == 1:  # an index per number is slow to read
        return x.index_select(-1, channels.flatten())
    index = channels[..., None, :].expand(*x.shape[:-1], channels.shape[-1])
    return x.gather(-1, index)
