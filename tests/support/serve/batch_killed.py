"""Runs with a stand-in for the model that kill themselves before their n-th SQL statement.

Each line of the input is such an n; the run forks from this process, which has imported everything,
and the status with which it ended is printed.
"""

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


def forked(*given: str) -> int:
    """Return how a run in a process of its own has ended."""
    child = os.fork()
    if child == 0:
        try:
            main(*given)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(forked(*sys.argv[1:], line), flush=True)
