"""`mmfast batch` on Ray: a worker is killed, then the driver; the next run ends the work."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

pytest.importorskip("ray", reason="needs Ray: pip install mmfast[ray]")
pq = pytest.importorskip("pyarrow.parquet")

from mmfast.pipelines import pipeline  # noqa: E402
from mmfast.tiny.video.clips import write  # noqa: E402

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL"),
]
ROOT = Path(__file__).resolve().parents[3]
CLIPS, QUESTION = 200, "What colour is the square?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 clips of four frames: a square somewhere on some ground, no two alike."""
    where, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for number in range(CLIPS):
        frames = np.empty((4, 32, 32, 3), np.uint8)
        frames[:] = rng.integers(0, 60, 3)
        top, left = rng.integers(0, 20, 2)
        frames[:, top : top + 12, left : left + 12] = rng.integers(120, 255, 3)
        write(where / f"{number:03d}.mp4", frames)
    return where


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    nice = {"RAY_worker_niceness": "0"}  # 15 by default: no end beside other work
    return os.environ | nice | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _command(folder: Path, out: Path, *options: str) -> list[str]:
    asked = ["-q", QUESTION, "--frames", "4", "--max-new-tokens", "4", "--device", "cpu"]
    where = [sys.executable, "-m", "mmfast", "batch", str(folder), "--out", str(out)]
    return [*where, *asked, "--json", *options]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # three runs over 200 clips, on a busy machine
def test_killed_half_way_and_resumed(folder: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "answers.parquet", tmp_path / "whole.parquet"
    workers = _killed(_command(folder, out, "--workers", "2", "--batch-size", "3"), out)
    assert len(workers) >= 2  # one of them was killed before
    assert not psutil.wait_procs(workers, timeout=240)[1]  # nobody works on for a dead driver
    assert not out.exists()
    with contextlib.closing(sqlite3.connect(out.with_name(f"{out.name}.parts"))) as state:
        state.row_factory = sqlite3.Row
        kept = [dict(row) for row in state.execute("SELECT * FROM answers")]
    assert 0 < len(kept) < CLIPS

    report = _done(_command(folder, out, "--workers", "1", "--batch-size", "8"))
    assert (report["answers"], report["before"], report["failed"]) == (CLIPS, len(kept), 0)
    rows = _rows(out)
    assert [row["path"] for row in rows] == [f"{n:03d}.mp4" for n in range(CLIPS)]
    by_path = {row["path"]: row for row in rows}
    assert all(by_path[row["path"]] == row for row in kept)  # as they were, times and all
    assert not list(tmp_path.glob("*.parts*")) and not list(tmp_path.glob(".*"))

    _done(_command(folder, whole, "--engine", "inproc"))
    times = dict.fromkeys(("ttft_ms", "ms"))
    assert [row | times for row in rows] == [row | times for row in _rows(whole)]
    _equal_to_the_pipeline(folder, rows[::8])


def _killed(command: list[str], out: Path) -> list[psutil.Process]:
    """Kill a worker at the first commit of answers, and the run at the next; its workers."""
    process = subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL)
    state, seen = out.with_name(f"{out.name}.parts"), dict[int, psutil.Process]()
    sizes: list[int] = []
    while process.poll() is None:
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.name().startswith("ray::BatchWorker"):
                    seen[each.pid] = each
        if seen and (not sizes or state.stat().st_size > sizes[-1]):
            sizes.append(state.stat().st_size)  # the first is that without answers
            if len(sizes) == 2:
                next(iter(seen.values())).kill()
            if len(sizes) == 3:
                process.kill()
        time.sleep(0.05)
    assert process.wait() == -signal.SIGKILL
    return list(seen.values())


def _done(command: list[str]) -> dict[str, object]:
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    return report


def _rows(file: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(file).to_pylist()
    return rows


def _equal_to_the_pipeline(folder: Path, rows: list[dict[str, object]]) -> None:
    pipe = pipeline("video-qa", frames=4, max_new_tokens=4)
    answers = pipe([folder / str(row["path"]) for row in rows], [QUESTION] * len(rows))
    assert [a.text for a in answers] == [row["answer"] for row in rows]
    assert [a.kept_tokens for a in answers] == [row["kept_tokens"] for row in rows]
    assert len({a.text for a in answers}) > 1
