"""A run over a folder that kills one of its workers, and itself at the end: for test_batch_ray."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil

from mmfast.serve.batch import store
from mmfast.serve.batch.job import BatchJob
from mmfast.serve.batch.run import BatchOptions, run_batch

KILL_WORKER, KILL_DRIVER = 40, 100


def main(folder: str, out: str, question: str) -> None:
    store.ROWS = 16  # several commits, and rows that wait for theirs
    killed = []

    def tick(done: int, total: int) -> None:
        if done >= KILL_WORKER and not killed:
            workers = [p for p in psutil.Process().children(True) if "ray::BatchWorker" in p.name()]
            killed.append(workers[0])
            workers[0].kill()
        if done >= KILL_DRIVER:
            os.kill(os.getpid(), signal.SIGKILL)

    job = BatchJob(Path(folder), (question,), frames=2, max_new_tokens=2, batch_size=3)
    run_batch(job, Path(out), BatchOptions(workers=2), tick=tick)


if __name__ == "__main__":
    main(*sys.argv[1:])
