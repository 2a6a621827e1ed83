"""RoPE, attention and the layers of a decoder, written out in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope(x: Tensor, places: Tensor, parameters: Any) -> Tensor:
    """Rotate `[H, n, d]` to positions `[A, n]`, in float64."""
    half = x.shape[-1] // 2
    axis = torch.zeros(half, dtype=torch.int64)
    if len(places) == 3:
        sections = parameters["mrope_section"]
        if parameters.get("mrope_interleaved"):
            for which in (1, 2):
                axis[which : 3 * sections[which] : 3] = which
        else:
            axis = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    step = parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = places[axis].double().T * step  # [n, half]
    a, b = x.double().split(half, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last tokens `[Hq, n, d]` to all `[H, m, d]`; `[n, Hq * d]`."""
    group, n, m = len(q) // len(k), q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    late = torch.arange(m)[None] > torch.arange(m - n, m)[:, None]
    return (scores.masked_fill(late, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def linear(module: Any, x: Tensor) -> Tensor:
    out = x.double() @ module.weight.double().T
    return out if module.bias is None else out + module.bias.double()


def norm(module: Any, x: Tensor) -> Tensor:
    scale = (x.double().pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    return x.double() * scale * module.weight.double()
