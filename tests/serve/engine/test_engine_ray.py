"""The engine on Ray: the same answers, refusals, and replicas that are killed under load."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_requests import Inbox, asked, events, eventually

from mmfast.bench.suites.serve.faults import trial
from mmfast.core.errors import MmfastError, SpecError
from mmfast.serve.engine.base import BusyError, Failure, Finish
from mmfast.serve.engine.scheduler import Scheduler

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "mmfast[ray]"'),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of its own code
    pytest.mark.timeout(1200),  # on a busy machine; a minute on a quiet one
]
SLOTS, QUEUE = 8, 8


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Any]:
    """One cluster for all tests: one replica that encodes and one that fills, two that decode."""
    from mmfast.serve.ray.engine import RayEngine

    made = RayEngine(
        str(checkpoint), device="cpu", slots=SLOTS, queue=QUEUE, decode=2, cpus=2, linger=1.0
    )
    yield made
    made.close()


@pytest.mark.slow
def test_answers_are_those_of_one_process(engine: Any, checkpoint: Path) -> None:
    requests = [asked(f"same-{i}", i, 12, (None, "evs:0.5", "none")[i % 3]) for i in range(4)]
    requests.append(asked("drawn", 9, 12, heat=0.8))  # with a seed
    inboxes = [Inbox() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        engine.submit(request, inbox.append)
    here = Scheduler(str(checkpoint), device="cpu")
    eventually(lambda: all(inbox.over for inbox in inboxes), 600)
    for request, inbox in zip(requests, inboxes, strict=True):
        expected = Inbox(events(here, request))
        end, other = inbox[-1], expected[-1]
        assert isinstance(end, Finish) and isinstance(other, Finish)
        assert inbox.text == expected.text and inbox.text
        assert (end.prompt_tokens, end.completion_tokens) == (other.prompt_tokens, 12)
        assert end.trace["kept_tokens"] == other.trace["kept_tokens"]
        assert [r["stage"] for r in end.trace["rows"]] == [r["stage"] for r in other.trace["rows"]]
        assert len(set(end.trace["workers"].values())) == 3  # processes of their own
    here.close()


@pytest.mark.slow
def test_wrong_requests(engine: Any) -> None:
    for reduce, error in (("divprun:0.5", "unknown"), ("fastv@llm3:0.5", "acts inside the model")):
        with pytest.raises(SpecError, match=error):
            engine.submit(asked("wrong", reduce=reduce), Inbox().append)
    with pytest.raises(MmfastError, match="max_tokens"):
        engine.submit(asked("none", tokens=0), Inbox().append)
    end = Inbox(events(engine, asked("long", tokens=10**6)))[-1]
    assert isinstance(end, Failure) and (end.status, end.kind) == (400, "invalid_request_error")
    assert "shorten" in end.message


@pytest.mark.slow
def test_too_many_and_cancelled(engine: Any) -> None:
    inboxes: dict[str, Inbox] = {}
    with pytest.raises(BusyError, match="run or wait already"):
        for i in range(SLOTS * 2 + QUEUE + 1):
            inboxes[f"many-{i}"] = Inbox()
            engine.submit(asked(f"many-{i}", i % 4, 2000), inboxes[f"many-{i}"].append)
    refused = inboxes.pop(f"many-{SLOTS * 2 + QUEUE}")
    eventually(lambda: engine.health().running, 600)
    for name in inboxes:  # some wait, some are encoded, some are written
        engine.cancel(name)
    eventually(lambda: all(inbox.over for inbox in inboxes.values()), 600)
    assert not refused
    assert all(inbox[-1] == Failure("cancelled", 499, "cancelled") for inbox in inboxes.values())
    assert engine.health().running == 0 == engine.health().waiting
    # What was cancelled holds no place: as many as fit at once are answered.
    again = [Inbox() for _ in range(4)]
    for i, inbox in enumerate(again):
        engine.submit(asked(f"again-{i}", i, 4), inbox.append)
    eventually(lambda: all(inbox.over for inbox in again), 600)
    assert all(isinstance(inbox[-1], Finish) for inbox in again)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_a_killed_replica_ends_its_streams_only(engine: Any, role: str) -> None:
    eventually(lambda: engine.health().gauges["workers_decode"] == 2, 600)
    row = trial(engine, role, later=4, bystanders=3, tokens=1200, patience=900)
    # A request whose answer has not begun is asked again, so only decoding loses streams.
    assert (row["lost"] >= 1) == (role == "decode"), row
    assert row["wrongly_lost"] == row["lost_later"] == row["other_errors"] == 0, row
    assert row["asked_again"] >= (role != "decode"), row
    assert row["lost"] + row["completed"] == row["streams"], row
    assert row["seconds_to_answer"] is not None and row["seconds_to_recover"] is not None, row


@pytest.mark.slow
def test_a_replacement_takes_the_process_that_waits(engine: Any) -> None:
    """It has imported everything by then; another one waits afterwards."""
    eventually(lambda: engine.health().gauges["workers_decode"] == 2, 600)
    spare = engine._cluster.spare
    for _ in range(2):
        waiting = eventual_spare(spare)
        (victim, *_) = replicas("decode")
        os.kill(victim, signal.SIGKILL)
        eventually(lambda pid=waiting: pid in replicas("decode"), 600)
        eventually(lambda: engine.health().gauges["workers_decode"] == 2, 600)


def replicas(role: str) -> list[int]:
    """Processes that serve a role."""
    found = {p.pid: named(p.pid) for p in psutil.Process().children(recursive=True)}
    return [n for n, name in found.items() if "ServeReplica" in name and name.endswith(f":{role}")]


def eventual_spare(spare: Any) -> int:
    """The process that waits."""

    def idle() -> list[int]:
        return [n for n in spare.ready if psutil.pid_exists(n) and named(n) == "ray::IDLE"]

    eventually(idle, 600)
    return idle()[-1]


def named(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""
