"""Copies of the whole engine on Ray: all methods, a copy that is killed, and the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_requests import Inbox, asked, events, eventually

from mmfast.core.errors import MmfastError, SpecError
from mmfast.serve.engine.base import STOPPED, BusyError, Delta, Failure, Finish, Request
from mmfast.serve.engine.scheduler import Scheduler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "mmfast[ray]"'),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its own code
    pytest.mark.timeout(1200),  # on a busy machine; a minute on a quiet one
]
SLOTS, QUEUE = 6, 4
LONG = 1200


@pytest.fixture(scope="module")
def inproc(checkpoint: Path) -> Iterator[Scheduler]:
    made = Scheduler(str(checkpoint), device="cpu")
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    from mmfast.serve.ray.engine import RayEngine

    made = RayEngine(
        str(checkpoint), device="cpu", slots=SLOTS, queue=QUEUE, replicas=2, cpus=2, memory="200MB"
    )
    yield made
    made.close()


def with_cache(request: Request, cache: str) -> Request:
    return replace(request, options=replace(request.options, cache=cache))


def test_methods_inside_the_model_and_on_its_cache(engine: Any, inproc: Scheduler) -> None:
    requests = [
        asked("plain", 0, 12),
        asked("pre", 1, 12, "evs:0.5"),
        asked("whole", 1, 12, "none"),
        asked("inside", 2, 12, "fastv@llm2:0.5"),
        with_cache(asked("cached", 3, 12), "snapkv:64"),
        asked("drawn", 4, 12, heat=0.8),  # with a seed
    ]
    inboxes = [Inbox() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        engine.submit(request, inbox.append)
    eventually(lambda: all(inbox.over for inbox in inboxes), 600)
    for request, inbox in zip(requests, inboxes, strict=True):
        expected = Inbox(events(inproc, request))
        end, other = inbox[-1], expected[-1]
        assert isinstance(end, Finish) and isinstance(other, Finish), (request.id, end, other)
        assert inbox.text == expected.text and inbox.text
        assert (end.prompt_tokens, end.completion_tokens) == (other.prompt_tokens, 12)
        assert end.trace["kept_tokens"] == other.trace["kept_tokens"]
        assert [r["stage"] for r in end.trace["rows"]] == [r["stage"] for r in other.trace["rows"]]
        assert set(end.trace["workers"]) == {"answer"}


def test_wrong_requests(engine: Any) -> None:
    with pytest.raises(SpecError, match="unknown"):
        engine.submit(asked("wrong", reduce="divprun:0.5"), Inbox().append)
    with pytest.raises(SpecError, match="did you mean 'snapkv'"):
        engine.submit(with_cache(asked("wrong"), "snapkw:64"), Inbox().append)
    with pytest.raises(MmfastError, match="max_tokens"):
        engine.submit(asked("none", tokens=0), Inbox().append)
    end = Inbox(events(engine, asked("long", tokens=10**6)))[-1]
    assert isinstance(end, Failure) and (end.status, end.kind) == (400, "invalid_request_error")


def test_a_client_that_leaves_and_too_many(engine: Any) -> None:
    stream = events(engine, asked("left", 0, LONG))
    assert isinstance(next(stream), Delta)
    stream.close()
    eventually(lambda: engine.health().running == 0 == engine.health().waiting, 600)
    inboxes: dict[str, Inbox] = {}
    with pytest.raises(BusyError, match="run or wait already"):
        for i in range(SLOTS * 2 + QUEUE + 1):
            inboxes[f"many-{i}"] = Inbox()
            engine.submit(asked(f"many-{i}", i % 4, LONG), inboxes[f"many-{i}"].append)
    assert not inboxes.pop(f"many-{SLOTS * 2 + QUEUE}")
    eventually(lambda: engine.health().running, 600)
    for name in inboxes:
        engine.cancel(name)
    eventually(lambda: all(inbox.over for inbox in inboxes.values()), 600)
    assert all(inbox[-1] == Failure("cancelled", 499, "cancelled") for inbox in inboxes.values())
    again = [Inbox() for _ in range(4)]  # no place is held by a request that was cancelled
    for i, inbox in enumerate(again):
        engine.submit(asked(f"again-{i}", i, 4), inbox.append)
    eventually(lambda: all(inbox.over for inbox in again), 600)
    assert all(isinstance(inbox[-1], Finish) for inbox in again), [inbox[-1] for inbox in again]


def test_a_killed_copy_ends_its_streams_only(engine: Any, inproc: Scheduler) -> None:
    eventually(lambda: engine.health().gauges["workers_answer"] == 2, 600)
    inboxes = {f"kill-{i}": Inbox() for i in range(6)}
    requests = {name: asked(name, i % 4, LONG) for i, name in enumerate(inboxes)}
    for name, inbox in inboxes.items():
        engine.submit(requests[name], inbox.append)
        eventually(lambda inbox=inbox: bool(inbox), 600)  # Serve learns of the load by answers
    places = {name: engine.workers(name)["answer"] for name in inboxes}
    assert len(set(places.values())) == 2, places  # both had their share
    victim = places["kill-0"]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: all(inbox.over for inbox in inboxes.values()), 600)
    for name, inbox in inboxes.items():
        end = inbox[-1]
        if places[name] == victim:
            assert isinstance(end, Failure) and (end.status, end.kind) == (503, "replica_lost")
        else:
            assert isinstance(end, Finish) and end.completion_tokens == LONG
    spared = next(name for name in inboxes if places[name] != victim)
    assert inboxes[spared].text == Inbox(events(inproc, requests[spared])).text
    eventually(lambda: engine.health().gauges["workers_answer"] == 2, 600)  # restarted
    after = Inbox(events(engine, asked("after", 1, 3)))
    assert isinstance(after[-1], Finish)


def test_the_end_fails_each_stream_once_and_leaves_nothing(engine: Any) -> None:
    """The last test of the engine."""
    inboxes = [Inbox() for _ in range(4)]
    for i, inbox in enumerate(inboxes):
        engine.submit(asked(f"end-{i}", i, LONG), inbox.append)
    eventually(lambda: any(inboxes), 600)
    children = psutil.Process().children(recursive=True)
    assert children
    engine.close()
    for inbox in inboxes:
        assert [e for e in inbox if not isinstance(e, Delta)] == [STOPPED] == inbox[-1:]
    with pytest.raises(MmfastError, match="closed"):
        engine.submit(asked("late"), Inbox().append)
    assert not psutil.wait_procs(children, timeout=240)[1]  # Ray's agents look now and then


def test_a_copy_that_cannot_start_is_told(tmp_path: Path) -> None:
    from mmfast.serve.ray.engine import RayEngine

    before = {each.pid for each in psutil.Process().children(recursive=True)}
    with pytest.raises(MmfastError, match="a replica does not start") as error:
        RayEngine(str(tmp_path), device="cpu", replicas=1, cpus=2)
    assert "\n" not in str(error.value)

    def left() -> set[int]:
        return {each.pid for each in psutil.Process().children(recursive=True)} - before

    eventually(lambda: not left(), 60)


PARENT = """
import sys
from mmfast.serve.ray.engine import RayEngine

if __name__ == "__main__":
    engine = RayEngine(device="cpu", replicas=1, cpus=1)
    print("ready", flush=True)
    input()
"""


def test_replicas_do_not_outlive_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=pipe, stdout=pipe, env=env, text=True
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline().strip() == "ready"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert any("ServeReplica" in each.name() for each in children)
        parent.kill()
    assert not psutil.wait_procs(children, timeout=240)[1]  # Ray's agents look now and then
