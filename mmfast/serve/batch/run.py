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
_ERROR = ("file", "question", "reason")


class BatchTick(Protocol):
    """A callback for a progress bar."""

    def __call__(self, done: int, total: int, /) -> None:
        """Report that `done` of `total` answers exist."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of a run that change no answer."""

    engine: str = "ray"  # `ray`, or `inproc`: in this process, one after the other
    workers: int | None = None  # models on Ray; None takes one per GPU, or one per two cores
    address: str = "local"  # address of a Ray cluster; `local` starts one on this machine
    pattern: str | None = None  # pattern of the files; see `find_media`
    limit: int | None = None  # most files
    resume: bool = True  # go on from the rows that exist; False starts over
    retry_errors: bool = False  # ask again where the answer is an error


@dataclass(frozen=True)
class BatchOutcome:
    """Counts of a run."""

    out: Path
    files: int
    answers: int  # answers about them, of this run and earlier ones
    before: int  # answers of earlier runs
    errors: tuple[dict[str, str], ...]  # answers that are errors: file, question and reason
    seconds: float

    @property
    def failed(self) -> int:
        """Number of answers that are errors."""
        return len(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Return the document that `mmfast batch --json` prints."""
        now = self.answers - self.before
        rate = round(now / self.seconds, 3) if self.seconds else 0.0
        counts = {"files": self.files, "answers": self.answers, "before": self.before}
        took = {"failed": self.failed, "seconds": round(self.seconds, 3), "per_second": rate}
        return {"out": str(self.out), **counts, **took, "errors": list(self.errors)}


def run_batch(
    job: BatchJob,
    out: Path,
    way: BatchOptions | None = None,
    *,
    tick: BatchTick = lambda done, total: None,
    warn: Callable[[str], None] = lambda line: None,
) -> BatchOutcome:
    """Answer the questions without an answer, and write the result.

    `out` is a Parquet file with one row per file and question. Until the end, and after an error,
    answers are kept in the SQLite database `<out>.parts`; the next run goes on from them. `tick` is
    called as answers come, `warn` with one line where a file was damaged or a worker died.
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
        keys = [(medium.path, question) for medium, question in wanted]
        faults = ((*key, error) for key in keys if (error := store.done[key].error))
        errors = tuple(dict(zip(_ERROR, fault, strict=True)) for fault in faults)
    seconds = time.perf_counter() - start
    return BatchOutcome(out, len(media), len(wanted), before, errors, seconds)


def _answers(
    job: BatchJob, way: BatchOptions, todo: list[Task], warn: Callable[[str], None]
) -> Generator[list[Row], None, None]:
    size = job.batch_size
    chunks = (todo[i : i + size] for i in range(0, len(todo), size))
    if way.engine == "ray":
        yield from answered(job, chunks, way.workers, way.address, warn)
    else:
        yield from map(Answerer(job), chunks)
