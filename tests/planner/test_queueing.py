"""The simulation of load against closed formulas of queueing theory, and against the server."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from mmfast.planner.queueing import LoadFigures, poisson, simulate

COUNT = 20_000


def exponential(mean: float = 1.0) -> list[float]:
    dice = random.Random(5)
    return [dice.expovariate(1 / mean) for _ in range(COUNT)]


def mean(found: LoadFigures) -> float:
    return sum(found.seconds) / len(found.seconds)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_is_that_of_pollaczek_and_khinchine(load: float) -> None:
    times = poisson(load, COUNT)
    found = simulate(times, exponential(), [1.0])
    assert mean(found) == pytest.approx(1 / (1 - load), rel=0.12)  # M/M/1
    assert found.quantile(0.95) == pytest.approx(math.log(20) / (1 - load), rel=0.15)
    even = simulate(times, [1.0] * COUNT, [1.0])
    assert mean(even) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.08)  # M/D/1


def test_a_shared_server_does_not_depend_on_the_distribution() -> None:
    times, dice = poisson(0.6, COUNT), random.Random(3)
    mixed = [dice.choice((0.5, 1.5)) for _ in range(COUNT)]
    for work in (exponential(), [1.0] * COUNT, mixed):
        assert mean(simulate(times, work, [1.0] * 500)) == pytest.approx(2.5, rel=0.12)


def test_batching_serves_as_many_servers() -> None:
    """A server whose gain is the number of its requests is as many servers: M/M/3."""
    found = simulate(poisson(2.0, COUNT), exponential(), [1.0, 2.0, 3.0])
    waits = (2**3 / 6 * 3) / (1 + 2 + 2 + 2**3 / 6 * 3)  # Erlang C
    assert mean(found) == pytest.approx(1 + waits / (3 - 2), rel=0.06)


@pytest.mark.parametrize("room", [1, 3, 8])
def test_refusals_are_those_of_a_finite_queue(room: int) -> None:
    load = 1.2
    found = simulate(poisson(load, COUNT), exponential(), [1.0], room)
    wanted = (1 - load) * load**room / (1 - load ** (room + 1))  # M/M/1/K
    assert found.refused / COUNT == pytest.approx(wanted, rel=0.06)
    assert found.refused + len(found.seconds) == COUNT


def test_the_queue_is_in_order_of_arrival() -> None:
    found = simulate([0.0, 0.1, 0.2], [1.0, 1.0, 0.1], [1.0])
    assert found.seconds == pytest.approx((1.0, 1.9, 1.9)) and found.rate == pytest.approx(3 / 2.1)
    assert not simulate([], [], [1.0]).seconds


def test_the_simulation_tells_what_the_server_did() -> None:
    """The last recorded load: nothing is lost, and the prediction is within a third or so."""
    lines = Path("assets/results/serve-cpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    found = {row["load"]: row for row in rows if row["bench"] == "open"}
    assert set(found) == {0.5, 0.8, 1.2}
    for load, row in found.items():
        assert row["lost"] == 0 and row["answered"] + row["busy"] == row["n"]
        assert row["told_per_s"] == pytest.approx(row["per_s"], rel=0.2)
        assert row["told_p50_ms"] == pytest.approx(row["p50_ms"], rel=0.3)
        assert row["told_p95_ms"] == pytest.approx(row["p95_ms"], rel=0.4)
        assert bool(row["busy"]) == bool(row["told_busy"]) == (load > 1)
    assert found[1.2]["retry_after_s"] > 0
