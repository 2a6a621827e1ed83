"""Workers on Ray: an actor with a model each, one piece of work at a time.

Actors and not Ray Data: that restarts an actor and repeats its work without end, so that one clip
that kills its decoder would keep the run from ever ending, and its own progress is known block by
block. Here the worker that died says which clip it was: answered alone it gets a second chance,
then it is a row with an error. Rows come to one process, which alone writes them; hence no row is
lost or there twice, whatever dies.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.frontends.source import first_line
from mmfast.serve.batch.job import BatchJob, Medium, file_hash
from mmfast.serve.batch.store import SCHEMA, Row
from mmfast.serve.ray.cluster import gpus_of, imported, share, start

Task = tuple[Medium, str]  # a file and a question


class Answerer:
    """One loaded model.

    Args:
        job: What is answered, and how.

    Raises:
        MmfastError: The model cannot be loaded.
    """

    def __init__(self, job: BatchJob) -> None:
        from mmfast.models.loading import load

        self._job = job
        self._parts = load(job.model, job.device, job.dtype)
        self._pipes: dict[str, Any] = {}
        self._hash: tuple[str, str | None] = ("", None)

    def __call__(self, tasks: Sequence[Task]) -> list[Row]:
        """A row for each task, in order; never raises for what is wrong with a file."""
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
        if self._hash[0] != file:  # questions about one file come one after the other
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
            if len(tasks) > 1:  # one is at fault: the others get their answers alone
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
            options |= {"reduce": job.reduce, "cache": job.cache}
            options |= {"max_new_tokens": job.max_new_tokens, "batch_size": job.batch_size}
            self._pipes[kind] = pipeline(f"{kind}-qa", self._parts, **options)
        return self._pipes[kind]


def blank(job: BatchJob, medium: Medium, question: str) -> Row:
    """A row without an answer yet."""
    row: Row = dict.fromkeys(SCHEMA.names)
    row |= {"path": medium.path, "bytes": medium.bytes, "mtime_ns": medium.mtime_ns}
    row |= {"question": question, "model": job.model or "embedded"}
    return row | {name: getattr(job, name) for name in ("reduce", "cache", "frames", "fps")}


def why(error: Exception) -> str:
    """An exception as one line of a row."""
    if isinstance(error, MmfastError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {first_line(error)}"


CHANCES = 2  # so often a clip may be the last thing a worker did
LOADS = 3  # so many workers in a row may die before they are loaded


class BatchWorker:
    """An actor's body: what it raises while loading reaches the user as one line."""

    def __init__(self, job: BatchJob, threads: int) -> None:
        self._job, self._threads = job, threads
        self._answer: Answerer | None = None

    def load(self) -> str:
        """Load the model; returns what is wrong, "" if nothing."""
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
    """Workers, what each of them does now, and what waits."""

    ray: Any
    job: BatchJob
    chunks: Iterator[list[Task]]
    options: dict[str, Any]
    threads: int
    warn: Callable[[str], None]
    again: deque[list[Task]] = field(default_factory=deque)
    deaths: dict[Task, int] = field(default_factory=dict)
    busy: dict[Any, tuple[Any, list[Task]]] = field(default_factory=dict)  # future -> who, what
    loaded: int = 0
    unloaded: int = 0  # deaths in a row of workers that were loading

    def start(self) -> None:
        """One more worker; its first work is to load the model."""
        actor = self.ray.remote(**self.options)(BatchWorker).remote(self.job, self.threads)
        self.busy[actor.load.remote()] = (actor, [])

    def next(self) -> list[Task]:
        """What to do next, [] if there is nothing."""
        return self.again.popleft() if self.again else next(self.chunks, [])

    def give(self, actor: Any) -> None:
        """Hand an idle worker something to do, if there is any."""
        tasks = self.next()
        if tasks:
            self.busy[actor.answer.remote(tasks)] = (actor, tasks)

    def take(self, future: Any) -> list[Row]:
        """What a future brought; its worker goes on, or is replaced."""
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
            # Only a clip that was alone is known to be at fault.
            self.deaths[task] = self.deaths.get(task, 0) + (len(tasks) == 1)
            if self.deaths[task] < CHANCES:
                self.again.append([task])
            else:
                reason = f"the worker died {CHANCES} times while it answered this"
                rows.append(blank(self.job, *task) | {"error": reason})
        self.start()
        return rows

    def _unloaded(self, error: Exception) -> list[Row]:
        """Another worker could be loaded before, but not this one: a few more tries."""
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
    """Rows of all chunks as they come, in any order; an empty list now and then.

    Args:
        job: What is answered, and how.
        chunks: What one worker does at a time.
        workers: How many models; None takes one per GPU, or one per two cores.
        address: `local` starts Ray on this machine and stops it in the end; else a cluster's, of
            which every node must see the media under the same paths.
        warn: Told in one line of each worker that died.

    Raises:
        MmfastError: Ray is not installed or cannot start, or the model cannot be loaded.
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
    """How many workers, the actor options of each, and its threads."""
    gpus, cores = gpus_of(have, job.device), int(have.get("CPU", 1))
    count = workers or gpus or max(1, cores // 2)
    options = {**share(have, count, job.device), "max_restarts": 0}
    return count, options, max(1, cores // count)


@contextmanager
def _cluster(address: str) -> Iterator[Any]:
    (ray,) = imported("mmfast batch", "inproc", "ray")
    start(ray, address)
    try:
        with redirect_stdout(_MyThread()):
            yield ray
    finally:
        ray.shutdown()


class _MyThread(io.TextIOBase):
    """Standard output of the thread that makes it: Ray's listener prints there, too."""

    def __init__(self) -> None:
        self._out, self._thread = sys.stdout, threading.get_ident()

    def write(self, text: str, /) -> int:
        """Pass it on, or drop it."""
        return self._out.write(text) if threading.get_ident() == self._thread else len(text)

    def flush(self) -> None:
        """Pass it on."""
        self._out.flush()
