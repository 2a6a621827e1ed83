"""Patch embedding as a matrix product: a convolution whose stride is its kernel is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

Convolution = nn.Conv2d | nn.Conv3d


def patch_convolutions(module: nn.Module) -> list[Convolution]:
    """Convolutions of a tower that cut their input into patches and do nothing else."""
    found = [each for each in module.modules() if isinstance(each, Convolution)]
    return [each for each in found if _cuts(each)]


def _cuts(conv: Convolution) -> bool:
    plain = conv.groups == 1 and set(conv.dilation) == {1} and max(conv.kernel_size) > 1
    flush = conv.padding == "valid" or set(conv.padding) == {0}
    return plain and flush and conv.stride == conv.kernel_size


def as_linear(conv: Convolution, call: Callable[..., Any], x: Tensor) -> Tensor:
    """What `conv` computes of `x` `[B, C, (T,) H, W]`, up to the order of summation.

    The result has the shape a convolution gives; where the towers flatten it, no copy is made.
    """
    sizes = conv.kernel_size
    if x.ndim != len(sizes) + 2:
        return call(x)  # type: ignore[no-any-return]
    counts = [have // size for have, size in zip(x.shape[2:], sizes, strict=True)]
    for axis, (count, size) in enumerate(zip(counts, sizes, strict=True), start=2):
        x = x.narrow(axis, 0, count * size)
    if all(count == 1 for count in counts):
        flat = x.reshape(len(x), -1)  # the Qwen towers cut beforehand
    else:
        split = [n for pair in zip(counts, sizes, strict=True) for n in pair]
        places = range(2, 2 + len(split), 2)
        order = (0, *places, 1, *(place + 1 for place in places))
        flat = x.reshape(*x.shape[:2], *split).permute(order).flatten(-1 - len(sizes))
    out = F.linear(flat, conv.weight.flatten(1), conv.bias)  # [B, (h, w,) D]
    return out.movedim(-1, 1).reshape(len(x), -1, *counts)
