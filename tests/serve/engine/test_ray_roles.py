"""Roles of workers without a cluster: who gets what, and a change while answers go on."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from engine_requests import Inbox, asked
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import ask, image

from mmfast.core.errors import MmfastError
from mmfast.planner.roles import COMBINED, STAGES
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Finish
from mmfast.serve.engine.request import checked
from mmfast.serve.ray.roles import RoleBoard, RoleController, StageFigures, loads_of

APART = ["encode", "prefill", "decode", "decode"]


def test_requests_go_to_the_roles_and_a_combined_worker_keeps_all_of_one() -> None:
    board = RoleBoard(4, APART)
    assert [board.choose() for _ in range(3)] == [(0, 1, 2), (0, 1, 3), (0, 1, 2)]
    board.release((0, 1, 2))
    assert board.choose() == (0, 1, 2)
    whole = RoleBoard(2)
    assert [whole.choose() for _ in range(3)] == [(0, 0, 0), (1, 1, 1), (0, 0, 0)]
    assert whole.counts() == {COMBINED: 2}


def test_a_dead_worker_gets_nothing_and_its_role_is_done_by_others() -> None:
    board = RoleBoard(4, APART)
    board.live[1] = False  # the only one that fills
    _, fills, _ = board.choose()
    assert fills != 1
    board.live = [False] * 4  # all are being started: requests wait for them
    assert board.choose()[1] == 1


def test_media_are_shared_among_workers_that_encode() -> None:
    board = RoleBoard(4, ["encode", "encode", "prefill", COMBINED])
    board.choose()
    assert board.encoders(0, 5)[0] == 0 and set(board.encoders(0, 5)) == {0, 1, 3}
    assert board.encoders(1, 1) == [1] == board.encoders(1, 0)
    assert len(board.encoders(1, 2)) == 2


@settings(max_examples=60)
@given(st.data())
def test_any_change_keeps_the_count(data: Any) -> None:
    """Whatever changes meanwhile, each worker has the requests that were begun and not over."""
    board, held = RoleBoard(4, APART), list[tuple[int, int, int]]()
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["begin", "end", "change", "die"]))
        if step == "begin":
            held.append(board.choose())
        elif step == "end" and held:
            board.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif step == "change":
            number = data.draw(st.integers(0, 3))
            board.change({number: data.draw(st.sampled_from([*STAGES, COMBINED]))})
        elif step == "die":
            board.live[data.draw(st.integers(0, 3))] ^= True
    for number in range(4):
        assert board._held[number] == sum(number in each for each in held)


# --- what the planner is told, and what it changes ----------------------------------------------


def figures(encode: float, prefill: float, step: float, more: float, tokens: int) -> StageFigures:
    """A worker after 100 requests; a step of n rows takes `step + more * n` seconds."""
    sums = [0.0] * 5
    rows, left = 1, 100 * tokens
    while left > 0:
        took = step + more * rows
        sums = [a + b for a, b in zip(sums, (1, rows, took, rows**2, rows * took), strict=True)]
        left, rows = left - rows, rows % 7 + 1
    return StageFigures((100 * encode, 100 * prefill, sums[2]), (100,) * 3, tuple(sums))


def test_the_work_of_stages_is_read_off_what_was_done() -> None:
    given = figures(0.2, 0.1, 0.010, 0.002, 20)
    found = loads_of([given, given], 8)
    assert found is not None
    assert [each.seconds for each in found[:2]] == pytest.approx([0.2, 0.1])
    assert found[2].seconds == pytest.approx(20 * 0.012, rel=0.02)
    assert found[2].gain[7] == pytest.approx(8 * 0.012 / 0.026)
    assert loads_of([StageFigures()], 8) is None  # nothing is known yet


def test_roles_follow_the_load_and_do_not_flutter() -> None:
    board = RoleBoard(8)
    control = RoleController(board, 8)
    work = [figures(0.2, 0.1, 0.045, 0.005, 20)]

    def minute(start: float, rate: float) -> list[dict[int, str]]:
        changes = []
        for second in range(60):
            for part in range(int(rate)):
                control.arrived(start + second + part / max(1.0, rate))
            changes.append(control.decide(work, start + second + 1))
        return [each for each in changes if each]

    assert minute(0, 1) == []  # little load: everyone does everything
    busy = minute(60, 8)
    assert len(busy) <= 2 and set(board.counts()) == set(STAGES), board.roles
    assert control.advice is not None and board.counts() == dict(control.advice.roles)
    assert minute(120, 8) == []
    told = control.gauges()
    assert all(told[f"worker_{i}_{role}"] == 1 for i, role in enumerate(board.roles))
    assert {role: told[f"advised_{role}"] for role in STAGES} == board.counts()
    assert RoleController(RoleBoard(1), 8).gauges() == {f"worker_0_{COMBINED}": 1.0}


# --- a change while answers go on ---------------------------------------------------------------


class _Handle:
    """A worker in this process, called as Ray Serve's handles are."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        for name in ("part", "encode", "prefill"):
            setattr(self, name, SimpleNamespace(remote=self._remote(name)))

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(decode=SimpleNamespace(remote=self._stream))

    def _remote(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            given = [await each if isinstance(each, asyncio.Task) else each for each in args]
            return await getattr(self._worker, name)(*given)

        return lambda *args: asyncio.get_running_loop().create_task(call(*args))

    def _stream(self, request: Any, piece: Any) -> Any:
        async def answer() -> AsyncIterator[Any]:
            async for events in self._worker.decode(request, await piece):
                yield events

        return answer()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Any]]:
    from mmfast.serve.ray.deployments import ReplicaSettings, WorkerReplica

    made = [WorkerReplica(ReplicaSettings(device="cpu", threads=0)) for _ in range(2)]
    yield made
    for worker in made:
        for part in (worker._encode, worker._prefill, worker._decode):
            part._stage.close()


def test_workers_change_their_roles_while_answers_go_on(workers: list[Any]) -> None:
    """Every answer is that of a worker alone, though each worker changes three times."""
    pytest.importorskip("ray", reason="needs Ray: pip install mmfast[ray]")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mmfast.serve.ray.engine import RemoteStream, drive
    requests = [asked(f"r{i}", i % 4, 10 + i, (None, "evs:0.5")[i % 2]) for i in range(8)]
    requests += [ask("many", *(image(i, (48, 48)) for i in range(4)), "compare", tokens=9)]
    requests = [_checked(each) for each in requests]

    def answered(board: RoleBoard, changes: list[dict[int, str]]) -> list[Inbox]:
        async def main() -> list[Inbox]:
            handles = {f"worker-{i}": _Handle(each) for i, each in enumerate(workers)}
            inboxes = [Inbox() for _ in requests]
            tasks = []
            for request, inbox in zip(requests, inboxes, strict=True):
                stream = RemoteStream(request, inbox.append)
                reduce = request.options.reduce
                tasks.append(asyncio.create_task(drive(handles, stream, reduce, board)))
                if changes and len(tasks) % 3 == 0:
                    await tasks[0]  # some are over, others at work
                    board.change(changes.pop())
            for inbox, task in zip(inboxes, tasks, strict=True):
                inbox.append(await task)
            return inboxes

        return asyncio.run(main())

    alone = answered(RoleBoard(2, [COMBINED, "encode"]), [])
    board = RoleBoard(2, ["encode", "prefill"])
    parts = [{0: COMBINED, 1: COMBINED}, {0: "decode", 1: "encode"}, {0: "prefill", 1: "decode"}]
    found = answered(board, parts)
    assert not parts
    for mine, other in zip(found, alone, strict=True):
        end, wanted = mine[-1], other[-1]
        assert isinstance(end, Finish) and isinstance(wanted, Finish), (end, wanted)
        assert mine.text == other.text and mine.text
        assert end.completion_tokens == wanted.completion_tokens
    assert not +board._held
    done = [worker.figures().done for worker in workers]
    assert sum(each[2] for each in done) == 2 * len(requests)
    assert all(sum(each) for each in done)


def _checked(request: Any) -> Any:
    from dataclasses import replace

    return replace(request, sampling=checked(request.sampling))


# --- the option ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 4}, "needs the engine ray"),
        ({"workers": 4, "engine": "vllm"}, "needs the engine ray"),
        ({"workers": 1, "engine": "ray"}, "2 or more"),
        ({"workers": 4, "engine": "ray", "replicas": 2}, "leave one of them out"),
        ({"workers": 4, "engine": "ray", "decode_replicas": 2}, "take every role"),
    ],
)
def test_workers_where_there_are_none_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MmfastError) as error:
        ServerConfig(**options)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert ServerConfig(engine="ray", workers=4).workers == 4
