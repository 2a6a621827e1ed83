"""The promises every reducer makes, as checks of one method; test_reducers.py runs them on all."""

from __future__ import annotations

import math
import random

import numpy as np
import oracles
import pytest
import torch
from token_factory import KINDS, item, make, stacked

import mmfast
from mmfast import Reduction, SpecError, Tokens
from mmfast.core.registry import Method, get

GRIDS = [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 1, 13), (1, 4, 5), (4, 3, 3), (6, 2, 4), (7, 3, 2)]


def spec_of(method: Method, budget: object, knobs: str = "") -> str:
    site = "llm2" if method.sites[0] == "llm" else method.sites[0]
    return f"{method.name}@{site}:{budget}" + (f"?{knobs}" if knobs else "")


def reduce(tokens: Tokens, spec: str) -> Reduction:
    reduction = mmfast.reduce(tokens, spec)
    assert isinstance(reduction, Reduction)
    reduction.check()
    return reduction


def matrix(reduction: Reduction) -> np.ndarray:
    return reduction.apply(torch.eye(reduction.n, dtype=torch.float64)).numpy()


def disagreement(tokens: Tokens, name: str, budget: int, **knobs: float) -> str:
    """How the reducer differs from its oracle, "" if it does not."""
    answer = oracles.ORACLES[name](item(tokens), budget, **knobs)
    method = get(name)
    text = "&".join(f"{k}={v}" for k, v in knobs.items())
    try:
        found = reduce(tokens, spec_of(method, budget, text))
    except mmfast.MmfastError as error:
        return str(error)
    if found.keep.tolist() != answer.keep:
        return f"keeps {found.keep.tolist()} instead of {answer.keep}"
    if not np.allclose(matrix(found), answer.matrix, rtol=1e-5, atol=1e-6):
        return "combines other sources or weights"
    return ""


def wanted(method: Method, tokens: Tokens, budget: int) -> int:
    """Tokens that a budget leaves: all of it, or the largest raster below it."""
    if not method.resizes or tokens.grid is None or budget == tokens.n:
        return budget
    return math.prod(oracles.smaller(tokens.grid, budget))


def budgets(n: int) -> list[int]:
    return sorted({1, 2, n // 7, n // 4, n // 3, n // 2, 3 * n // 4, n - 1} & set(range(1, n + 1)))


def check_oracle(method: Method, kind: str) -> None:
    for seed, grid in enumerate(GRIDS):
        tokens = make(kind, grid, seed=seed)
        for budget in budgets(tokens.n):
            assert not disagreement(tokens, method.name, budget), (grid, budget)


def check_oracle_without_grid(method: Method) -> None:
    if "grid" in method.needs:
        with pytest.raises(SpecError, match="needs 'grid'"):
            reduce(make("random", (1, 1, 17), with_grid=False), spec_of(method, 5))
        return
    for n in (1, 2, 3, 17, 31):
        tokens = make("random", (1, 1, n), with_grid=False, seed=n)
        for budget in budgets(n):
            assert not disagreement(tokens, method.name, budget), (n, budget)


def check_exact_budget_for_any_number_of_tokens(method: Method) -> None:
    for n in range(1, 71):
        with_grid = bool(n % 2) or "grid" in method.needs
        tokens = make("random", (1, 1, n), width=4, seed=n, with_grid=with_grid)
        for budget in {1, n // 4, n // 2, n - 1, n} - {0}:
            assert reduce(tokens, spec_of(method, budget)).m == budget


def check_exact_budget_up_to_6272(method: Method, kind: str) -> None:
    rng = random.Random(f"{method.name} {kind}")
    n = rng.randrange(71, 6272)
    grids = [(1, 1, n), (32, 14, 14), (8, 14, 14)] if kind == "frozen" else [(8, n // 8, 1)]
    for grid in grids:
        tokens = make(kind, grid, width=8)
        for budget in (rng.randrange(1, tokens.n), tokens.n // 4):
            found = reduce(tokens, spec_of(method, budget))
            assert found.m == len(set(found.keep.tolist()))
            assert found.m == wanted(method, tokens, budget)
            assert torch.isfinite(found.apply(tokens.x)).all()


def check_full_budget_is_the_identity(method: Method) -> None:
    tokens = make("video", (4, 3, 3))
    for budget in (tokens.n, "1.0"):
        found = reduce(tokens, spec_of(method, budget))
        assert found.apply(tokens.x).equal(tokens.x) and found.pure


def check_batch_equals_one_by_one(method: Method, kind: str) -> None:
    items = [make(kind, (4, 3, 4), seed=seed) for seed in (0, 1, 2, 3, 4, 5)]
    batch = stacked(items)
    nested = Tokens(
        batch.x.unflatten(0, (2, 3)),
        attn=batch.attn.unflatten(0, (2, 3)),
        query=batch.query.unflatten(0, (2, 3)),
        grid=batch.grid,
        signals={name: value.unflatten(0, (2, 3)) for name, value in batch.signals.items()},
    )
    for budget in (1, 5, 12, 20, 47):
        spec = spec_of(method, budget)
        together, deep = reduce(batch, spec), reduce(nested, spec)
        assert deep.keep.flatten(0, 1).equal(together.keep)
        outputs = together.apply(batch.x)
        for index, one in enumerate(items):
            alone = reduce(one, spec)
            assert together.select(index).keep.equal(alone.keep)
            assert together.select(index).owner.equal(alone.owner)
            torch.testing.assert_close(outputs[index], alone.apply(one.x))


def check_half_precision_input(method: Method, dtype: torch.dtype) -> None:
    """The choice is made in float32: the same as for the rounded values in float32."""
    tokens = make("video", (4, 3, 4))

    def cast(to: torch.dtype) -> Tokens:
        def value(given: torch.Tensor) -> torch.Tensor:
            return given.to(dtype).to(to) if given.is_floating_point() else given

        return Tokens(
            value(tokens.x),
            attn=value(tokens.attn),
            query=value(tokens.query),
            grid=tokens.grid,
            signals={name: value(signal) for name, signal in tokens.signals.items()},
        )

    for budget in (5, 24):
        half = reduce(cast(dtype), spec_of(method, budget))
        full = reduce(cast(torch.float32), spec_of(method, budget))
        assert half.keep.equal(full.keep) and half.owner.equal(full.owner)
        assert half.apply(cast(dtype).x).dtype == dtype


def check_deterministic_and_without_side_effects(method: Method) -> None:
    tokens = make("video", (4, 3, 4))
    before = {name: value.clone() for name, value in tokens.signals.items()}
    x, attn = tokens.x.clone(), tokens.attn.clone()
    first, again = (reduce(tokens, spec_of(method, 11)) for _ in range(2))
    assert first.keep.equal(again.keep) and first.owner.equal(again.owner)
    assert tokens.x.equal(x) and tokens.attn.equal(attn)
    assert all(tokens.signals[name].equal(value) for name, value in before.items())


def check_weights_sum_to_one(method: Method) -> None:
    """A merged token has the length of an ordinary one: an average, never a sum."""
    for kind in ("random", "video", "frozen"):
        tokens = make(kind, (4, 3, 4))
        for budget in (1, 7, 30):
            rows = matrix(reduce(tokens, spec_of(method, budget))).sum(-1)
            assert np.allclose(rows, 1, atol=1e-6)


def check_missing_signals_are_named(method: Method) -> None:
    bare = Tokens(torch.randn(12, 4))
    absent = [need for need in method.needs if need != "x"]
    if absent:
        with pytest.raises(SpecError, match=f"{method.name}.*needs '{absent[0]}'"):
            reduce(bare, spec_of(method, 4))
    else:
        reduce(bare, spec_of(method, 4))


PROMISES = (
    check_oracle_without_grid,
    check_exact_budget_for_any_number_of_tokens,
    check_full_budget_is_the_identity,
    check_deterministic_and_without_side_effects,
    check_weights_sum_to_one,
    check_missing_signals_are_named,
)


def check_contract(method: Method) -> None:
    """Everything above, for a method that has just been written."""
    for kind in KINDS:
        check_oracle(method, kind)
    for kind in ("random", "frozen", "video"):
        check_exact_budget_up_to_6272(method, kind)
        check_batch_equals_one_by_one(method, kind)
    for dtype in (torch.bfloat16, torch.float16):
        check_half_precision_input(method, dtype)
    for promise in PROMISES:
        promise(method)
