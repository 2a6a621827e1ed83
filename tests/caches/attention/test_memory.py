"""Temporaries of policies that compute much: as large as a block, however long the prompt is."""

from __future__ import annotations

import pytest
import torch
from tensors_made import made
from torch import Tensor

from mmfast import Reduction, Tokens
from mmfast.caches.plan import plan_cache
from mmfast.core.reduction import merged


def layer(heads: int, n: int, width: int) -> Tokens:
    g = torch.Generator().manual_seed(0)
    x, values = torch.randn(2, heads, n, width, generator=g)
    rows = torch.randn(heads, 4, 3, width, generator=g)
    signals = {
        "values": values,
        "attn_sum": torch.rand(heads, n, generator=g),
        "query_mean": torch.randn(heads, 4, width, generator=g),
        "query_cov": rows.transpose(-1, -2) @ rows / 6,
    }
    return Tokens(x, signals=signals)


def chosen(spec: str, tokens: Tokens) -> tuple[list[int], Reduction]:
    plan = plan_cache(spec)
    assert plan is not None
    return made(lambda: plan.reduce(tokens))


def test_cam_makes_nothing_as_large_as_its_parts_beside_them() -> None:
    tokens = layer(2, 24_000, 16)
    sizes, found = chosen("cam:0.5", tokens)
    assert found.mix is not None
    parts = [found.mix.output.nbytes, found.mix.source.nbytes, found.mix.weight.nbytes]
    assert sizes[:3] == sorted(parts, reverse=True) and sizes[3] < parts[2] / 2
    few = [chosen("cam:0.5", layer(1, n, 4))[0][3] for n in (8_000, 16_000)]
    assert few[1] < 1.1 * few[0]  # a longer prompt has more blocks


def test_parts_are_added_up_without_a_copy_of_all_of_them() -> None:
    tokens = layer(2, 24_000, 16)
    found = chosen("cam:0.5", tokens)[1]
    assert found.mix is not None
    sizes, out = made(lambda: merged(tokens.signals["values"], found.segments))
    assert sizes[0] < found.mix.output.nbytes / 1.4
    heads = [
        Reduction(found.keep[h], found.owner[h], mix=type(found.mix)(*(x[h] for x in _all(found))))
        for h in range(2)
    ]
    for mine, one, values in zip(out, heads, tokens.signals["values"], strict=True):
        assert torch.equal(mine, one.apply(values))


def _all(found: Reduction) -> tuple[Tensor, Tensor, Tensor]:
    assert found.mix is not None
    return found.mix.output, found.mix.source, found.mix.weight


@pytest.mark.parametrize("name", ["capkv", "expected_attention"])
def test_long_prompts_are_scored_some_heads_at_a_time(name: str) -> None:
    tokens = layer(8, 5120, 32)
    sizes, found = chosen(f"{name}:0.25", tokens)
    assert sizes[0] <= 8 << 22  # float64 numbers of a block
    for head in range(0, 8, 3):
        signals = {k: v[head : head + 1] for k, v in tokens.signals.items()}
        one = chosen(f"{name}:0.25", Tokens(tokens.x[head : head + 1], signals=signals))[1]
        assert torch.equal(found.keep[head : head + 1], one.keep)
