"""Batch runs: questions about every clip and image of a folder, each answered once."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.batch.job import BatchJob, find_media
from mmfast.serve.batch.store import Row, RowStore
from mmfast.serve.batch.workers import Answerer, Task, answered

ENGINES = ("ray", "inproc")


class BatchTick(Protocol):
    """A callback for a progress bar."""

    def __call__(self, done: int, total: int, /) -> None:
        """Report that `done` of `total` answers exist."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of a run that change no answer.

    Attributes:
        engine: `ray`, or `inproc`: in this process, one after the other.
        workers: Models on Ray; None takes one per GPU, or one per two cores.
        address: Address of a Ray cluster; `local` starts one on this machine.
        pattern: Pattern of the files; see `find_media`.
        limit: Most files.
        resume: Go on from the rows that exist; False starts over.
        retry_errors: Ask again where the answer is an error.
    """

    engine: str = "ray"
    workers: int | None = None
    address: str = "local"
    pattern: str | None = None
    limit: int | None = None
    resume: bool = True
    retry_errors: bool = False


@dataclass(frozen=True)
class BatchOutcome:
    """Counts of a run.

    Attributes:
        out: The result.
        files: Clips and images.
        answers: Answers about them, of this run and earlier ones.
        before: Answers of earlier runs.
        failed: Answers that are errors.
        seconds: Duration of this run.
    """

    out: Path
    files: int
    answers: int
    before: int
    failed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `mmfast batch --json` prints."""
        now = self.answers - self.before
        rate = round(now / self.seconds, 3) if self.seconds else 0.0
        counts = {"files": self.files, "answers": self.answers, "before": self.before}
        took = {"failed": self.failed, "seconds": round(self.seconds, 3), "per_second": rate}
        return {"out": str(self.out), **counts, **took}


def run_batch(
    job: BatchJob,
    out: Path,
    way: BatchOptions | None = None,
    *,
    tick: BatchTick = lambda done, total: None,
    warn: Callable[[str], None] = lambda line: None,
) -> BatchOutcome:
    """Answer the questions without an answer, and write the result.

    Args:
        job: The job.
        out: The result, a Parquet file with one row per file and question; until the end, answers
            are kept in the SQLite database `<out>.parts` beside it.
        way: Options of the run.
        tick: Called as answers come.
        warn: Called with one line where a file on disk was damaged, or a worker died.

    Returns:
        The counts of the run; the rows are in `out`.

    Raises:
        MmfastError: Nothing can be answered, or the result cannot be written. The answers so far
            are kept, and the next run goes on from them.
    """
    way, start = way or BatchOptions(), time.perf_counter()
    job.check()
    if way.engine not in ENGINES:
        raise MmfastError(unknown("engine", way.engine, ENGINES))
    if way.workers is not None and way.workers < 1:
        raise MmfastError(f"workers={way.workers}; give a whole number of at least 1")
    media = find_media(job.folder, way.pattern, way.limit, out)
    wanted = [(medium, question) for medium in media for question in job.questions]
    with RowStore(out, job.identity(), way.resume, warn) as store:
        todo = [task for task in wanted if store.lacks(*task, way.retry_errors)]
        done = before = len(wanted) - len(todo)
        tick(done, len(wanted))
        if todo:
            with closing(_answers(job, way, todo, warn)) as answers:
                for rows in answers:
                    store.add(rows)
                    done += len(rows)
                    tick(done, len(wanted))
        store.finish()
        failed = sum(store.done[medium.path, question].failed for medium, question in wanted)
    seconds = time.perf_counter() - start
    return BatchOutcome(out, len(media), len(wanted), before, failed, seconds)


def _answers(
    job: BatchJob, way: BatchOptions, todo: list[Task], warn: Callable[[str], None]
) -> Generator[list[Row], None, None]:
    size = job.batch_size
    chunks = (todo[i : i + size] for i in range(0, len(todo), size))
    if way.engine == "ray":
        yield from answered(job, chunks, way.workers, way.address, warn)
    else:
        yield from map(Answerer(job), chunks)
