"""Sharing budgets out among groups, and the best of each group."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from mmfast import MmfastError
from mmfast.ops.ranking import best_places, grouped_topk, marked, share_out, stable_topk


def by_hand(weights: list[int], budget: int, caps: list[int]) -> list[int]:
    """Largest remainder in exact fractions."""
    full: set[int] = {g for g, cap in enumerate(caps) if cap == 0}
    while True:
        free = [g for g in range(len(caps)) if g not in full]
        left = budget - sum(caps[g] for g in full)
        total = sum(weights[g] for g in free)
        part = {g: Fraction(weights[g], total) if total else Fraction(1, len(free)) for g in free}
        over = [g for g in free if left * part[g] >= caps[g]]
        if not over:
            break
        full |= set(over)
    counts = [caps[g] if g in full else int(left * part[g]) for g in range(len(caps))]
    free.sort(key=lambda g: (-(left * part[g] - counts[g]), g))
    for g in free[: budget - sum(counts)]:
        counts[g] += 1
    return counts


def test_share_out_against_exact_fractions() -> None:
    rng = random.Random(0)
    for _ in range(400):
        groups = rng.randrange(1, 9)
        weights = [rng.choice([0, 1, 1, 2, 3, 40]) for _ in range(groups)]
        caps = [rng.randrange(0, 12) for _ in range(groups)]
        budget = rng.randrange(0, sum(caps) + 1)
        found = share_out(torch.tensor(weights), budget, torch.tensor(caps)).tolist()
        assert found == by_hand(weights, budget, caps), (weights, budget, caps)
        assert sum(found) == budget and all(f <= c for f, c in zip(found, caps, strict=True))


def test_share_out_of_rows_is_row_by_row() -> None:
    weights = torch.rand(3, 5, 7)
    caps = torch.randint(3, 9, (3, 5, 7))
    together = share_out(weights, 20, caps)
    assert together.sum(-1).eq(20).all()
    for i in range(3):
        for j in range(5):
            assert share_out(weights[i, j], 20, caps[i, j]).equal(together[i, j])


def test_share_out_ties_and_corners() -> None:
    even = torch.ones(4)
    assert share_out(even, 6, torch.full((4,), 9)).tolist() == [2, 2, 1, 1]
    assert share_out(even, 6, torch.tensor([1, 9, 9, 9])).tolist() == [1, 2, 2, 1]
    # A third and four thirds leave the same remainder, whatever rounding says.
    assert share_out(torch.tensor([1.0, 1.0, 4.0]), 10, torch.full((3,), 9)).tolist() == [2, 2, 6]
    assert share_out(torch.tensor([0.0, 0.0, 5.0]), 3, torch.tensor([4, 4, 1])).tolist() == [
        1,
        1,
        1,
    ]
    tiny = torch.tensor([1e-300, 1e-300], dtype=torch.float64)
    assert share_out(tiny, 3, torch.full((2,), 9)).tolist() == [2, 1]
    with pytest.raises(MmfastError, match="share 5 tokens"):
        share_out(even, 5, torch.ones(4, dtype=torch.int64))


def test_grouped_topk_against_a_loop() -> None:
    rng = random.Random(1)
    for _ in range(60):
        n, groups = rng.randrange(1, 30), rng.randrange(1, 6)
        score = torch.tensor([[rng.randrange(4) / 4 for _ in range(n)] for _ in range(3)])
        group = torch.tensor([[rng.randrange(groups) for _ in range(n)] for _ in range(3)])
        counts = torch.zeros(3, groups, dtype=torch.int64)
        wanted = torch.zeros(3, n, dtype=torch.bool)
        for row in range(3):
            for g in range(groups):
                members = [i for i in range(n) if group[row, i] == g]
                members.sort(key=lambda i, row=row: (-float(score[row, i]), i))
                counts[row, g] = rng.randrange(len(members) + 1)
                wanted[row, members[: counts[row, g]]] = True
        found = grouped_topk(score, group, counts)
        assert found.equal(wanted)
        assert marked(found[0]).tolist() == [i for i in range(n) if wanted[0, i]]


def test_marked_keeps_leading_dims() -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert marked(mask[None]).tolist() == [[[0, 2], [1, 2]]]


def test_the_best_places_are_those_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    for case in range(200):
        n = int(torch.randint(1, 30, (), generator=generator))
        count = int(torch.randint(0, n + 1, (), generator=generator))
        levels = 3 if case % 2 else 1000  # few levels: nearly all are ties
        score = torch.randint(levels, (2, 3, n), generator=generator).double()
        score[torch.rand(score.shape, generator=generator) < 0.1] = torch.inf
        score[torch.rand(score.shape, generator=generator) < 0.1] = -torch.inf
        same = (
            best_places(score, count).sort(-1).values == stable_topk(score, count).sort(-1).values
        )
        assert same.all(), (n, count, levels)
