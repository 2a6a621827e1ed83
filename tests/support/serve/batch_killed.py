"""A run with a stand-in for the model that kills itself before its n-th SQL statement."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from mmfast.serve.batch import run, store
from mmfast.serve.batch.job import BatchJob
from mmfast.serve.batch.run import Task, blank


class Words:
    """Answers without a model."""

    def __init__(self, job: BatchJob) -> None:
        self._job = job

    def __call__(self, tasks: list[Task]) -> list[store.Row]:
        return [blank(self._job, *task) | {"answer": "yes"} for task in tasks]


def main(folder: str, out: str, question: str, statement: str) -> None:
    left = int(statement)

    def count(text: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        made = real(*args, **options)
        made.set_trace_callback(count)
        return made

    real, sqlite3.connect = sqlite3.connect, connect
    store.ROWS, run.Answerer = 4, Words  # type: ignore[assignment, misc]
    job = BatchJob(Path(folder), (question,))
    run.run_batch(job, Path(out), run.BatchOptions("inproc"))


if __name__ == "__main__":
    main(*sys.argv[1:])
