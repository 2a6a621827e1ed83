"""Whole sessions: killed while saving, on damaged disks, and beside a disk that fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from snapshot_steps import FAMILY, MEMORY, feed, opened, options
from stream_tools import answer_logits, shared_pipe

from mmfast.streams.archive import tiers

QUESTION = "what moves?"
CHILD = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
from snapshot_steps import feed, opened
with opened(Path(sys.argv[1])) as session:
    feed(session, 0, 11)
    for n in range(12, 1000):
        feed(session, n - 1, n)
        session.save(sys.argv[2])
        print(n, flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving_goes_on_bit_for_bit(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    support = [str(root / "tests" / "support" / part) for part in ("families", "models", "streams")]
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "disk"), str(tmp_path / "saved")]
    with subprocess.Popen([*argv, *support, str(root)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        told = int(child.stdout.readline())
        time.sleep(0.03)
        child.kill()
        told = max([told, *map(int, child.stdout.read().split())])
    pipe = shared_pipe(FAMILY)
    with pipe.restore(tmp_path / "saved", **options(tmp_path / "disk")) as again:
        frames = again.stats()["frames"]
        assert frames in (told, told + 1)
        assert again.stats()["memory"]["archive"]["blocks"]["disk"] > 0
        feed(again, frames, frames + 3)
        with pipe.open(MEMORY) as whole:  # in main memory, in one go
            feed(whole, 0, frames + 3)
            assert torch.equal(answer_logits(again, QUESTION), answer_logits(whole, QUESTION))


def test_a_damaged_save_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    pipe = shared_pipe(FAMILY)
    with pipe.open(MEMORY) as session:
        for n in range(2):
            feed(session, n, n + 1)
            session.save(tmp_path)
    (tmp_path / "gen-00000002" / "manifest.json").write_bytes(b"")
    with pytest.warns(UserWarning, match="generation 2 is damaged .*; generation 1 is loaded"):
        again = pipe.restore(tmp_path)
    assert again.stats()["frames"] == 1
    again.close()


def test_damaged_blocks_do_not_stop_an_answer(tmp_path: Path) -> None:
    with opened(tmp_path) as session:
        feed(session, 0, 14)
        files = sorted(tmp_path.glob("*/*.block"))
        assert len(files) >= 6
        for file in files:  # of whichever are asked for
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        assert torch.isfinite(answer_logits(session, QUESTION)).all()
        stored = session.stats()["memory"]["archive"]
        assert stored["corrupt"] >= 1 and any("it is dropped" in line for line in stored["reports"])
        feed(session, 14, 16)
        assert session.ask(QUESTION, max_new_tokens=2).read() is not None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_the_stream_goes_on_when_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with opened(tmp_path) as session:
        feed(session, 0, 12)

        def fails(_: int) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(tiers.os, "fsync", fails)
        feed(session, 12, 16)
        stored = session.stats()["memory"]["archive"]
        assert session.stats()["frames"] == 16 and stored["disk_errors"] and stored["reports"]
        assert session.ask(QUESTION, max_new_tokens=2).read() is not None
