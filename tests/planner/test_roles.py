"""Advice on roles: the model against closed formulas and the simulation, and where it moves."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mmfast.planner.roles import (
    COMBINED,
    STAGES,
    RoleTargets,
    StageLoad,
    advise,
    capacity,
    choices,
    moves,
    pooled,
    predicted,
    simulated,
    stage_seconds,
)

GAIN = tuple(n / (1 + 0.1 * (n - 1)) for n in range(1, 9))  # a step of 8 takes 1.7 of one


def loads(encode: float = 0.2, prefill: float = 0.1, decode: float = 1.0, **more: Any) -> Any:
    return (
        StageLoad("encode", encode, more.get("spread", 1.0)),
        StageLoad("prefill", prefill, more.get("spread", 1.0)),
        StageLoad("decode", decode, more.get("spread", 1.0), GAIN),
    )


def erlang(load: float, servers: int) -> float:
    """The share of arrivals that wait in M/M/c."""
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(load**n / math.factorial(n) for n in range(servers)) + last)


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize("full", [0.1, 0.5, 0.9])
def test_the_model_is_that_of_erlang_and_of_pollaczek_and_khinchine(
    servers: int, full: float
) -> None:
    rate = full * servers / 0.5
    wait = erlang(rate * 0.5, servers) * 0.5 / (servers * (1 - full))
    found = stage_seconds(StageLoad("a", 0.5), rate, servers)
    assert found == pytest.approx(0.5 + wait, rel=1e-9)  # M/M/c
    for spread in (0.0, 0.4, 3.0):
        found = stage_seconds(StageLoad("a", 0.5, spread), full / 0.5, 1)
        wanted = 0.5 * (1 + full * (1 + spread) / (2 * (1 - full)))  # M/G/1
        assert found == pytest.approx(wanted, rel=1e-9)
    assert stage_seconds(StageLoad("a", 0.5), servers / 0.5, servers) == math.inf
    assert stage_seconds(StageLoad("a", 0.5), 0.0, servers) == 0.5


def test_a_pool_is_its_workers() -> None:
    assert pooled([1.0], 3) == [1.0, 2.0, 3.0]
    assert pooled([1.0, 1.5], 2) == [1.0, 2.0, 2.5, 3.0]


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("full", [0.3, 0.6, 0.8])
@pytest.mark.parametrize("roles", [{COMBINED: 6}, {"encode": 2, "prefill": 1, "decode": 3}])
def test_the_model_tells_what_the_simulation_finds(
    roles: dict[str, int], full: float, spread: float
) -> None:
    """Each stage from 25 % less to 20 % more, and the whole within 15 %.

    What leaves a stage of even work comes more evenly to the next than the model has it, which then
    expects too much of a queue there, never too little.
    """
    work = loads(spread=spread)
    rate = full * capacity(roles, work)
    found = simulated(roles, work, rate, 10_000, seed=3)
    told = predicted(roles, work, rate)
    if COMBINED in roles:
        expected = {COMBINED: told.step_stretch * 1.3}
    else:
        expected = {load.name: stage_seconds(load, rate, roles[load.name]) for load in work}
        assert told.first_seconds == pytest.approx(expected["encode"] + expected["prefill"])
    for name, seconds in found.items():
        behind = name == "prefill" and not spread
        assert expected[name] >= 0.75 * seconds, name
        assert behind or expected[name] <= 1.2 * seconds, name
    assert sum(expected.values()) == pytest.approx(sum(found.values()), rel=0.15)


def test_more_than_the_capacity_is_told_and_the_roles_that_serve_most_are_advised() -> None:
    work = loads()
    found = advise(work, 1000.0, 6)
    assert found.strain == math.inf
    assert all(capacity(found.roles, work) >= capacity(each, work) for each in choices(6))


def test_advice_moves_with_the_load() -> None:
    """One worker or little load: all do everything; more load parts them, most parts them anew."""
    assert advise(loads(), 0.5, 2).roles == {COMBINED: 2}
    quiet = advise(loads(), 0.01, 6, RoleTargets(5.0, 1.5))
    assert quiet.roles == {COMBINED: 6} and quiet.strain < 1
    busy = advise(loads(), 8.0, 8)
    assert set(busy.roles) == set(STAGES) and sum(busy.roles.values()) == 8
    shared = predicted({COMBINED: 8}, loads(), 8.0)
    assert busy.step_stretch < shared.step_stretch and busy.strain < shared.strain
    full = max(capacity(each, loads()) for each in choices(8))
    assert advise(loads(), 0.97 * full, 8).roles == {COMBINED: 8}  # the parts are uneven


@pytest.mark.parametrize(("stage", "more"), [("encode", 0.5), ("prefill", 0.4), ("decode", 2.0)])
def test_advice_moves_to_the_stage_that_has_more_to_do(stage: str, more: float) -> None:
    """Longer clips, prompts or answers get more workers, at any rate that can be served."""
    before, after = loads(), loads(**{stage: more})
    seen = 0
    for rate in (8.0, 9.0):
        a, b = advise(before, rate, 10), advise(after, rate, 10)
        if COMBINED in a.roles or COMBINED in b.roles:
            continue
        assert b.roles[stage] >= a.roles[stage], rate
        seen += b.roles[stage] > a.roles[stage]
    assert seen


def test_as_few_workers_as_possible_change() -> None:
    now = ["encode", "prefill", "decode", "decode", COMBINED]
    assert moves(now, {"encode": 1, "prefill": 2, "decode": 2}) == {4: "prefill"}
    assert moves(now, {COMBINED: 5}) == dict.fromkeys(range(4), COMBINED)
    assert moves(["encode", "decode"], {"encode": 1, "decode": 1}) == {}
