"""Every method of sparse prefill chooses as its oracle does, and the op computes just that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracles_prefill as oracles
import pytest
import torch

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.registry import methods
from mmfast.ops.block_attention import block_attention, flex_block_attention
from mmfast.prefill.plan import plan_prefill

HEADS, GROUP, WIDTH = 2, 2, 8
CASES = {
    "sample_attention:0.8?rows=0.2&window=0.1": {"rows": 0.2, "window": 0.1},
    "sample_attention:0.95?rows=0.1&window=0.0": {"rows": 0.1, "window": 0.0},
    "zipvl:0.7?probes=5": {"probes": 5},
    "zipvl:0.9?probes=99": {"probes": 99},
    "flexprefill:0.7?tau=0.0": {"tau": 0.0},
    "flexprefill:0.7?tau=0.9": {"tau": 0.9},
    "flexprefill:0.8?tau=0.25": {"tau": 0.25},
    "minference:0.3?probes=9": {"probes": 9},
    "minference:0.6?probes=3": {"probes": 3},
    "pbs:0.6?segment=2": {"segment": 2},
    "pbs:0.8?segment=3": {"segment": 3},
    "hip:0.3": {},
    "hip:0.1": {},
    "sale:0.9?width=4&local=8": {"width": 4, "local": 8},
    "sale:0.7?width=6&local=0": {"width": 6, "local": 0},
    "dhsa:0.3?chunk=6&window=2": {"chunk": 6, "window": 2},
    "dhsa:0.5?chunk=3&window=1": {"chunk": 3, "window": 1},
}
SMALL = {"sale": "?width=8&local=8"}  # its window holds all of a prompt this short
SHAPES = ((61, 61, 8), (40, 61, 8), (23, 61, 4), (16, 64, 16))  # queries, keys, block


def layer_of(length: int, n: int, seed: int = 0) -> PromptLayer:
    """A layer whose heads have sinks, stripes and locality, so that patterns differ."""
    source = torch.Generator().manual_seed(seed)
    query = torch.randn(HEADS, GROUP, length, WIDTH, generator=source)
    keys = torch.randn(HEADS, n, WIDTH, generator=source)
    keys[:, ::13, 0] += 4
    query[..., 0] += 2
    angles = torch.arange(n) * 0.2
    keys[1, :, 2:4] = 3 * torch.stack([angles.cos(), angles.sin()], -1)
    query[1, :, :, 2:4] += 3 * torch.stack([angles.cos(), angles.sin()], -1)[-length:]
    return PromptLayer(query, keys, WIDTH**-0.5)


def numbers(layer: PromptLayer) -> tuple[np.ndarray, np.ndarray, float]:
    return layer.query.double().numpy(), layer.keys.double().numpy(), layer.scale


def mask_of(choice: BlockChoice, length: int, n: int) -> np.ndarray:
    """The pairs of a choice, read from its fields one by one."""
    mask = np.zeros((len(choice.blocks), length, n), dtype=bool)
    for head in range(len(mask)):
        order = range(n) if choice.order is None else choice.order[head].tolist()
        place = {key: at for at, key in enumerate(order)}
        for i in range(length):
            first = i // choice.size * choice.size + n - length
            for j in range(n - length + i + 1):
                block = bool(choice.blocks[head, i // choice.size, place[j] // choice.wide])
                column = choice.columns is not None and bool(choice.columns[head, j])
                mask[head, i, j] = j >= first or block or column
    return mask


def chosen(spec: str, layer: PromptLayer, size: int) -> BlockChoice:
    mark = "&" if "?" in spec else "?"
    plan = plan_prefill(f"{spec}{mark}block={size}&least=1")
    assert plan is not None
    return plan.selector().choose(layer)


def slow(spec: str, layer: PromptLayer, size: int) -> np.ndarray:
    name, budget = spec.partition("?")[0].split(":")
    return oracles.ORACLES[name](*numbers(layer), float(budget), size, **CASES[spec])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", CASES)
def test_choice_is_that_of_the_oracle(spec: str, shape: tuple[int, int, int]) -> None:
    length, n, size = shape
    layer = layer_of(length, n)
    choice = chosen(spec, layer, size)
    mask = slow(spec, layer, size)
    assert (mask_of(choice, length, n) == mask).all()
    np.testing.assert_allclose(choice.reads(length, n), mask.sum((1, 2)) / length, rtol=1e-6)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", list(CASES)[::2])
def test_attention_is_exact_on_the_choice(spec: str, shape: tuple[int, int, int]) -> None:
    length, n, size = shape
    layer = layer_of(length, n, seed=1)
    value = torch.randn(HEADS, n, WIDTH, generator=torch.Generator().manual_seed(2))
    choice = chosen(spec, layer, size)
    query = layer.query.flatten(0, 1)
    out, levels = block_attention(query, layer.keys, value, choice, layer.scale)
    q, k, scale = numbers(layer)
    want = oracles.attention(q, k, value.double().numpy(), scale, slow(spec, layer, size))
    np.testing.assert_allclose(out.unflatten(0, (HEADS, GROUP)), want, atol=2e-6)
    assert levels.shape == query.shape[:2]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("spec", list(CASES)[::2])
def test_flex_attention_computes_the_same(spec: str) -> None:
    layer = layer_of(40, 64, seed=3)
    value = torch.randn(HEADS, 64, WIDTH, generator=torch.Generator().manual_seed(2))
    choice = chosen(spec, layer, 16)
    given = (layer.query.flatten(0, 1), layer.keys, value, choice, layer.scale)
    for mine, flex in zip(block_attention(*given), flex_block_attention(*given), strict=True):
        torch.testing.assert_close(mine, flex, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("method", [m.name for m in methods("prefill")])
def test_each_head_may_choose_for_itself(method: str) -> None:
    layer = layer_of(48, 64, seed=4)
    each = replace(
        layer, query=layer.query.flatten(0, 1)[:, None], keys=layer.keys.repeat_interleave(2, 0)
    )
    choice = chosen(f"{method}:0.5{SMALL.get(method, '')}", each, 8)
    value = torch.randn(HEADS, 64, WIDTH, generator=torch.Generator().manual_seed(2))
    out, _ = block_attention(layer.query.flatten(0, 1), layer.keys, value, choice, layer.scale)
    q, k, scale = numbers(each)
    wide = value.repeat_interleave(2, 0).double().numpy()
    want = oracles.attention(q, k, wide, scale, mask_of(choice, 48, 64))
    np.testing.assert_allclose(out[:, None], want, atol=2e-6)


@pytest.mark.parametrize("method", [m.name for m in methods("prefill")])
def test_a_prompt_of_one_token_is_read(method: str) -> None:
    choice = chosen(f"{method}:0.5{SMALL.get(method, '')}", layer_of(1, 1), 8)
    assert mask_of(choice, 1, 1).all()


def test_counts_of_single_keys_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, search = list[int](), torch.searchsorted

    def noted(cut: Any, ends: Any) -> Any:
        asked.append(ends.numel())
        return search(cut, ends)

    monkeypatch.setattr(torch, "searchsorted", noted)
    n = 1536
    blocks = (torch.arange(2 * n * n) % 7 < 3).view(2, n, n)
    found = BlockChoice(blocks, 1).reads(n, n)
    want = blocks.tril(-1).sum((1, 2)) / n + 1
    assert max(asked) <= 2**22 and torch.allclose(found, want)


def test_every_method_has_an_oracle() -> None:
    assert {m.name for m in methods("prefill")} == set(oracles.ORACLES)
    assert {spec.partition(":")[0] for spec in CASES} == set(oracles.ORACLES)


@pytest.mark.parametrize("method", [m.name for m in methods("prefill") if m.role != "read"])
def test_more_mass_keeps_more(method: str) -> None:
    """The attention kept, by levels, grows with the budget and nears all of it."""
    layer = layer_of(64, 64, seed=5)
    value = torch.randn(HEADS, 64, WIDTH)
    query = layer.query.flatten(0, 1)
    everything = BlockChoice(torch.ones(HEADS, 8, 8, dtype=torch.bool), 8)
    _, whole = block_attention(query, layer.keys, value, everything, layer.scale)
    kept: list[Any] = []
    for budget in (0.3, 0.8, 0.999):
        choice = chosen(f"{method}:{budget}{SMALL.get(method, '')}", layer, 8)
        _, levels = block_attention(query, layer.keys, value, choice, layer.scale)
        kept.append(float((levels - whole).exp().mean()))
    assert kept == sorted(kept) and kept[0] < kept[-1] <= 1 + 1e-6
