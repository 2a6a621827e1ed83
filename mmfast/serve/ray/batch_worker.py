"""Answers a few questions about a few files; what goes wrong with one becomes its row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.frontends.guard import first_line
from mmfast.serve.ray.batch_job import Job
from mmfast.serve.ray.batch_media import Medium, file_hash
from mmfast.serve.ray.batch_rows import SCHEMA, Row

Task = tuple[Medium, str]  # a file and a question


class Answerer:
    """One loaded model.

    Args:
        job: What is answered, and how.

    Raises:
        MmfastError: The model cannot be loaded.
    """

    def __init__(self, job: Job) -> None:
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


def blank(job: Job, medium: Medium, question: str) -> Row:
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
