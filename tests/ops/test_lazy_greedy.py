"""Greedy searches that skip most comparisons pick what a plain loop over all of them picks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from token_factory import make
from torch import Tensor

from mmfast.ops import dpp, similarity
from mmfast.ops import max_min as max_min_search
from mmfast.ops.dpp import LazyGreedy
from mmfast.ops.max_min import max_min
from mmfast.ops.similarity import unit_rows

STEP = 2.0**-30


def plain(rows: Tensor, count: int, own: np.ndarray | None, share: float, start: list[int],
          stop: float) -> list[int]:  # fmt: skip
    """Every row against every pick, in float64 steps."""
    cosine = np.round((rows @ rows.T).double().numpy() / STEP) * STEP
    picks: list[int] = []
    while len(picks) < count:
        likeness = cosine[picks].max(0) if picks else np.full(len(rows), -1.0)
        likeness = np.maximum(likeness, -1.0)
        cost = likeness if own is None else share * likeness - own
        cost = np.where(np.isin(np.arange(len(rows)), picks), np.inf, cost)
        pick = start[len(picks)] if len(picks) < len(start) else int(cost.argmin())
        if len(picks) >= len(start) and cost[pick] >= stop:
            break
        picks.append(pick)
    return picks


@pytest.fixture(params=["blocks", "small blocks", "all at once"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "all at once":
        monkeypatch.setattr(dpp, "_FEW", 0)
    if request.param == "small blocks":
        monkeypatch.setattr(dpp, "_ACTIVE_ROWS", 16)
        monkeypatch.setattr(dpp, "_BLOCK", 4)
    return str(request.param)


@pytest.mark.parametrize("kind", ["random", "video", "frozen", "equal", "holes"])
def test_picks_of_a_plain_loop(kind: str, way: str) -> None:
    rows = unit_rows(make(kind, (4, 7, 6), seed=2).x.double())
    generator = np.random.default_rng(0)
    score = generator.integers(0, 6, len(rows)) / 6  # ties
    for count in (1, 40, len(rows)):
        for own, share in ((None, 1.0), (score, 0.5), (score, 0.0), (0 * score, 1.0)):
            for start in ([], [30, 2, 17]):
                begin = start[:count]
                expected = plain(rows, count, own, share, begin, np.inf)
                found = LazyGreedy(rows, count, own, share, STEP).run(begin)
                assert found.tolist() == expected, (count, share, start)


def test_stops_where_it_is_told(way: str) -> None:
    rows = unit_rows(make("video", (4, 7, 6), seed=3).x.double())
    for stop in (-0.2, 0.5, 0.97):
        expected = plain(rows, len(rows), None, 1.0, [3], stop)
        found = LazyGreedy(rows, len(rows), step=STEP, stop=stop).run([3])
        assert found.tolist() == expected and 0 < len(expected) < len(rows)


@pytest.mark.parametrize("kind", ["random", "video", "frozen", "holes"])
def test_max_min_in_all_its_ways(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "all at once":
        monkeypatch.setattr(max_min_search, "_ALL_AT_ONCE", 0)
    both = torch.stack([make(kind, (3, 8, 7), seed=seed).x for seed in (0, 1)])
    picks = max_min(both, 40)
    assert picks.shape == (2, 40)
    for item, found in zip(both, picks, strict=True):
        rows = unit_rows(item.double())
        zero = (rows == 0).all(-1)
        cosine = (rows @ rows.T).masked_fill_(zero[:, None] & zero, 1.0)
        cosine[cosine > 1 - 1e-6] = 1.0
        others = cosine.clone().fill_diagonal_(-2.0).amax(-1)
        order = found.tolist()
        assert others[order[0]] == others.min() or others[order[0]] < others.min() + 1e-6
        for step in range(1, 40):
            near = cosine[:, order[:step]].amax(-1)
            near[order[:step]] = 2.0
            assert near[order[step]] <= near.min() + 1e-6


@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_nearest_rows_chunk_by_chunk(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "_CHUNK", chunk)
    a, b = unit_rows(torch.randn(2, 150, 6)), unit_rows(torch.randn(2, 40, 6))
    b[:, 0] = a[:, 3]
    whole = similarity.nearest(a @ b.transpose(1, 2))
    assert similarity.nearest_rows(a, b).equal(whole) and int(whole[0, 3]) == 0
    skipped = similarity.nearest_rows(a, b, not_first=True)
    assert int(skipped.min()) > 0 and skipped[whole > 0].equal(whole[whole > 0])
    assert similarity.nearest_rows(a, b[:, :1], not_first=True).eq(0).all()
