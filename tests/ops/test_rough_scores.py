"""Choices on scores in float32: the same entries as those of the exact scores, ties included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmfast.caches import plan
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.tokens import Tokens
from mmfast.ops import eviction
from mmfast.ops.pages import PageTable, key_bounds
from mmfast.ops.ranking import RoughScores, best_places, stable_topk

_DRAWN = torch.Generator().manual_seed(0)


def _places(exact: Tensor, error: float, count: int) -> Tensor:
    """The best places on scores that are off by up to `error`, at random."""
    off = (torch.rand(exact.shape, generator=_DRAWN, dtype=torch.float64) * 2 - 1) * error
    rough = (exact + off).float().numpy()
    told = exact.reshape(-1).numpy()
    return best_places(RoughScores(rough, error * 1.01 + 1e-5, told.__getitem__), count)


@pytest.mark.parametrize("levels", [2, 5, 40, 10**6])
def test_rough_scores_choose_as_exact_ones(levels: int) -> None:
    for case in range(36):
        n = int(torch.randint(1, 40, (), generator=_DRAWN))
        count = int(torch.randint(0, n + 1, (), generator=_DRAWN))
        lead = [(), (3,), (2, 3)][case % 3]
        exact = torch.randint(levels, (*lead, n), generator=_DRAWN).double() * 10 / levels
        exact[torch.rand(exact.shape, generator=_DRAWN) < 0.1] = torch.inf
        error = [0.0, 1e-3, 0.3, 20.0][case % 4]
        want = stable_topk(exact, count).sort(-1).values
        assert torch.equal(_places(exact, error, count), want), (n, count, error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_scores_that_lie_across_memory_are_ranked_where_they_lie(dtype: torch.dtype) -> None:
    for _ in range(20):
        score = torch.randint(4, (30, 3, 2), generator=_DRAWN).to(dtype).permute(2, 1, 0)
        assert not score.is_contiguous()
        want = stable_topk(score, 11).sort(-1).values
        assert torch.equal(best_places(score, 11), want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keydiff_sees_in_its_scores_that_a_key_is_not_finite(bad: float) -> None:
    made: Any = plan_cache("keydiff:70")
    rows = _rows("random", torch.float32)
    assert made.score.method.rough(Tokens(rows), 70) is not None
    rows[1, 200, 3] = bad
    with pytest.raises(MmfastError, match="not finite at"):
        made.reduce(Tokens(rows))


def test_an_error_that_is_told_too_small_is_seen() -> None:
    exact = torch.randint(1000, (2, 400), generator=_DRAWN).double()
    off = torch.randint(-20, 20, exact.shape, generator=_DRAWN)
    told = exact.reshape(-1).numpy()
    rough = RoughScores((exact + off).float().numpy(), 0.1, told.__getitem__)
    assert not torch.equal(best_places(rough, 100), stable_topk(exact, 100).sort(-1).values)


def _rows(kind: str, dtype: torch.dtype) -> Tensor:
    rows = torch.randn(2, 300, 16, generator=_DRAWN)
    if kind == "ties":  # few different rows
        rows = rows[:, torch.randint(12, (300,), generator=_DRAWN)]
    if kind == "equal lengths":
        rows = rows / rows.norm(dim=-1, keepdim=True)
    if kind == "close":
        rows = rows[:, :1] * (1 + torch.rand(2, 300, 1, generator=_DRAWN) * 1e-4)
    if kind == "tiny":
        rows = rows * 1e-20
    return rows.to(dtype)


@pytest.mark.parametrize("columns", [False, True])
def test_facts_about_pages_outlive_growth_and_drafts(columns: bool) -> None:
    keys = torch.randn(2, 3, 400, 5, generator=_DRAWN)
    table = PageTable(4, key_bounds, columns)
    for count in (3, 3, 20, 98, 100):
        pages = keys[:, :, : count * 4].unflatten(2, (count, 4))
        want = torch.cat([pages.amax(3), pages.amin(3)], -1)
        assert torch.equal(table.grow(keys, count), want)
        if count == 20:
            table.trim(41)
            keys[:, :, 40:] += 1


@pytest.mark.parametrize("kind", ["random", "ties", "equal lengths", "close", "tiny"])
@pytest.mark.parametrize("spec", ["knorm:70", "curdkv:70?rank=0&sink=3", "curdkv:2?rank=0&sink=3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_policies_keep_what_exact_scores_keep(spec: str, kind: str, dtype: torch.dtype) -> None:
    made: Any = plan_cache(spec)
    rough = made.score.method.rough
    tokens = Tokens(_rows(kind, dtype), signals={"values": _rows(kind, dtype)})
    budget = made.score.budget
    score = eviction.call(made.score, tokens, budget)
    want = stable_topk(score, budget).sort(-1).values
    assert torch.equal(made.reduce(tokens).keep, want)
    told = rough(tokens, budget, **made.score.knobs)
    assert (told is None) == (kind == "tiny")
    if told is not None:
        near = (
            (torch.from_numpy(told.score).double() - score).masked_fill(score == torch.inf, 0).abs()
        )
        assert float(near.max()) <= told.error
        assert torch.equal(told.all(), score)


def test_a_part_of_the_entries_is_read_where_it_lies() -> None:
    made: Any = plan.plan_cache("window:4+knorm:30")
    rows = _rows("ties", torch.float32)
    kept = made.reduce(Tokens(rows, signals={"kind": torch.zeros(300, dtype=torch.int64)})).keep
    lengths = rows[:, :-4].double().norm(dim=-1)
    steps = (lengths / lengths.amax(-1, keepdim=True) * 2**16).round()
    old = steps.sort(dim=-1, stable=True).indices[:, :30].sort(-1).values
    assert torch.equal(kept, torch.cat([old, torch.arange(296, 300).expand(2, 4)], -1))


@pytest.mark.parametrize("spec", ["window:4+curdkv:6?rank=0", "sink:2+window:4+vatp:6"])
@pytest.mark.parametrize("n", [16, 60])
def test_values_of_another_width_than_keys_are_chosen_from(spec: str, n: int) -> None:
    keys, values = (torch.randn(2, n, width, generator=_DRAWN) for width in (24, 16))
    signals = {"kind": torch.zeros(n, dtype=torch.int64), "attn_sum": torch.rand(2, n)}
    made: Any = plan_cache(spec)
    wide = torch.nn.functional.pad(values, (0, 8))  # zeros add nothing to a length
    want, kept = (
        made.reduce(Tokens(keys, signals={**signals, "values": each})).keep
        for each in (wide, values)
    )
    assert torch.equal(kept, want)
