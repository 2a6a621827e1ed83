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
    """200 clips of two frames: a square somewhere on some ground, no two alike."""
    where, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    for number in range(CLIPS):
        frames = np.empty((2, 32, 32, 3), np.uint8)
        frames[:] = rng.integers(0, 60, 3)
        top, left = rng.integers(0, 20, 2)
        frames[:, top : top + 12, left : left + 12] = rng.integers(120, 255, 3)
        write(where / f"{number:03d}.mp4", frames)
    return where


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    nice = {"RAY_worker_niceness": "0"}  # 15 by default: no end beside other work
    return os.environ | nice | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
def test_killed_half_way_and_resumed(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "answers.parquet"
    script = [
        str(ROOT / "tests" / "support" / "serve" / "batch_driver.py"),
        str(folder),
        str(out),
        QUESTION,
    ]
    ended, workers = _watched([sys.executable, *script])
    assert ended == -signal.SIGKILL
    assert len(workers) >= 2  # one of them was killed before
    assert not psutil.wait_procs(workers, timeout=60)[1]  # nobody works on for a dead driver
    assert not out.exists()
    with contextlib.closing(sqlite3.connect(out.with_name(f"{out.name}.parts"))) as state:
        state.row_factory = sqlite3.Row
        kept = [dict(row) for row in state.execute("SELECT * FROM answers")]
    assert 40 <= len(kept) < CLIPS // 2 + 3

    options = ["-q", QUESTION, "--frames", "2", "--max-new-tokens", "2", "--out", str(out)]
    options += ["--workers", "1", "--batch-size", "8", "--json"]
    command = [sys.executable, "-m", "mmfast", "batch", str(folder), *options]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    report = json.loads(done.stdout)
    assert (report["answers"], report["before"], report["failed"]) == (CLIPS, len(kept), 0)

    rows = _rows(out)
    assert [row["path"] for row in rows] == [f"{n:03d}.mp4" for n in range(CLIPS)]
    by_path = {row["path"]: row for row in rows}
    assert all(by_path[row["path"]] == row for row in kept)  # as they were, times and all
    assert not list(tmp_path.glob("*.parts*")) and not list(tmp_path.glob(".*"))
    _equal_to_the_pipeline(folder, rows[::8])


def _watched(command: list[str]) -> tuple[int, list[psutil.Process]]:
    """Run a command to its end; its status, and the workers that it had on the way."""
    process = subprocess.Popen(command, env=_environment())
    seen: dict[int, psutil.Process] = {}
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
            seen |= {p.pid: p for p in children if p.name().startswith("ray::BatchWorker")}
        time.sleep(0.1)
    return process.wait(), list(seen.values())


def _rows(file: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = pq.read_table(file).to_pylist()
    return rows


def _equal_to_the_pipeline(folder: Path, rows: list[dict[str, object]]) -> None:
    pipe = pipeline("video-qa", frames=2, max_new_tokens=2)
    answers = pipe([folder / str(row["path"]) for row in rows], [QUESTION] * len(rows))
    assert [a.text for a in answers] == [row["answer"] for row in rows]
    assert [a.kept_tokens for a in answers] == [row["kept_tokens"] for row in rows]
    assert len({a.text for a in answers}) > 1
