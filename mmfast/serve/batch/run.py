"""Questions about every clip and image of a folder, each answered once, whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.batch.job import BatchJob, find_media
from mmfast.serve.batch.store import Row, RowStore
from mmfast.serve.batch.workers import Answerer, Task

ENGINES = ("ray", "inproc")


class BatchTick(Protocol):
    """Moves a progress bar."""

    def __call__(self, done: int, total: int, /) -> None:
        """Say that `done` of `total` answers are there."""


@dataclass(frozen=True)
class BatchOptions:
    """How a job is run; none of it changes an answer.

    Attributes:
        engine: `ray`, or `inproc`: in this process, one after the other.
        workers: Models on Ray; None takes one per GPU, or one per two cores.
        address: Of a Ray cluster; `local` starts one on this machine.
        pattern: Which files; see `find_media`.
        limit: So many files at most.
        resume: Go on from what is there; False begins anew.
        retry_errors: Answer those anew whose answer is an error.
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
    """What a run did.

    Attributes:
        out: The result.
        files: Clips and images that fit.
        answers: Questions about them, answered in this run or an earlier one.
        before: Those of an earlier run.
        failed: Those whose answer is an error.
        seconds: That this run took.
    """

    out: Path
    files: int
    answers: int
    before: int
    failed: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast batch --json` prints."""
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
    """Answer what is not answered yet, and put the result together.

    Args:
        job: What is answered, and how.
        out: The result, a Parquet file with one row per file and question; what is answered on the
            way stays in `<out>.parts` beside it until then.
        way: How it is run.
        tick: Called as answers come.
        warn: Called with one line where something on disk was damaged.

    Returns:
        What was done; the rows are in `out`.

    Raises:
        MmfastError: Nothing can be answered, or the result not be written. Whatever was answered
            by then is kept, and the next run goes on from there.
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
    chunks = _chunks(todo, job.batch_size)
    if way.engine == "ray":
        from mmfast.serve.batch.workers import answered

        return answered(job, chunks, way.workers, way.address, warn)
    return _one_by_one(job, chunks)


def _one_by_one(job: BatchJob, chunks: Iterator[list[Task]]) -> Generator[list[Row], None, None]:
    yield from map(Answerer(job), chunks)


def _chunks(tasks: list[Task], size: int) -> Iterator[list[Task]]:
    rest = iter(tasks)
    while chunk := list(islice(rest, size)):
        yield chunk
