"""Killed while saving, at any moment: what was saved before is readable."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfast.streams import snapshots
from mmfast.streams.archive.files import File
from mmfast.streams.snapshots import generations, load, save

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL"),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # children touch no threads
]


def _state(n: int, file: Path) -> dict[str, Any]:
    return {"n": n, "tensors": [torch.full((2_000,), n) for _ in range(5)], "file": File(file)}


def _number(folder: Path) -> int:
    """Number of the state that is loaded, which must be all of one piece."""
    tree = load(folder)
    assert all(torch.equal(t, torch.full((2_000,), tree["n"])) for t in tree["tensors"])
    assert len(tree["tensors"]) == 5 and tree["file"].path.read_bytes() == b"block"
    number: int = tree["n"]
    return number


def _child(folder: Path, file: Path, start: int, acknowledge: int) -> None:
    """Save one state after the other, and tell of each that is done, until killed."""
    for n in range(start, start + 10_000):
        save(folder, _state(n, file))
        os.write(acknowledge, b"%d\n" % n)


def test_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "_SHARD", 20_000)  # several files
    folder, file = tmp_path / "s", tmp_path / "block"
    file.write_bytes(b"block")
    rng, done, left_over = random.Random(0), -1, 0
    for _ in range(12):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            _child(folder, file, done + 1, write)
            os._exit(0)
        os.close(write)
        told = os.read(read, 100)  # at least one is saved, then any moment
        time.sleep(rng.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(read, 10_000):
            told += more
        os.close(read)
        done = int(told.split()[-1])
        left_over += any(folder.glob(".part-*"))
        number = _number(folder)
        assert number in (done, done + 1)  # never older than what was told
        done = number
        assert len(generations(folder)) <= 3
    assert left_over  # some really died in the middle
    save(folder, _state(0, file))
    assert not list(folder.glob(".part-*")) and len(generations(folder)) == 2


STEPS = ("fsync", "rename", "rmtree", "mkdtemp", "link")


@pytest.mark.parametrize("step", STEPS)
def test_killed_at_every_step(tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just before and just after each call that changes the disk."""
    monkeypatch.setattr(snapshots, "_SHARD", 20_000)
    folder, file = tmp_path / "s", tmp_path / "block"
    file.write_bytes(b"block")
    for n in range(3):
        save(folder, _state(n, file))
    done, died = 2, 0
    for call in range(20):
        child = os.fork()
        if not child:
            _arm(step, call)
            save(folder, _state(done + 1, file))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        number = _number(folder)
        assert number in (done, done + 1) and (code or number == done + 1)
        done = number
        if not code:
            break
        assert code == -signal.SIGKILL
        died += 1
    else:
        pytest.fail("never got through")
    assert died >= 2 and len(generations(folder)) == 2 and not list(folder.glob(".part-*"))


def _arm(step: str, call: int) -> None:
    """Die at a step: before the call with an even number, after it with an odd one."""
    owner = {
        "fsync": os,
        "link": os,
        "rename": Path,
        "rmtree": snapshots.shutil,
        "mkdtemp": snapshots.tempfile,
    }[step]
    real = getattr(owner, step)
    left = [call // 2]

    def armed(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == -1 and call % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, step, armed)


def test_planted_fault_writing_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that writes under the final name at once is caught by the same check."""

    def in_place(folder: Path, tree: Any, keep: int) -> int:
        number = (generations(folder) or [0])[-1] + 1
        for old in generations(folder):
            snapshots.shutil.rmtree(snapshots._path(folder, old))
        snapshots._path(folder, number).mkdir()
        snapshots._write(snapshots._path(folder, number), tree)
        return number

    monkeypatch.setattr(snapshots, "_save", in_place)
    with pytest.raises((AssertionError, ValueError)):
        test_killed_at_every_step(tmp_path, "fsync", monkeypatch)
