"""Retrieval of stored keys against oracles, and the promises of a retriever."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracles_retrieve as oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmfast.caches import retrieval as resv_module
from mmfast.core.errors import SpecError
from mmfast.core.kv import Clusters, Retriever
from mmfast.core.registry import get
from mmfast.ops.clustering import best_blocks, leader_clusters
from mmfast.ops.ranking import mass_cover

SHAPES = [(1, 1, 1, 3, 4), (2, 4, 3, 5, 8), (2, 2, 1, 9, 6), (3, 12, 7, 4, 5)]  # H, Hq, T, n, d


def _blocks(seed: int, heads: int, n: int, width: int, count: int) -> dict[int, Tensor]:
    """Blocks with gaps in their numbers and clusters of like keys in them."""
    rng = torch.Generator().manual_seed(seed)
    numbers = sorted({int(v) for v in torch.randint(3, 200, (count,), generator=rng)})
    out = {}
    for number in numbers:
        centres = torch.randn(heads, 1 + n // 3, width, generator=rng)
        pick = torch.randint(0, centres.shape[1], (n,), generator=rng)
        out[number] = centres[:, pick] + 0.05 * torch.randn(heads, n, width, generator=rng)
    return out


def _query(seed: int, heads: int, tokens: int, width: int) -> Tensor:
    return 2 * torch.randn(
        heads, tokens, width, generator=torch.Generator().manual_seed(seed + 999)
    )


def _read(retriever: Retriever, blocks: dict[int, Tensor], query: Tensor) -> dict[int, list[int]]:
    """Tokens of each block that a retriever reads."""
    parts = {number: retriever.represent(keys) for number, keys in blocks.items()}
    index = Clusters(
        torch.cat([p.means for p in parts.values()]),
        torch.cat([p.counts for p in parts.values()]),
        torch.cat([torch.full_like(p.counts, number) for number, p in parts.items()]),
    )
    chosen = retriever.choose(query, index)
    out, start = {}, 0
    for number, part in parts.items():
        mine = chosen[start : start + len(part.counts)]
        start += len(part.counts)
        if mine.any():
            out[number] = mine[part.owner].nonzero()[:, 0].tolist()
    return out


def _arrays(blocks: dict[int, Tensor]) -> dict[int, np.ndarray]:
    return {number: keys.double().numpy() for number, keys in blocks.items()}


def _make(name: str, budget: object, **knobs: object) -> Retriever:
    made: Retriever = get(name, "cache").fn(budget, **knobs)
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("budget", "chunk"), [(1, 1), (3, 1), (4, 2), (5, 3), (99, 4)])
def test_rekv_oracle(shape: tuple[int, ...], budget: int, chunk: int) -> None:
    heads, groups, tokens, n, width = shape
    for seed in range(4):
        blocks = _blocks(seed, heads, n, width, 12)
        query = _query(seed, groups, tokens, width)
        got = _read(_make("rekv", budget, chunk=chunk), blocks, query)
        want = oracles.rekv(_arrays(blocks), query.double().numpy(), budget, chunk)
        assert list(got) == want
        assert all(read == list(range(n)) for read in got.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.05, 0.3, 0.8, 1.0])
def test_resv_oracle(shape: tuple[int, ...], share: float) -> None:
    heads, groups, tokens, n, width = shape
    for seed in range(3):
        blocks = _blocks(seed, heads, n, width, 6)
        query = _query(seed, groups, tokens, width)
        planes = resv_module.hyperplanes(heads * width, 32, 0).double().numpy()
        got = _read(_make("resv", share, limit=0), blocks, query)
        assert got == oracles.resv(_arrays(blocks), query.double().numpy(), share, 7, planes)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 255), max_size=40), st.integers(0, 9))
def test_clusters_are_those_of_the_loop(codes: list[int], radius: int) -> None:
    bits = [[bool(code >> p & 1) for p in range(8)] for code in codes]
    owner = leader_clusters(torch.tensor(bits, dtype=torch.bool).view(len(codes), 8), radius)
    want = oracles.clusters(bits, radius)
    got = [(owner == c).nonzero()[:, 0].tolist() for c in range(len(want))]
    assert got == want


@settings(max_examples=60)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=20), st.integers(1, 15))
def test_cover_is_the_fewest(weights: list[int], sixteenths: int) -> None:
    share = sixteenths / 16  # exact in binary, so that a tie is one
    mask = mass_cover(torch.tensor(weights, dtype=torch.float64), share)
    assert set(mask.nonzero()[:, 0].tolist()) == oracles.cover([float(w) for w in weights], share)


def test_limit_reads_the_heaviest_first() -> None:
    blocks = _blocks(1, 2, 12, 8, 10)
    query = _query(1, 4, 5, 8)
    free = _read(_make("resv", 0.9, limit=0), blocks, query)
    cut = _read(_make("resv", 0.9, limit=20), blocks, query)
    assert 0 < sum(map(len, cut.values())) <= 20 < sum(map(len, free.values()))
    assert all(set(read) <= set(free[number]) for number, read in cut.items())
    assert sum(map(len, _read(_make("resv", 0.9, limit=1), blocks, query).values())) >= 1


def test_many_clusters_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = _blocks(2, 2, 12, 8, 10)
    query = _query(2, 4, 7, 8)
    whole = _read(_make("resv", 0.4), blocks, query)
    monkeypatch.setattr(resv_module, "_AT_ONCE", 1)
    assert _read(_make("resv", 0.4), blocks, query) == whole


@pytest.mark.parametrize("name", ["rekv", "resv", "retrieve"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_planted_needle_is_found(name: str, dtype: torch.dtype) -> None:
    """The question points at the keys of one block among a thousand."""
    rng = torch.Generator().manual_seed(5)
    blocks = {i: torch.randn(2, 6, 16, generator=rng).to(dtype) for i in range(1000)}
    direction = torch.randn(2, 1, 16, generator=rng)
    blocks[417] = (blocks[417] + 3 * direction).to(dtype)
    query = direction.repeat_interleave(2, 0).expand(4, 3, 16).to(dtype)
    retriever = _make(name, 0.3 if name == "resv" else 4)
    assert 417 in _read(retriever, blocks, query)


def test_equal_blocks_give_the_earliest() -> None:
    blocks = {number: torch.ones(1, 2, 4) for number in range(20)}
    assert list(_read(_make("rekv", 3), blocks, torch.ones(2, 1, 4))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "budget", "knobs"),
    [
        ("rekv", 0.5, {}),
        ("rekv", 0, {}),
        ("rekv", None, {}),
        ("rekv", 4, {"chunk": 0}),
        ("resv", 64, {}),
        ("resv", 1.5, {}),
        ("resv", 0.3, {"planes": 0}),
        ("resv", 0.3, {"radius": -1}),
        ("resv", 0.3, {"limit": -1}),
        ("retrieve", 0.5, {}),
        ("retrieve", -1, {}),
    ],
)
def test_wrong_settings(name: str, budget: object, knobs: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"^'re(kv|sv|trieve)'"):
        _make(name, budget, **knobs)


def _uncounted(query: Tensor, index: Clusters) -> Tensor:
    ones = torch.ones_like(index.counts)
    return RIGHT_MASS(query, Clusters(index.means, ones, index.owner))


def _heads_interleaved(query: Tensor, heads: int) -> Tensor:
    return query.unflatten(0, (query.shape[0] // heads, heads)).transpose(0, 1)


def _each_for_itself(bits: Tensor, radius: int) -> Tensor:
    return torch.arange(len(bits))


def _too_much(mass: Tensor, share: float) -> Tensor:
    return RIGHT_COVER(mass, min(1.0, share + 0.1))


def _worst(score: Tensor, owner: Tensor, budget: int, chunk: int = 1) -> Tensor:
    return RIGHT_BLOCKS(-score, owner, budget, chunk)


def _check_resv() -> None:
    test_resv_oracle(SHAPES[1], 0.3)


def _check_rekv() -> None:
    test_rekv_oracle(SHAPES[1], 3, 1)


RIGHT_MASS = resv_module.attention_mass
RIGHT_COVER = mass_cover
RIGHT_BLOCKS = best_blocks
FAULTS: list[tuple[str, Callable[..., Tensor], Callable[[], None]]] = [
    ("retrieval.attention_mass", _uncounted, _check_resv),
    ("retrieval.group_queries", _heads_interleaved, _check_resv),
    ("retrieval.leader_clusters", _each_for_itself, _check_resv),
    ("retrieval.mass_cover", _too_much, _check_resv),
    ("retrieval.group_queries", _heads_interleaved, _check_rekv),
    ("retrieval.best_blocks", _worst, _check_rekv),
]


@pytest.mark.parametrize(
    ("name", "fault", "check"), FAULTS, ids=[fault.__name__[1:] for _, fault, _ in FAULTS]
)
def test_planted_faults_are_caught(
    name: str,
    fault: Callable[..., Tensor],
    check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"mmfast.caches.{name}", fault)
    with pytest.raises(AssertionError):
        check()
