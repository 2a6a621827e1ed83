"""One stream without threads: what was taken, written and counted, and the memory of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mmfast.caches.plan import plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.streams.encode import Shot
from mmfast.streams.quotas import Quotas
from mmfast.streams.reply import Reply
from mmfast.streams.script import Unit, Written
from mmfast.streams.timeline import Timeline
from mmfast.streams.viewer import Viewer

_FORMAT = 1


class Stream:
    """The state of a session, changed by one thread at a time.

    Args:
        viewer: The model.
        spec: Cache policies; None forgets nothing.
        quotas: Bytes per tier of what left the window.

    Attributes:
        memory: Keys and values.
        timeline: Times so far.
        taken: State of gate, frame cache and reducer, and frames that wait for a partner.
        written: How far the conversation is written.
        version: Counts what was written, to see whether the stream went on.
        counts: `frames` given, `units` written, visual `tokens` written, `questions`, `events`.
        spent: Milliseconds by stage.
    """

    def __init__(self, viewer: Viewer, spec: str | None, quotas: Quotas | None) -> None:
        self.viewer, self.spec = viewer, spec
        self.memory = viewer.engine.memory(plan_cache(spec), tiers=quotas)
        self.timeline = Timeline()
        self.taken = viewer.intake.start()
        self.written = Written()
        self.version = 0
        self.counts = dict.fromkeys(("frames", "units", "tokens", "questions", "events"), 0)
        self.spent = {"encode_ms": 0.0, "prefill_ms": 0.0, "answer_ms": 0.0}

    def take(self, frames: Sequence[Any], times: Sequence[Any]) -> list[Unit]:
        """Take frames `[H, W, 3]` with the times of their source; returns the units written."""
        timeline, shots = self.timeline, list[Shot]()
        for frame, stamp in zip(frames, times, strict=True):
            timeline, now = timeline.step(stamp, 1 / self.viewer.fps)
            if now is not None:
                shots.append((frame, now))
        start = time.perf_counter()
        self.taken, units = self.viewer.intake.step(self.taken, shots)
        self.spent["encode_ms"] += (time.perf_counter() - start) * 1e3
        self.timeline = timeline
        self.counts["frames"] += len(frames)
        for unit in units:
            self._write(unit)
        return units

    def flush(self) -> None:
        """Write frames that wait for a partner, the last one doubled."""
        self.taken, units = self.viewer.intake.flush(self.taken)
        for unit in units:
            self._write(unit)

    def _write(self, unit: Unit) -> None:
        start = time.perf_counter()
        written, pieces = self.viewer.script.patch(self.written, unit)
        for piece in pieces:
            self.viewer.engine.append(self.memory, piece)
            self.version += 1
            if piece.kind == "text":  # a video has begun, whether or not its frame fits
                self.written = Written("video", since=unit.times[0])
        self.written = written
        self.counts["units"] += 1
        self.counts["tokens"] += len(unit.features)
        self.spent["prefill_ms"] += (time.perf_counter() - start) * 1e3

    def branch(self, question: str, trace: Trace | None = None) -> tuple[Any, Any]:
        """A branch with a question on it, and the logits `[V]` where the answer begins."""
        with (trace or Trace()).stage("question") as row:
            state, pieces = self.written, []
            for unit in self.viewer.intake.rest(self.taken):
                state, new = self.viewer.script.patch(state, unit)
                pieces += new
            pieces += self.viewer.script.question(state, question)
            branch, logits = self.viewer.engine.branch(self.memory), None
            for piece in pieces:
                logits = branch.extend(piece, retrieve=piece is pieces[-1])
            row.tokens_in, row.tokens_out = sum(len(piece.embeds) for piece in pieces), 1
        return branch, logits

    def words(self, question: str) -> list[int]:
        """Text of the prompt that a question is asked with, for the rule against repetition."""
        script = self.viewer.script
        pieces = script.question(self.written, question)
        asked = [int(id) for piece in pieces if piece.ids is not None for id in piece.ids]
        return [*script.wording.opening(), *asked]

    def remember(self, reply: Reply, question: str, version: int) -> None:
        """Keep an exchange that was begun when the stream was at `version`."""
        script = self.viewer.script
        if version == self.version:
            reply.keep()
        else:  # the stream went on meanwhile: the exchange is written behind what came
            pieces = script.question(self.written, question)
            pieces += [script.text(reply.ids)] if reply.ids else []
            for piece in pieces:
                self.viewer.engine.append(self.memory, piece)
        self.version += 1
        self.written = script.answered(self.written)

    def snapshot(self) -> dict[str, Any]:
        """All state as a tree of plain containers and tensors."""
        return {
            "format": _FORMAT,
            "model": self.viewer.signature(),
            "spec": self.spec,
            "timeline": self.timeline.snapshot(),
            "taken": self.viewer.intake.snapshot(self.taken),
            "written": self.written.snapshot(),
            "counts": dict(self.counts),
            "spent": dict(self.spent),
            "memory": self.memory.snapshot(),
        }

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot.

        Raises:
            MmfastError: It is of another model or format.
        """
        if tree.get("format") != _FORMAT:
            raise MmfastError(
                f"a session saved in format {tree.get('format')!r} cannot be read; this version "
                f"reads {_FORMAT}"
            )
        here, there = self.viewer.signature(), tree["model"]
        odd = [f"{k} {there.get(k)!r}, here {here[k]!r}" for k in here if there.get(k) != here[k]]
        if odd:
            raise MmfastError(f"the session was saved with another model ({'; '.join(odd)})")
        self.memory.restore(tree["memory"])
        self.timeline = Timeline(**tree["timeline"])
        self.taken = self.viewer.intake.restore(tree["taken"])
        self.written = Written(**tree["written"])
        self.counts, self.spent = dict(tree["counts"]), dict(tree["spent"])

    def close(self) -> None:
        """Let go of stored blocks; files of saved sessions stay."""
        close = getattr(self.memory.archive, "close", None)
        if close is not None:
            close()

    def stats(self) -> dict[str, Any]:
        """Figures as plain numbers."""
        return {
            **self.counts,
            "seconds": self.timeline.last,
            "waiting": len(self.taken.waiting),
            "gated": self.taken.gated,
            **{name: round(ms, 3) for name, ms in self.spent.items()},
            "memory": self.memory.stats(),
        }
