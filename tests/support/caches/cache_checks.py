"""The promises every cache policy makes, as checks of one method; test_caches.py runs them."""

from __future__ import annotations

import math

import numpy as np
import oracles_caches
import pytest
import torch
from cache_factory import KINDS, layer_of, make, stacked

from mmfast import MmfastError, Reduction, SpecError, Tokens
from mmfast.caches.plan import plan_cache
from mmfast.core.registry import Method

SHAPES = [(1, 1), (2, 2), (1, 3), (3, 13), (2, 40), (2, 71)]


def evict(tokens: Tokens, spec: str) -> Reduction:
    plan = plan_cache(spec)
    assert plan is not None
    reduction = plan.reduce(tokens)
    reduction.check()
    return reduction


def spec_of(method: Method | str, budget: object, **knobs: object) -> str:
    name = method if isinstance(method, str) else method.name
    pairs = "&".join(f"{key}={value}" for key, value in knobs.items())
    return name + ("" if budget is None else f":{budget}") + (f"?{pairs}" if pairs else "")


def matrix(reduction: Reduction) -> np.ndarray:
    """How each head combines sources, `[H, M, N]`."""
    eye = torch.eye(reduction.n, dtype=torch.float64)
    return reduction.apply(eye.expand(*reduction.keep.shape[:-1], -1, -1)).numpy()


def disagreement(tokens: Tokens, name: str, budget: int | None, **knobs: object) -> str:
    """How a policy differs from its oracle on one conversation, "" if it does not."""
    answers = oracles_caches.ORACLES[name](layer_of(tokens), budget, **knobs)
    try:
        found = evict(tokens, spec_of(name, budget, **knobs))
    except MmfastError as error:
        return str(error)
    combined = matrix(found)
    for head, answer in enumerate(answers):
        if found.keep[head].tolist() != answer.keep:
            return f"head {head} keeps {found.keep[head].tolist()} instead of {answer.keep}"
        if not np.allclose(combined[head], answer.matrix, rtol=1e-5, atol=1e-6):
            return f"head {head} combines other sources or weights"
    return ""


def exact(method: Method) -> dict[str, object]:
    """Knobs under which a budget is kept in every layer."""
    return {"threshold": 0.0} if "threshold" in method.knobs else {}


def budgets(n: int) -> list[int]:
    return sorted({1, 2, n // 7, n // 3, n // 2, 3 * n // 4, n - 1} & set(range(1, n + 1)))


def check_oracle(method: Method, kind: str) -> None:
    for seed, (heads, n) in enumerate(SHAPES):
        tokens = make(kind, heads, n, seed=seed)
        for budget in budgets(n):
            assert not disagreement(tokens, method.name, budget), (heads, n, budget)


def check_exact_budget(method: Method) -> None:
    for n in (1, 2, 3, 5, 19, 64, 333):
        tokens = make("random", 2, n, seed=n)
        for budget in {1, n // 4, n // 2, n - 1, n} - {0}:
            found = evict(tokens, spec_of(method, budget, **exact(method)))
            assert found.m == budget and found.keep.shape == (2, budget)
        for share in (0.01, 0.1, 0.5, 0.9):
            spec = spec_of(method, share, **exact(method))
            assert evict(tokens, spec).m == max(1, round(share * n))


def check_long_caches(method: Method) -> None:
    tokens = make("random", 2, 3001, width=16)
    for budget in (1, 700, 3000):
        found = evict(tokens, spec_of(method, budget, **exact(method)))
        assert found.m == budget and torch.isfinite(found.apply(tokens.x)).all()


def check_a_large_budget_is_the_identity(method: Method) -> None:
    tokens = make("random", 2, 24)
    for budget in (24, 25, 10**9, "1.0"):
        found = evict(tokens, spec_of(method, budget))
        assert found.pure and found.apply(tokens.x).equal(tokens.x)


def check_batch_equals_one_by_one(method: Method) -> None:
    for kind in ("random", "ties", "equal"):
        items = [make(kind, 3, 48, seed=5 * seed) for seed in range(4)]
        for item in items:  # the policies run on one layer at a time
            item.signals["layer"].fill_(2)
        batch = stacked(items)
        for budget in (1, 5, 24, 47):
            together = evict(batch, spec_of(method, budget))
            outputs = together.apply(batch.x)
            for index, one in enumerate(items):
                alone = evict(one, spec_of(method, budget))
                assert together.keep[index].equal(alone.keep)
                assert together.owner[index].equal(alone.owner)
                torch.testing.assert_close(outputs[index], alone.apply(one.x))


def check_heads_decide_alone(method: Method) -> None:
    """A policy that is not the same for all heads does not look at other heads."""
    if method.name in (
        "chunkkv",
        "entropy_chunkkv",
        "keynorm",
        "kvcompose",
        "simlayerkv",
        "tova",
        "zipcache",
        "zipvl",
    ):  # all heads together, by the paper
        return
    if method.name == "random":  # each head has its own draw
        return
    tokens = make("random", 3, 40)
    for budget in (4, 20):
        found = evict(tokens, spec_of(method, budget, **_quiet(method)))
        for head in range(3):
            alone = evict(one_head(tokens, head), spec_of(method, budget, **_quiet(method)))
            assert found.keep[head].equal(alone.keep[0])


def _quiet(method: Method) -> dict[str, object]:
    noise = {"noise": 0.0} if "noise" in method.knobs else {}  # every head has its own draw
    if method.name == "fastkv":  # its mean counts places beyond the ends as zeros
        noise = {"kernel": 1}
    return noise | exact(method)


def one_head(tokens: Tokens, head: int) -> Tokens:
    part = slice(head, head + 1)
    signals = {k: v[part] if v.ndim > 1 else v for k, v in tokens.signals.items()}
    return Tokens(tokens.x[part], signals=signals)


def check_half_precision_keys(method: Method) -> None:
    """The choice is made in float32 or wider: the same as for the rounded values there."""
    for dtype in (torch.bfloat16, torch.float16):
        tokens = make("random", 2, 48)
        rounded = {
            k: v.to(dtype).float() if v.is_floating_point() else v
            for k, v in tokens.signals.items()
        }
        wide = Tokens(tokens.x.to(dtype).float(), signals=rounded)
        half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tokens.signals.items()}
        found = evict(Tokens(tokens.x.to(dtype), signals=half), spec_of(method, 13))
        full = evict(wide, spec_of(method, 13))
        assert found.keep.equal(full.keep) and found.owner.equal(full.owner)
        assert found.apply(tokens.x.to(dtype)).dtype == dtype


# Not ends alone, as their oracles say.
_PARTS = ("infinipot_v", "lagkv", "livevlm", "random", "streammem")


def check_ties_go_to_the_lowest_index(method: Method) -> None:
    """Where every token is alike, what is not kept by place is the first tokens."""
    if method.role != "score" or method.name in _PARTS:
        return  # draws do not tie
    for kind in ("equal", "zero"):
        tokens = make(kind, 2, 60)
        tokens.signals["kind"].fill_(1)
        tokens.signals["values"].fill_(1)
        tokens.signals["behind"] = torch.ones(60)  # tells no token of `zipvl` from another
        for budget in (3, 30):
            keep = evict(tokens, spec_of(method, budget, **_quiet(method))).keep
            first = next((i for i in range(budget) if int(keep[0, i]) != i), budget)
            last = torch.arange(60 - (budget - first), 60)
            assert keep[0, first:].equal(last) and (keep == keep[:1]).all()


def check_deterministic_and_without_side_effects(method: Method) -> None:
    tokens = make("random", 2, 48)
    before = {name: value.clone() for name, value in tokens.signals.items()}
    x = tokens.x.clone()
    first, again = (evict(tokens, spec_of(method, 11)) for _ in range(2))
    assert first.keep.equal(again.keep) and first.owner.equal(again.owner)
    assert tokens.x.equal(x) and set(tokens.signals) == set(before)
    assert all(tokens.signals[name].equal(value) for name, value in before.items())


def check_weights_sum_to_one(method: Method) -> None:
    """A merged pair is as long as an ordinary one: an average, never a sum."""
    if method.name == "cam":  # adds values, by the paper
        return
    for kind in KINDS:
        tokens = make(kind, 2, 48)
        for budget in (1, 7, 30):
            rows = matrix(evict(tokens, spec_of(method, budget))).sum(-1)
            assert np.allclose(rows, 1, atol=1e-6)


def check_nan_is_refused(method: Method) -> None:
    """In whatever it reads; where it reads nothing but places there is nothing to refuse."""
    for broken in (math.nan, math.inf):
        for name in {*method.needs} | ({"x"} if method.role == "score" else set()):
            tokens = make("random", 2, 24)
            values = tokens.x if name == "x" else tokens.signals[name]
            if values.is_floating_point():
                values[1, ..., 3] = broken
                with pytest.raises(MmfastError, match="not finite"):
                    evict(tokens, spec_of(method, 4))


def check_missing_signals_are_named(method: Method) -> None:
    absent = [need for need in method.needs if need != "x"]
    bare = Tokens(torch.randn(2, 12, 4))
    if not absent:
        evict(bare, spec_of(method, 4))
        return
    with pytest.raises(SpecError, match=f"{method.name}.*needs '{absent[0]}'"):
        evict(bare, spec_of(method, 4))


PROMISES = (
    check_exact_budget,
    check_long_caches,
    check_a_large_budget_is_the_identity,
    check_batch_equals_one_by_one,
    check_heads_decide_alone,
    check_half_precision_keys,
    check_ties_go_to_the_lowest_index,
    check_deterministic_and_without_side_effects,
    check_weights_sum_to_one,
    check_nan_is_refused,
    check_missing_signals_are_named,
)


def check_contract(method: Method) -> None:
    """Everything above, for a policy that has just been written."""
    for kind in KINDS:
        check_oracle(method, kind)
    for promise in PROMISES:
        promise(method)
