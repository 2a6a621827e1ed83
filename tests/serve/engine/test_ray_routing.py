"""The choice of a replica, and what becomes of requests whose replica dies, without a cluster."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_requests import Inbox, asked
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("ray", reason="needs Ray: pip install mmfast[ray]")
pytestmark = pytest.mark.filterwarnings("ignore")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own, of its own code
    from ray import exceptions

    from mmfast.serve.ray.router import LeastRequestsRouter

from mmfast.serve.engine.base import Delta, Event, Failure, Finish, Health, Request  # noqa: E402
from mmfast.serve.ray.deployments import AnswerReplica  # noqa: E402
from mmfast.serve.ray.engine import RayEngine, RemoteStream, drive  # noqa: E402


class Routed:
    """A router and its replicas; `place` chooses for a request as Ray does."""

    def __init__(self, replicas: int) -> None:
        self.router: Any = LeastRequestsRouter.__new__(LeastRequestsRouter)
        self.router.initialize_state()
        self.replicas = [SimpleNamespace(replica_id=f"r{n}") for n in range(replicas)]
        self.pending: dict[str, Any] = {}

    async def place(self, name: str, routed: bool = True, full: tuple[str, ...] = ()) -> str:
        future = asyncio.get_running_loop().create_future()
        request = SimpleNamespace(metadata=SimpleNamespace(internal_request_id=name), future=future)
        self.pending[name] = request
        ranks = await self.router.choose_replicas(self.replicas, request)
        assert sorted(each.replica_id for (each,) in ranks) == sorted(
            each.replica_id for each in self.replicas
        )
        taken = next(each.replica_id for (each,) in ranks if each.replica_id not in full)
        if routed:
            self.router.on_request_routed(request, taken, None)
        return str(taken)


@pytest.mark.parametrize("routed", [True, False])
def test_a_burst_is_shared_evenly(routed: bool) -> None:
    """Also where all requests choose before any has reached its replica."""

    async def run() -> Counter[str]:
        router = Routed(2)
        return Counter([await router.place(f"q{n}", routed) for n in range(8)])

    for _ in range(20):
        assert asyncio.run(run()) == {"r0": 4, "r1": 4}


@settings(max_examples=60)
@given(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=60))
def test_the_fewest_unfinished_at_every_moment(replicas: int, moves: list[int]) -> None:
    """0: the oldest is over; 1: the newest is cancelled before it is placed; else a new one."""

    async def run() -> None:
        router, open_ = Routed(replicas), dict[str, str]()
        for number, move in enumerate(moves):
            if move == 0 and open_:
                name = next(iter(open_))
                router.router.on_request_completed(open_.pop(name), name)
            elif move == 1:
                await router.place(f"q{number}", routed=False)
                router.pending[f"q{number}"].future.cancel()
            else:
                count = Counter(open_.values())
                least = min(count[each.replica_id] for each in router.replicas)
                open_[f"q{number}"] = await router.place(f"q{number}")
                assert count[open_[f"q{number}"]] == least
        await router.place("last")
        assert len(router.router._held) == len(open_) + 1  # nothing is kept of what is over

    asyncio.run(run())


def test_a_full_replica_passes_on_and_a_late_end_counts_once() -> None:
    async def run() -> None:
        router = Routed(2)
        first = await router.place("a")
        other = await router.place("b", full=({"r0": "r1", "r1": "r0"}[first],))
        assert other == first  # the other one was full
        router.router.on_request_completed("r9", "a")  # of an attempt that was refused before
        assert await router.place("c") != first and await router.place("d") != first

    asyncio.run(run())


def attempts(*tries: list[Any]) -> dict[str, Any]:
    """A handle whose calls yield events in turn, or raise."""
    left = iter(tries)

    class Response:
        def __init__(self) -> None:
            self.events = next(left)

        async def __aiter__(self) -> AsyncIterator[Any]:
            for each in self.events:
                if isinstance(each, Exception):
                    raise each
                yield each

        def cancel(self) -> None:
            pass

    names: set[str] = set()

    def remote(request: Request) -> Response:
        assert request.id not in names  # the first replica may only seem dead
        names.add(request.id)
        return Response()

    return {"answer": SimpleNamespace(remote=remote)}


def driven(*tries: list[Any]) -> tuple[Event, Inbox]:
    inbox = Inbox()
    stream = RemoteStream(asked("one"), inbox.append)
    return asyncio.run(drive(attempts(*tries), stream, None)), inbox


DIED = exceptions.ActorDiedError()
WHOLE = [{"answer": 7}, (Delta("hi"),), (Finish("stop", 3, 1),)]


def test_a_request_is_asked_again_until_its_answer_begins() -> None:
    for lost in ([DIED], [{"answer": 5}, DIED], [{"answer": 5}]):  # the last one breaks off
        end, inbox = driven(lost, WHOLE)
        assert isinstance(end, Finish) and inbox.text == "hi"
        assert end.trace["workers"] == {"answer": 7} and end.trace["lost_replicas"] == 1
    end, inbox = driven([{"answer": 5}, (Delta("h"),), DIED], WHOLE)
    assert isinstance(end, Failure) and (end.status, end.kind) == (503, "replica_lost")
    assert inbox.text == "h" and "process 5" in end.message


def test_a_request_that_kills_replicas_does_not_kill_them_all() -> None:
    end, inbox = driven([DIED], [DIED], WHOLE)
    assert isinstance(end, Failure) and end.kind == "replica_lost" and not inbox
    assert "2 replicas in a row" in end.message


def test_other_errors_are_not_asked_again() -> None:
    end, _ = driven([ValueError("/secret")], WHOLE)
    assert isinstance(end, Failure) and end.status == 500 and "secret" not in end.message
    end, _ = driven([exceptions.TaskCancelledError()], WHOLE)
    assert end == Failure("cancelled", 499, "cancelled")


class Copies:
    """A handle of replicas, one of which is lost while it is asked."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = replicas

    def broadcast(self, method: str) -> Copies:
        self.told = [getattr(each, method)() for each in self.replicas]
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        return [*self.told, exceptions.RayActorError()]


def test_figures_of_copies_are_those_of_one_engine() -> None:
    """Memory and finds are added up; of waits, and of the size of a token, the worst counts."""
    copies = []
    for bytes_, gap in ((10.0, 3.0), (32.0, 2.0)):
        copy: Any = AnswerReplica.__new__(AnswerReplica)
        gauges = {"kv_bytes": bytes_, "decode_gap_ms": gap, "kv_bytes_per_token": 8.0}
        copy._engine = SimpleNamespace(health=lambda gauges=gauges: Health(True, gauges=gauges))
        copies.append(copy)
    engine: Any = RayEngine.__new__(RayEngine)
    engine._last, engine.board, engine._control, engine._closed = "answer", None, None, False
    engine._lock, engine._streams, engine._running = threading.Lock(), {}, {"answer": 2}
    engine._figures, engine._handles = {}, {"answer": Copies(*copies)}
    assert engine.health().gauges == {"workers_answer": 2.0}
    engine._ask_copies()
    figures = {"kv_bytes": 42.0, "decode_gap_ms": 3.0, "kv_bytes_per_token": 8.0}
    assert engine.health().gauges == {"workers_answer": 2.0, **figures}
