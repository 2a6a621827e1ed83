"""Patch embedding: the stock convolution against the same sums as a matrix product."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.bench.encoder_jobs import check, compare, device, named
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.models.vision.acceleration import as_linear

ROUNDS = 5
SHAPES = ("siglip-so400m-384, two frames", "qwen2.5-vl, two frames of 392 x 392")


def rows(tick: Tick) -> list[Row]:
    """Rows of both kinds of patch embedding in both precisions; `speedup` is over the stock one."""
    kinds = [(name, dtype) for name in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    found: list[Row] = []
    for number, (name, dtype) in enumerate(kinds):
        tick(f"{name}, {dtype}", number, len(kinds))
        found += measure(name, dtype, ROUNDS)
    return found


def measure(name: str, dtype: torch.dtype, rounds: int) -> list[Row]:
    """Rows of one of `SHAPES`."""
    where = device()
    torch.manual_seed(0)
    conv: Any
    if name == SHAPES[0]:
        conv, x = nn.Conv2d(3, 1152, 14, 14), torch.randn(2, 3, 384, 384)
    else:
        size = (2, 14, 14)
        conv, x = nn.Conv3d(3, 1280, size, size, bias=False), torch.randn(784, 3, *size)
    conv, x = conv.to(where, dtype), x.to(where, dtype)
    # The towers flatten the raster at once, so both do here.
    jobs = {"convolution": partial(_tokens, conv, x), "linear": partial(_linear, conv, x)}
    with torch.no_grad():
        expected = jobs["convolution"]()
        far = check(jobs["linear"](), expected, 1e-5 if dtype == torch.float32 else 1e-2)
    shared: Row = {"shape": name, "dtype": str(dtype).removeprefix("torch.")}
    return named(compare(jobs, rounds, shared), {"linear": {"difference": far}})


def _tokens(conv: Any, x: Tensor) -> Tensor:
    return conv(x).flatten(2).transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def _linear(conv: Any, x: Tensor) -> Tensor:
    return as_linear(conv, conv, x).flatten(2).transpose(1, 2).contiguous()
