"""The simulation of load against closed formulas of queueing theory."""

from __future__ import annotations

import math
import random

import pytest

from mmfast.planner.queueing import LoadFigures, Station, poisson, simulate, splits

COUNT = 20_000


def exponential(mean: float, count: int = COUNT) -> list[list[float]]:
    dice = random.Random(5)
    return [[dice.expovariate(1 / mean)] for _ in range(count)]


def mean(found: LoadFigures) -> float:
    return sum(found.seconds) / len(found.seconds)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_server_is_that_of_pollaczek_and_khinchine(load: float) -> None:
    times = poisson(load, COUNT)
    found = simulate([Station()], times, exponential(1.0))
    assert mean(found) == pytest.approx(1 / (1 - load), rel=0.12)  # M/M/1
    assert found.quantile(0.95) == pytest.approx(math.log(20) / (1 - load), rel=0.15)
    even = simulate([Station()], times, [[1.0]] * COUNT)
    assert mean(even) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.08)  # M/D/1


def test_processor_sharing_does_not_depend_on_the_distribution() -> None:
    times = poisson(0.6, COUNT)
    shared = Station(slots=500)
    dice = random.Random(3)
    mixed = [[dice.choice((0.5, 1.5))] for _ in range(COUNT)]
    for work in (exponential(1.0), [[1.0]] * COUNT, mixed):
        assert mean(simulate([shared], times, work)) == pytest.approx(2.5, rel=0.12)


def test_batching_serves_as_many_servers() -> None:
    """A replica whose gain is the number of its requests is as many servers: M/M/3."""
    times, work = poisson(2.0, COUNT), exponential(1.0)
    one = simulate([Station(slots=3, gain=(1.0, 2.0, 3.0))], times, work)
    three = simulate([Station(replicas=3)], times, work)
    assert mean(one) == pytest.approx(mean(three), rel=1e-9)
    waits = (2**3 / 6 * 3) / (1 + 2 + 2 + 2**3 / 6 * 3)  # Erlang C
    assert mean(one) == pytest.approx(1 + waits / (3 - 2), rel=0.06)


@pytest.mark.parametrize("room", [1, 3, 8])
def test_refusals_are_those_of_a_finite_queue(room: int) -> None:
    load = 1.2
    found = simulate([Station()], poisson(load, COUNT), exponential(1.0), room)
    wanted = (1 - load) * load**room / (1 - load ** (room + 1))  # M/M/1/K
    assert found.refused / COUNT == pytest.approx(wanted, rel=0.06)
    assert found.refused + len(found.seconds) == COUNT


def test_stations_follow_each_other() -> None:
    found = simulate([Station(), Station()], [0.0, 0.1], [[1.0, 2.0], [1.0, 0.5]])
    assert found.seconds == pytest.approx((3.0, 3.4))
    assert found.rate == pytest.approx(2 / 3.5)


def test_replicas_go_where_the_work_is() -> None:
    times = poisson(1.5, 2000)
    work = [[2.0, 0.3, 0.6]] * 2000
    order = splits(8, [Station(), Station(), Station(slots=4, gain=(1.0, 1.6, 2.0))], times, work)
    assert len(order) == 21 and order[0][0][0] >= 5  # 3 encoders are busy all the time
    assert order[0][1].quantile(0.95) < order[-1][1].quantile(0.95) / 10
    assert not simulate([Station()], [], []).seconds
