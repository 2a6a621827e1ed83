"""Benchmark of prefill attention that reads a part of a long visual context.

Queries and keys are synthetic: real ones need a large checkpoint. They have what papers report of
attention over video: a sink, vertical stripes, and locality in time and in the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    "dhsa:0.25",
    "sale:0.996",
)


SIZES = {16: 3, 32: 3, 64: 2}  # thousands of visual tokens, and rounds


class Sight(NamedTuple):
    """Logits that a query head gives to the sink, to a stripe, and to its own time and place."""

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
WAVES = ((24, 0.4), (8, 1.0), (8, 1.0))  # channels and highest rate of time, row and column
STRIPES = 0.02  # share of the keys that many queries want


@dataclass(frozen=True)
class Group:
    """Queries `[G, S, d]` of the heads that share keys and values `[1, S, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor

    def dense(self) -> tuple[Tensor, Tensor]:
        """All of causal attention, by the kernel that sdpa takes, and its levels."""
        key, value = (x.expand(HEADS, -1, -1)[None] for x in (self.key, self.value))
        out, level = attend(self.query[None], key, value, None, True)
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
    waves = [_waves(axis, *of) for axis, of in zip(axes, WAVES, strict=True)]
    striped = (torch.rand(tokens, generator=source) < STRIPES).float()
    height = striped * (0.7 + 0.6 * torch.rand(tokens, generator=source))
    sink = torch.zeros(tokens)
    sink[0] = 1.0
    noise = torch.randn(tokens, WIDTH - 42, generator=source)
    key = torch.cat([sink[:, None], height[:, None], *waves, noise], 1)
    scale = WIDTH**0.5
    queries = []
    for sight in SIGHTS:
        gains, places = (sight.sink, sight.stripes), (sight.time, sight.place, sight.place)
        flat = torch.tensor(gains).expand(tokens, 2) * (
            1 + 0.15 * torch.randn(tokens, 2, generator=source)
        )
        near = [wave * gain for wave, gain in zip(waves, places, strict=True)]
        rest = torch.randn(tokens, WIDTH - 42, generator=source) * 0.2
        queries.append(torch.cat([flat, *near, rest], 1) * scale)
    value = torch.randn(1, tokens, WIDTH, generator=source)
    return Group(torch.stack(queries), key[None].contiguous(), value)


def _waves(axis: Tensor, channels: int, top: float) -> Tensor:
    """Cosines and sines `[S, channels]` of rising frequency; a product with itself is 1."""
    rates = top * torch.arange(1, channels // 2 + 1) / (channels // 2)
    angles = axis[:, None] * rates
    waves: Tensor = torch.cat([angles.cos(), angles.sin()], 1) * (2 / channels) ** 0.5
    return waves


def sparse_rows(
    tokens: int, specs: Sequence[str], rounds: int, tick: Tick = quiet, seed: int = 0
) -> list[Row]:
    """Measure one group of heads: a row for each method, and one of the dense kernel again."""
    tick("making keys", 0, rounds + 1)
    group = structured_group(tokens, seed)
    with torch.no_grad(), timing.one_thread(), timing.frozen():
        _, whole = group.dense()
        kept: dict[str, Row] = {}

        def sparse(spec: str) -> timing.Sample:
            found, ms = timing.timed(partial(_sparse, group, spec), clock)
            chosen_ms, level, read = found
            kept.setdefault(spec, {"mass": _mass(level, whole), "read_share": read})
            return {"ms": ms, "choose_ms": chosen_ms}

        clock = timing.clock_of(torch.device("cpu"), 1)[0]
        dense = partial(_dense, group, clock)
        ways: dict[str, Callable[[], timing.Sample]] = {"dense": dense, timing.AGAIN: dense}
        ways |= {spec: partial(sparse, spec) for spec in specs}
        done = iter(range(1, rounds * len(ways) + 1))

        def step() -> None:
            tick(f"{tokens} tokens", next(done, 0), rounds * len(ways))

        taken = timing.interleave(ways, rounds, step)
    base = [each["ms"] for each in taken.pop("dense")]
    again = [each["ms"] for each in taken.pop(timing.AGAIN)]
    shared: Row = {"preset": f"{HEADS} heads of {WIDTH}", "tokens": tokens, "dtype": "float32"}
    shared |= {**timing.ON_ONE_THREAD, "n": rounds, "dense_ms": median(base), "seed": seed}
    shared |= {"noise": timing.noise(base, again), "least_share": least_share(group)}
    rows = []
    for spec, found in taken.items():
        ms = [each["ms"] for each in found]
        row = {**shared, "job": spec, "median_ms": median(ms), **kept[spec]}
        row |= {"choose_ms": median(each["choose_ms"] for each in found)}
        ratios = sorted(a / b for a, b in zip(base, ms, strict=True))
        rows.append({**row, "speedup": median(ratios), "slowest": ratios[0], "fastest": ratios[-1]})
    return rows


for _size, _rounds in SIZES.items():  # attention with all blocks, and with chosen ones
    _rows = partial(sparse_rows, 1024 * _size, SPECS, _rounds)
    benchmark("prefill", f"sparse-{_size}k")(_rows)


def _dense(group: Group, clock: Callable[[], float]) -> timing.Sample:
    return {"ms": timing.timed(group.dense, clock)[1]}


def _sparse(group: Group, spec: str) -> tuple[float, Tensor, float]:
    """Milliseconds of choosing, levels `[G, S]`, and the share of the pairs that were computed."""
    plan, clock = plan_prefill(spec), timing.clock_of(torch.device("cpu"), 1)[0]
    assert plan is not None
    layer = PromptLayer(group.query[None], group.key, WIDTH**-0.5)
    choice, ms = timing.timed(partial(plan.selector().choose, layer), clock)
    _, level = block_attention(group.query, group.key, group.value, choice)
    read = float(choice.reads(layer.length, layer.n).mean()) / ((layer.n + 1) / 2)
    return ms, level, read


def _mass(level: Tensor, whole: Tensor) -> float:
    """Share of the attention that a sparse pass keeps, mean over queries and heads: exact."""
    return float((level.double() - whole.double()).exp().mean())


def least_share(group: Group, mass: float = 0.95, count: int = 32) -> float:
    """Share of its keys that a query needs for so much of its attention, were they known.

    The mean over heads and `count` queries of the second half.
    """
    size = group.key.shape[1]
    found = []
    for place in torch.linspace(size // 2, size - 1, count).long().tolist():
        logits = group.query[:, place] @ group.key[0, : place + 1].T * WIDTH**-0.5
        ranked = logits.softmax(-1).sort(dim=-1, descending=True).values.cumsum(-1)
        found.append((((ranked < mass).sum(-1) + 1) / (place + 1)).mean())
    return float(torch.stack(found).mean())
