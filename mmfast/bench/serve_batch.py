"""Clips a second of `mmfast batch`: in one process, and on Ray with one worker and with two."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.serve.batch.job import BatchJob
from mmfast.serve.batch.run import BatchOptions, run_batch
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.scene import CLIPS, draw, make_scene

FILES, QUESTION = 240, "How many shapes are there?"
WAYS = (("inproc", 1), ("ray", 1), ("ray", 2))


def rows(
    progress: Tick, ways: Sequence[tuple[str, int]] = WAYS, count: int = FILES, rounds: int = 3
) -> list[Row]:
    """A row per engine and number of workers, of the round with the median rate.

    The rate is that of the second half of a run: all workers have their model by then. What comes
    before, Ray's start and the models', is `start_s`, the seconds until the first answer.
    """
    with tempfile.TemporaryDirectory(prefix="mmfast-") as where:
        folder = Path(where) / "clips"
        _write(folder, count)
        found: dict[tuple[str, int], list[Row]] = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                found[way].append(_run(folder, Path(where) / "out.parquet", *way))
            progress("rounds", number + 1, rounds)
    middle = {w: sorted(f, key=lambda r: r["clips_per_s"])[len(f) // 2] for w, f in found.items()}
    base = middle[ways[0]]["clips_per_s"]
    shared = {"clips": count, "frames": 8, "n": rounds, "cores": os.cpu_count(), "device": "cpu"}
    return [
        {"job": f"{engine}, {workers} worker{'s' * (workers > 1)}", "engine": engine}
        | {"workers": workers, **row, "speedup": round(row["clips_per_s"] / base, 3), **shared}
        for (engine, workers), row in middle.items()
    ]


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        file = folder / f"{number:04d}.mp4"
        file.write_bytes(encode(draw(make_scene(CLIPS, 0, number)).frames))


def _run(folder: Path, out: Path, engine: str, workers: int) -> Row:
    start, stamps = time.perf_counter(), [(0.0, 0)]

    def tick(done: int, total: int) -> None:
        if done > stamps[-1][1]:
            stamps.append((time.perf_counter() - start, done))

    job = BatchJob(folder, (QUESTION,), device="cpu")
    run_batch(job, out, BatchOptions(engine, workers), tick=tick)
    out.unlink()
    half = next(stamp for stamp in stamps if stamp[1] >= stamps[-1][1] / 2)
    seconds, clips = stamps[-1][0] - half[0], stamps[-1][1] - half[1]
    return {
        "clips_per_s": round(clips / seconds, 3),
        "start_s": round(stamps[1][0], 3),
        "seconds": round(time.perf_counter() - start, 3),
    }
