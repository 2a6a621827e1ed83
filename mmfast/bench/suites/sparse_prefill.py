"""Benchmark of prefill attention that reads a part of a long visual context.

Queries and keys are synthetic: real ones need a large checkpoint. They have what papers report of
attention over video: a sink, vertical stripes, and locality in time and in the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mmfast.bench import timing
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row
from mmfast.core.blocks import PromptLayer
from mmfast.ops.attention import attend
from mmfast.ops.block_attention import block_attention
from mmfast.prefill.plan import plan_prefill

HEADS, WIDTH = 7, 64  # query heads of one key head of Qwen2-0.5B
SIDE = 16  # tokens of a row and of a column of a frame
SPECS = (
    "sample_attention:0.95",
    "flexprefill:0.95",
    "zipvl:0.95",
    "pbs:0.95",
    "minference:0.3",
    "hip:0.25",
)


class Sight(NamedTuple):
    """Strength in logits of what a query head looks at, and the reach of its locality."""

    sink: float
    stripes: float
    time: float
    place: float


# Heads of a group: streaming, stripes, the same place in other frames, and mixtures of them.
SIGHTS = (
    Sight(9.5, 3.0, 7.0, 2.0),
    Sight(9.0, 6.0, 5.0, 1.0),
    Sight(8.0, 7.0, 3.0, 1.0),
    Sight(10.0, 4.0, 6.0, 3.0),
    Sight(8.5, 6.0, 5.0, 2.0),
    Sight(10.5, 4.0, 5.0, 2.0),
    Sight(9.0, 6.0, 6.0, 1.0),
)
STRIPES = 0.02  # share of the keys that many queries want


@dataclass(frozen=True)
class Group:
    """Queries `[G, S, d]` of the heads that share keys and values `[1, S, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor

    def dense(self) -> tuple[Tensor, Tensor]:
        """All of causal attention, by the kernel that sdpa takes, and its levels."""
        wide = (x.expand(HEADS, -1, -1)[None] for x in (self.key, self.value))
        out, level = attend(self.query[None], *wide, None, True)
        assert level is not None
        return out[0], level[0]


def structured_group(tokens: int, seed: int = 0) -> Group:
    """Make the queries and keys of one group over frames of 16 x 16 tokens.

    A logit is a sum over channels: a sink at the first key, stripes at 2 % of the keys, waves of
    time, row and column that are in phase where query and key are near, and noise.
    """
    source = torch.Generator().manual_seed(seed)
    place = torch.arange(tokens)
    axes = (place // SIDE**2, place // SIDE % SIDE, place % SIDE)
    waves = [_waves(axis, *of) for axis, of in zip(axes, ((24, 0.4), (8, 1.0), (8, 1.0)))]
    striped = (torch.rand(tokens, generator=source) < STRIPES).float()
    height = striped * (0.7 + 0.6 * torch.rand(tokens, generator=source))
    sink = torch.zeros(tokens)
    sink[0] = 1.0
    noise = torch.randn(tokens, WIDTH - 42, generator=source)
    key = torch.cat([sink[:, None], height[:, None], *waves, noise], 1)
    scale = WIDTH**0.5
    queries = []
    for sight in SIGHTS:
        gains = (sight.sink, sight.stripes)
        flat = torch.tensor(gains).expand(tokens, 2) * (
            1 + 0.15 * torch.randn(tokens, 2, generator=source)
        )
        near = [wave * gain for wave, gain in zip(waves, (sight.time, sight.place, sight.place))]
        rest = torch.randn(tokens, WIDTH - 42, generator=source) * 0.2
        queries.append(torch.cat([flat, *near, rest], 1) * scale)
    value = torch.randn(1, tokens, WIDTH, generator=source)
    return Group(torch.stack(queries), key[None].contiguous(), value)


def _waves(axis: Tensor, channels: int, top: float) -> Tensor:
    """Cosines and sines `[S, channels]` of rising frequency; a product with itself is 1."""
    rates = top * torch.arange(1, channels // 2 + 1) / (channels // 2)
    angles = axis[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], 1) * (2 / channels) ** 0.5
