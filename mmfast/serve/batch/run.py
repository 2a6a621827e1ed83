"""Batch runs: questions about every clip and image of a folder, each answered once.

Workers hold a loaded model each, in this process or as actors on Ray. Actors instead of Ray Data:
that restarts an actor and repeats its work forever, so a clip that kills its decoder would keep the
run from ending. Here such a clip is known: answered alone it gets a second chance, then it becomes
a row with an error. One process alone writes all rows, so none is lost or doubled.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError, unknown
from mmfast.frontends.source import first_line
from mmfast.serve.batch.job import BatchJob, Medium, file_hash, find_media
from mmfast.serve.batch.store import SCHEMA, Row, RowStore
from mmfast.serve.ray.cluster import gpus_of, imported, share, start

Task = tuple[Medium, str]  # a file and a question


class Answerer:
    """One loaded model."""

    def __init__(self, job: BatchJob) -> None:
        from mmfast.caches.plan import call_plan
        from mmfast.core.spec import is_auto, parse
        from mmfast.models.reduction.check import check
        from mmfast.serve.engine.model import load_packed

        self._job = job
        self._parts = load_packed(job.model, job.device, job.dtype, job.packed, None)
        if not is_auto(job.reduce):  # what would fail at every file ends the run
            check(parse(job.reduce), self._parts[0], call_plan(job.cache))
        self._pipes: dict[str, Any] = {}
        self._hash: tuple[str, str | None] = ("", None)

    def __call__(self, tasks: Sequence[Task]) -> list[Row]:
        """Return a row for each task, in order; an error of a file becomes its row."""
        rows = [blank(self._job, medium, question) for medium, question in tasks]
        kinds: dict[str, list[int]] = {}
        for i, (medium, _) in enumerate(tasks):
            rows[i]["content_hash"] = self._hashed(medium.file)
            rows[i]["kind"] = self._kind(medium, rows[i])
            if rows[i]["kind"] is not None:
                kinds.setdefault(rows[i]["kind"], []).append(i)
        for kind, places in kinds.items():
            self._fill(kind, [tasks[i] for i in places], [rows[i] for i in places])
        return rows

    def _hashed(self, file: str) -> str | None:
        if self._hash[0] != file:  # the questions about a file are adjacent
            self._hash = file, file_hash(file)
        return self._hash[1]

    def _kind(self, medium: Medium, row: Row) -> str | None:
        from mmfast.frontends.image import kind_of

        try:
            return kind_of(medium.file)
        except Exception as error:
            row["error"] = why(error)
            return None

    def _fill(self, kind: str, tasks: Sequence[Task], rows: Sequence[Row]) -> None:
        try:
            start = time.perf_counter()
            pipe = self._pipe(kind)
            answers = pipe([m.file for m, _ in tasks], [question for _, question in tasks])
            ms = (time.perf_counter() - start) * 1e3
        except Exception as error:
            if len(tasks) > 1:  # ask one by one, so that only the faulty one fails
                for task, row in zip(tasks, rows, strict=True):
                    self._fill(kind, [task], [row])
            else:
                rows[0]["error"] = why(error)
            return
        for answer, row in zip(answers, rows, strict=True):
            row |= {"answer": answer.text, "ttft_ms": answer.ttft_ms, "ms": ms}
            row |= {"visual_tokens": answer.visual_tokens, "kept_tokens": answer.kept_tokens}

    def _pipe(self, kind: str) -> Any:
        if kind not in self._pipes:
            from mmfast.pipelines import pipeline

            job = self._job
            options: dict[str, Any] = {"frames": job.frames, "fps": job.fps}
            options |= {"reduce": job.reduce, "cache": job.cache, "decode": job.decode}
            options |= {"max_new_tokens": job.max_new_tokens, "batch_size": job.batch_size}
            self._pipes[kind] = pipeline(f"{kind}-qa", self._parts, **options)
        return self._pipes[kind]


def blank(job: BatchJob, medium: Medium, question: str) -> Row:
    """Return a row without an answer."""
    row: Row = dict.fromkeys(SCHEMA.names)
    row |= {"path": medium.path, "bytes": medium.bytes, "mtime_ns": medium.mtime_ns}
    row |= {"question": question, "model": job.model or "embedded"}
    return row | {name: getattr(job, name) for name in ("reduce", "cache", "frames", "fps")}


def why(error: Exception) -> str:
    """Return an exception as one line of a row."""
    if isinstance(error, MmfastError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {first_line(error)}"


CHANCES = 2  # deaths of workers at one clip before it becomes an error
LOADS = 3  # workers in a row that may die while they load the model


class BatchWorker:
    """Body of an actor; an error while loading reaches the user as one line."""

    def __init__(self, job: BatchJob, threads: int) -> None:
        self._job, self._threads = job, threads
        self._answer: Answerer | None = None

    def load(self) -> str:
        """Load the model; return the error, "" if there is none."""
        import torch

        from mmfast.models.quiet import quiet

        quiet()
        torch.set_num_threads(self._threads)
        try:
            self._answer = Answerer(self._job)
        except MmfastError as error:
            return str(error)
        return ""

    def answer(self, tasks: Sequence[Task]) -> list[Row]:
        """See `Answerer.__call__`."""
        assert self._answer is not None
        return self._answer(tasks)


@dataclass
class _Pool:
    ray: Any
    job: BatchJob
    chunks: Iterator[list[Task]]
    options: dict[str, Any]
    threads: int
    warn: Callable[[str], None]
    again: deque[list[Task]] = field(default_factory=deque)
    deaths: dict[Task, int] = field(default_factory=dict)
    busy: dict[Any, tuple[Any, list[Task]]] = field(default_factory=dict)  # future -> worker, tasks
    loaded: int = 0
    unloaded: int = 0  # deaths in a row while loading

    def start(self) -> None:
        """Start a worker, which loads the model first."""
        actor = self.ray.remote(**self.options)(BatchWorker).remote(self.job, self.threads)
        self.busy[actor.load.remote()] = (actor, [])

    def give(self, actor: Any) -> None:
        """Give the next tasks to an idle worker."""
        tasks = self.again.popleft() if self.again else next(self.chunks, [])
        if tasks:
            self.busy[actor.answer.remote(tasks)] = (actor, tasks)

    def take(self, future: Any) -> list[Row]:
        """Return the rows of a future; its worker goes on, or is replaced."""
        actor, tasks = self.busy.pop(future)
        try:
            result = self.ray.get(future)
        except self.ray.exceptions.RayActorError as error:
            return self._died(tasks, error)
        if not tasks:
            if result:
                raise MmfastError(result)
            self.loaded, self.unloaded = self.loaded + 1, 0
        self.give(actor)
        return result if tasks else []

    def _died(self, tasks: list[Task], error: Exception) -> list[Row]:
        if not tasks and not self.loaded:
            raise MmfastError(
                f"a worker died while it loaded the model ({first_line(error)}): it may need more "
                "memory; try fewer --workers"
            ) from None
        if not tasks:
            return self._unloaded(error)
        self.warn(f"a worker died ({first_line(error)}); another one takes over")
        rows = []
        for task in tasks:
            # Only a clip that was answered alone is known to be at fault.
            self.deaths[task] = self.deaths.get(task, 0) + (len(tasks) == 1)
            if self.deaths[task] < CHANCES:
                self.again.append([task])
            else:
                reason = f"the worker died {CHANCES} times while it answered this"
                rows.append(blank(self.job, *task) | {"error": reason})
        self.start()
        return rows

    def _unloaded(self, error: Exception) -> list[Row]:
        """Retry a few times where an earlier worker could be loaded."""
        self.unloaded += 1
        if self.unloaded < LOADS:
            self.warn(f"a worker died while it loaded the model ({first_line(error)}); once more")
            self.start()
        elif self.busy:
            self.warn(f"{LOADS} workers died while they loaded the model; the others go on alone")
        else:
            raise MmfastError(
                f"{LOADS} workers in a row died while they loaded the model "
                f"({first_line(error)}); what is answered is kept: free some memory, or try fewer "
                "--workers, and run it again"
            ) from None
        return []


def answered(
    job: BatchJob,
    chunks: Iterator[list[Task]],
    workers: int | None,
    address: str = "local",
    warn: Callable[[str], None] = lambda line: None,
) -> Generator[list[Row], None, None]:
    """Yield the rows of all chunks as they come, in any order, and empty lists meanwhile.

    Each chunk goes to one worker. The address `local` starts Ray here and stops it in the end; the
    nodes of any other cluster must see the media under the same paths. `warn` gets one line for
    each worker that died.
    """
    with _cluster(address) as ray:
        count, options, threads = _shares(job, workers, ray.cluster_resources())
        pool = _Pool(ray, job, chunks, options, threads, warn)
        for _ in range(count):
            pool.start()
        while pool.busy:
            ready, _ = ray.wait(list(pool.busy), num_returns=1, timeout=1.0)
            yield []
            for future in ready:
                yield pool.take(future)


def _shares(
    job: BatchJob, workers: int | None, have: Mapping[str, float]
) -> tuple[int, dict[str, Any], int]:
    """Return the number of workers, the actor options of each, and its threads."""
    gpus, cores = gpus_of(have, job.device), int(have.get("CPU", 1))
    count = workers or gpus or max(1, cores // 2)
    options = {**share(have, count, job.device), "max_restarts": 0}
    return count, options, max(1, cores // count)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    (ray,) = imported("mmfast batch", "ray")
    start(ray, address)
    try:
        with redirect_stdout(_ThreadOutput()):
            yield ray
    finally:
        ray.shutdown()


class _ThreadOutput(io.TextIOBase):
    """Standard output of one thread alone: a listener thread of Ray also prints there."""

    def __init__(self) -> None:
        self._out, self._thread = sys.stdout, threading.get_ident()

    def write(self, text: str, /) -> int:
        """Write text of the own thread; drop that of others."""
        return self._out.write(text) if threading.get_ident() == self._thread else len(text)

    def flush(self) -> None:
        """Flush standard output."""
        self._out.flush()


ENGINES = ("ray", "inproc")
_ERROR = ("file", "question", "reason")


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
    tick: Callable[[int, int], object] = lambda done, total: None,
    warn: Callable[[str], None] = lambda line: None,
) -> BatchOutcome:
    """Answer the questions without an answer, and write the result.

    `out` is a Parquet file with one row per file and question. Until the end, and after an error,
    answers are kept in the SQLite database `<out>.parts`; the next run goes on from them. `tick` is
    called with (answers done, all) as they come, `warn` with one line where a file was damaged or a
    worker died.
    """
    way, start = way or BatchOptions(), time.perf_counter()
    job.check()
    if way.engine not in ENGINES:
        raise MmfastError(unknown("engine", way.engine, ENGINES))
    if way.workers is not None and way.workers < 1:
        raise MmfastError(f"workers={way.workers}; give a whole number of at least 1")
    many = {"workers": (way.workers or 1) > 1, "address": way.address != "local"}
    for name in filter(many.get, many if way.engine == "inproc" else ()):
        raise MmfastError(
            f"{name}={getattr(way, name)} needs the engine ray, and engine='inproc' is one "
            'process; give --engine ray, after pip install "mmfast[ray]"'
        )
    if out.suffix not in ("", ".parquet", ".pq") and not out.exists():
        raise MmfastError(
            f"{out.name!r} is no name of a Parquet file, which the answers become; give one such "
            f"as {out.with_suffix('.parquet').name!r}"
        )
    media = find_media(job.folder, way.pattern, way.limit, out)
    wanted = [(medium, question) for medium in media for question in job.questions]
    with RowStore(out, job.identity(), way.resume, warn) as store:
        todo = [task for task in wanted if store.lacks(*task, way.retry_errors)]
        done = before = len(wanted) - len(todo)
        tick(done, len(wanted))
        if todo:
            with closing(_answers(job, way, todo, warn)) as answers:
                for rows in answers:
                    done += len(rows)
                    tick(done, len(wanted))  # Ctrl-C in a commit tells of what it commits
                    store.add(rows)
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
