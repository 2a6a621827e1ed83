"""Engines in worker processes: shared memory, streams, faults, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_requests import Inbox, asked, events, eventually, hello, said

from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock
from mmfast.serve.engine.base import Delta, Failure, Finish
from mmfast.serve.engine.processes.engine import WorkerEngine, process_engine
from mmfast.serve.engine.processes.messages import EmbedRef, SegmentNames, free, pack, unpack
from mmfast.serve.engine.processes.pool import Maker, Restarts
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.engine.slots import Embedded, Filled, moved
from mmfast.serve.engine.stages import PromptPiece

SEGMENTS = Path("/dev/shm")
QUICK = Restarts(most=2, first=0.05)


def answering(where: str = "mmfast.serve.engine.base:Echo", **given: object) -> Maker:
    return Maker(
        "mmfast.serve.engine.processes.workers:Answering", {"engine": Maker(where, given)}, 1
    )


def segments(prefix: str) -> list[str]:
    return sorted(p.name for p in SEGMENTS.glob(f"{prefix}*")) if SEGMENTS.is_dir() else []


# ---- shared memory


@pytest.mark.parametrize("rows", [3, 30_000])  # with the message, in a segment
def test_packet_round_trip(rows: int) -> None:
    names = SegmentNames(f"mmfast-test-{os.getpid()}")
    same = torch.randn(rows, 3)
    value = {
        "f": same,
        "again": same,
        "bf16": torch.randn(rows).to(torch.bfloat16),
        "turned": torch.arange(rows * 2).reshape(rows, 2).T,
        "bool": torch.rand(rows) > 0.5,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3),
        "array": np.arange(rows * 3, dtype=">i2").reshape(3, rows)[:, ::-1],
        "number": np.array(2.5),
        "rest": ("text", 7, None),
    }
    packet = pack(value, names)
    assert bool(packet.name) == (rows > 3)
    assert segments(names.prefix) == ([packet.name] if packet.name else [])
    back = unpack(packet)
    assert not segments(names.prefix)
    for name in ("f", "bf16", "turned", "bool", "empty", "scalar"):
        assert back[name].dtype == value[name].dtype and torch.equal(back[name], value[name])
    assert back["again"] is back["f"] and back["rest"] == value["rest"]
    assert np.array_equal(back["array"], value["array"]) and back["number"] == 2.5
    back["f"] += 1  # its own memory, which may be written to
    if packet.name:
        with pytest.raises(FileNotFoundError):
            unpack(packet)


def test_packet_that_nobody_takes_is_freed() -> None:
    packet = pack(torch.zeros(100_000), SegmentNames(f"mmfast-test-{os.getpid()}"))
    assert free(packet.name) and not free(packet.name) and not free("")


def test_what_comes_from_a_process_goes_to_the_device() -> None:
    prompt = Embedded(torch.zeros(2, 4), torch.zeros(1, 2), planes=(torch.ones(1),))
    kv = KVBlock((torch.zeros(1, 2, 4),), (torch.zeros(1, 2, 4),))
    piece = PromptPiece(Filled(kv, torch.zeros(1), torch.zeros(9)), 2)
    there = torch.device("meta")
    assert (
        moved(prompt, there).planes[0].device
        == there
        == moved(piece, there).filled.kv.values[0].device
    )
    assert moved({"a": [torch.zeros(1), "b"]}, there)["a"][1] == "b"
    assert moved(prompt, torch.device("cpu")) is prompt


def test_refs_are_typed() -> None:
    ref = EmbedRef("x", 0, (2, 3), "bfloat16")
    assert (ref.name, ref.shape, ref.dtype) == ("x", (2, 3), "bfloat16")


# ---- streams


@pytest.fixture(scope="module")
def executor() -> Iterator[WorkerEngine]:
    made = WorkerEngine("echo", answering(pause=0.01, limit=8), 2, restarts=QUICK)
    yield made
    made.close()
    assert not segments(made._pool._prefix)


def test_answers_and_spreads_requests(executor: WorkerEngine) -> None:
    inboxes = [Inbox() for _ in range(6)]
    for i, inbox in enumerate(inboxes):
        executor.submit(said(f"spread-{i}", 20), inbox.append)
    loads = [len(place.jobs) for place in executor._pool.places]
    eventually(lambda: all(inbox.over for inbox in inboxes))
    assert min(loads) >= 2  # both workers had their share
    for inbox in inboxes:
        assert inbox.text == " ".join(f"w{i}" for i in range(20))
        assert inbox[-1] == Finish("stop", 20, 20)
    eventually(lambda: executor.health().running == 0)


def test_refusals_come_back_as_they_are(executor: WorkerEngine) -> None:
    inboxes = [Inbox() for _ in range(40)]
    refused = []
    for i, inbox in enumerate(inboxes):
        try:
            executor.submit(said(f"busy-{i}", 100), inbox.append)
        except MmfastError as error:
            refused.append(error)
    assert len(refused) == 40 - 16 and refused[0].retry_after == 1.0
    assert "8 requests run already" in str(refused[0])
    for i in range(40):
        executor.cancel(f"busy-{i}")
    eventually(lambda: sum(inbox.over for inbox in inboxes) == 16)
    ends = [inbox[-1] for inbox in inboxes if inbox]
    assert all(isinstance(end, Failure) and end.status == 499 for end in ends)


def test_leaving_cancels(executor: WorkerEngine) -> None:
    stream = events(executor, said("left", 10_000))
    assert isinstance(next(stream), Delta)
    stream.close()
    eventually(lambda: executor.health().running == 0)


def test_a_killed_worker_ends_its_streams_only(executor: WorkerEngine) -> None:
    eventually(lambda: executor.health().gauges["workers_decode"] == 2)
    inboxes = {f"kill-{i}": Inbox() for i in range(8)}
    for name, inbox in inboxes.items():
        executor.submit(said(name, 150), inbox.append)
    eventually(lambda: all(inboxes.values()))
    victim = executor._pool.places[0]
    mine = {s.request.id for s in executor._streams.values() if s.place is victim}
    assert len(mine) == 4
    os.kill(victim.info["pid"], signal.SIGKILL)
    eventually(lambda: all(inbox.over for inbox in inboxes.values()))
    for name, inbox in inboxes.items():
        if name in mine:
            assert isinstance(inbox[-1], Failure)
            assert (inbox[-1].status, inbox[-1].kind) == (503, "replica_lost")
        else:
            assert isinstance(inbox[-1], Finish)
            assert inbox.text == " ".join(f"w{i}" for i in range(150))
    eventually(lambda: executor.health().gauges["workers_decode"] == 2)
    after = Inbox()
    executor.submit(said("after", 3), after.append)
    eventually(lambda: after.over)
    assert isinstance(after[-1], Finish)
    assert not segments(executor._pool._prefix)


# ---- starting, and not starting


def test_a_worker_that_fails_at_import_is_not_started_for_ever(tmp_path: Path) -> None:
    with pytest.raises(MmfastError, match="no worker that can decode starts: ModuleNotFoundError"):
        WorkerEngine("none", answering("mmfast.no_such_module:Nothing"), 1, restarts=QUICK)
    maker = answering("engine_requests:once", marker=str(tmp_path / "made"))
    executor = WorkerEngine("once", maker, 1, restarts=Restarts(most=1, first=0.05))
    (place,) = executor._pool.places
    os.kill(place.info["pid"], signal.SIGKILL)
    eventually(lambda: place.given_up)
    assert place.total == 2 and place.wire is None and "it was here before" in place.reason
    assert not executor.health().ready
    with pytest.raises(MmfastError, match="no worker"):
        executor.submit(said("nobody", 1), Inbox().append)
    executor.close()


PARENT = """
from pathlib import Path
from mmfast.serve.engine.processes.engine import WorkerEngine
from mmfast.serve.engine.processes.pool import Maker

if __name__ == "__main__":
    engine = Maker("mmfast.serve.engine.base:Echo")
    answering = "mmfast.serve.engine.processes.workers:Answering"
    executor = WorkerEngine("echo", Maker(answering, {"engine": engine}), 1)
    print(executor._pool.places[0].info["pid"], executor._pool._prefix, flush=True)
    input()
"""


@pytest.mark.slow
def test_children_do_not_outlive_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    command, pipe = [sys.executable, str(script)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True) as parent:
        assert parent.stdout is not None
        child, prefix = parent.stdout.readline().split()
        assert _alive(int(child))
        parent.kill()
    eventually(lambda: not _alive(int(child)))
    assert not segments(prefix)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ---- with the embedded model


@pytest.fixture(scope="module")
def split() -> Iterator[WorkerEngine]:
    made = process_engine(encode=2, decode=1, slots=8, threads=1, restarts=QUICK)
    yield made
    made.close()
    assert not segments(made._pool._prefix)


def test_answers_are_those_of_one_process(split: WorkerEngine) -> None:
    requests = [asked(f"same-{i}", i, reduce=(None, "evs:0.5")[i % 2]) for i in range(6)]
    inboxes = [Inbox() for _ in requests]
    for request, inbox in zip(requests, inboxes, strict=True):
        split.submit(request, inbox.append)
    here = Scheduler(slots=8, device="cpu")
    eventually(lambda: all(inbox.over for inbox in inboxes))
    for request, inbox in zip(requests, inboxes, strict=True):
        expected = Inbox(events(here, request))
        end, other = inbox[-1], expected[-1]
        assert isinstance(end, Finish) and isinstance(other, Finish)
        assert inbox.text == expected.text and inbox.text
        assert end.prompt_tokens == other.prompt_tokens
        assert end.trace["kept_tokens"] == other.trace["kept_tokens"]
        assert [r["stage"] for r in end.trace["rows"]] == [r["stage"] for r in other.trace["rows"]]
    here.close()


def test_wrong_requests_are_refused(split: WorkerEngine) -> None:
    with pytest.raises(MmfastError, match="unknown"):
        split.submit(asked("wrong", reduce="divprun:0.5"), Inbox().append)
    with pytest.raises(MmfastError, match="that fit"):
        split.submit(asked("long", tokens=10**6), Inbox().append)
    assert "".join(e.text for e in events(split, hello("text")) if isinstance(e, Delta))


def test_a_killed_encoder_ends_the_streams_that_it_encodes(split: WorkerEngine) -> None:
    running = [Inbox() for _ in range(2)]
    for i, inbox in enumerate(running):
        split.submit(asked(f"runs-{i}", i, 600), inbox.append)
    eventually(lambda: all(running))  # they decode: no encoder has to do with them
    encoders = split._pool.of("encode")
    for place in encoders:  # whoever is asked sleeps over it
        os.kill(place.info["pid"], signal.SIGSTOP)
    caught = Inbox()
    split.submit(asked("caught", 77), caught.append)
    eventually(lambda: any(place.jobs for place in encoders))
    (victim,) = [place for place in encoders if place.jobs]
    os.kill(victim.info["pid"], signal.SIGKILL)
    for place in encoders:
        if place is not victim:
            os.kill(place.info["pid"], signal.SIGCONT)
    eventually(lambda: caught.over)
    end = caught[-1]
    assert isinstance(end, Failure) and (end.status, end.kind) == (503, "replica_lost")
    eventually(lambda: all(inbox.over for inbox in running))
    assert all(isinstance(inbox[-1], Finish) for inbox in running)
    assert isinstance(Inbox(events(split, asked("next", 78)))[-1], Finish)
    eventually(lambda: split.health().gauges["workers_encode"] == 2)
    assert not segments(split._pool._prefix)


def test_options_that_make_no_sense() -> None:
    for given, said_of in (
        ({"prefill": 2}, "prefill=2"),
        ({"decode": 0}, "decode=0"),
        ({"model": (None, None)}, "directory"),
    ):
        with pytest.raises(MmfastError, match=said_of):
            process_engine(**given)  # type: ignore[arg-type]
