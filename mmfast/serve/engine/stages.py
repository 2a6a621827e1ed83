"""The stages of an engine as services, each with a thread: encode, prefill and decode.

Engines with several workers give each stage a process or a replica of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import ContextError
from mmfast.serve.engine.base import CANCELLED, LOG, STOPPED, Emit, Request
from mmfast.serve.engine.decode import DecodeBatch, Writer
from mmfast.serve.engine.encoder import Features, MediaEncoder, Result
from mmfast.serve.engine.prefill import Prefiller, PrefillJob
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import Embedded, Filled, Prepared

SLICE = 0.1  # seconds of the vision tower between two looks at the queue


@dataclass(frozen=True, eq=False)
class _EncodeCall:
    """A prompt to embed, with what other encoders have made of its media; or a part of these."""

    prepared: Prepared
    future: Future[Any]
    given: Features = field(default_factory=dict)
    part: tuple[int, int] | None = None  # number, and how many


class EncodeStage:
    """Runs a `MediaEncoder`; requests that arrive during a call are encoded together.

    Requests without media are embedded between two slices of a call of the tower. Other threads may
    call the encoder's `prepare` meanwhile.
    """

    def __init__(self, encoder: MediaEncoder) -> None:
        self.encoder = encoder
        encoder.slicer.budget = SLICE
        self.busy = 0.0  # seconds of work
        self._calls: queue.SimpleQueue[_EncodeCall | None] = queue.SimpleQueue()
        self._held: list[_EncodeCall | None] = []  # taken from the queue, not started yet
        self._thread = threading.Thread(target=self._run, name="mmfast-encode", daemon=True)
        self._thread.start()

    def encode(self, prepared: Prepared, given: Features | None = None) -> Future[Embedded]:
        """Encode, reduce and embed; cancelling the future drops work that has not begun."""
        future: Future[Embedded] = Future()
        self._calls.put(_EncodeCall(prepared, future, given or {}))
        return future

    def part(self, prepared: Prepared, number: int, parts: int) -> Future[Features]:
        """Encode a part of the media of a request, for the encoder that embeds it (EPD)."""
        future: Future[Features] = Future()
        self._calls.put(_EncodeCall(prepared, future, part=(number, parts)))
        return future

    def close(self) -> None:
        """Stop after the calls that are queued."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            if not self._held:
                self._held.append(self._calls.get())
            self._take()
            calls = [call for call in self._held if call is not None]
            over = len(calls) < len(self._held)
            self._held.clear()
            ready = [each for each in calls if each.future.set_running_or_notify_cancel()]
            start = time.perf_counter()
            self._encode([each for each in ready if each.part is None])
            for each in ready:
                self._encode_part(each)
            self.busy += time.perf_counter() - start
            if over:
                return

    def _take(self) -> None:
        while not self._calls.empty():
            self._held.append(self._calls.get())

    def _encode(self, calls: list[_EncodeCall]) -> None:
        given = {key: value for call in calls for key, value in call.given.items()}
        try:
            for step in self.encoder.steps([call.prepared for call in calls], given):
                if step is not None:
                    _resolve(calls[step[0]].future, step[1])
                self._embed_texts()
        except Exception as error:
            for call in calls:
                if not call.future.done():
                    call.future.set_exception(error)

    def _encode_part(self, call: _EncodeCall) -> None:
        if call.part is None:
            return
        steps = self.encoder.part(call.prepared, *call.part)
        try:
            while True:
                next(steps)
                self._embed_texts()
        except StopIteration as end:
            call.future.set_result(end.value)
        except Exception as error:
            call.future.set_exception(error)

    def _embed_texts(self) -> None:
        """Embed requests without media; they need no call of the tower."""
        self._take()
        texts = [call for call in self._held if call is not None and not call.prepared.media]
        for call in texts:
            self._held.remove(call)
            if call.future.set_running_or_notify_cancel():
                _resolve(call.future, self.encoder.encode([call.prepared])[0])


def _resolve(future: Future[Embedded], result: Result) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(frozen=True, eq=False)
class PromptPiece:
    """A prompt after prefill, as the decode stage takes it."""

    filled: Filled
    prompt_tokens: int  # tokens of the prompt before it was reduced
    cached_tokens: int = 0  # tokens for which earlier work was reused
    ms: float = 0.0  # milliseconds of prefill, waiting for other prompts included
    # trace of encoding, and the number of tokens of prefill
    trace: dict[str, Any] = field(default_factory=dict)


class StageThread:
    """A thread that works in rounds while there is work, until it is closed.

    An exception of `work` goes to `failed` and ends all requests of the stage.
    """

    def __init__(
        self,
        name: str,
        busy: Callable[[], bool],
        work: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.changed, self._closed = threading.Condition(), False
        self.busy = 0.0  # seconds of work
        self._busy, self._work, self._failed = busy, work, failed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._closed or self._busy())
                if self._closed:
                    return
            start = time.perf_counter()
            try:
                self._work()
            except Exception as error:
                LOG.exception("%s failed", self._thread.name)
                self._failed(error)
            self.busy += time.perf_counter() - start

    def close(self) -> None:
        """Stop after the running round."""
        with self.changed:
            self._closed = True
            self.changed.notify()
        self._thread.join()


class PrefillStage:
    """Runs a `Prefiller`, which no other thread may use; prompts share its passes."""

    def __init__(self, prefiller: Prefiller, context: int) -> None:
        self._prefiller, self._context = prefiller, context
        self._new: list[tuple[Embedded, int, Future[PromptPiece], float]] = []
        self._jobs: dict[PrefillJob, tuple[Future[PromptPiece], float]] = {}
        self._thread = StageThread("mmfast-prefill", self._busy, self._round, self._fail_all)

    @property
    def busy(self) -> float:
        """Seconds of work so far."""
        return self._thread.busy

    def fill(self, prompt: Embedded, answer: int) -> Future[PromptPiece]:
        """Read a prompt; cancelling the future stops that. ContextError: it is too long."""
        if prompt.length + answer > self._context:
            raise ContextError(
                f"a prompt of {prompt.length} tokens and an answer of {answer} are more than the "
                f"{self._context} that fit; shorten one, or reduce the media"
            )
        future: Future[PromptPiece] = Future()
        with self._thread.changed:
            self._new.append((prompt, answer, future, time.perf_counter()))
            self._thread.changed.notify()
        return future

    def close(self) -> None:
        """Stop; running prompts are cancelled."""
        self._thread.close()
        for future in [*(each[2] for each in self._new), *(f for f, _ in self._jobs.values())]:
            future.cancel()

    def _busy(self) -> bool:
        return bool(self._new or self._jobs)

    def _round(self) -> None:
        with self._thread.changed:
            new, self._new = self._new, []
        for prompt, answer, future, at in new:
            self._jobs[self._prefiller.job(prompt, prompt.length + answer)] = future, at
        self._jobs = {job: each for job, each in self._jobs.items() if not each[0].cancelled()}
        plan = self._prefiller.plan(list(self._jobs))
        try:
            ended = self._prefiller.run(plan)
        except Exception:  # run one by one, only the broken prompts fail
            ended = [job for part in plan for job in self._run_alone(part)]
        for job in ended:
            self._end(job)

    def _end(self, job: PrefillJob) -> None:
        future, at = self._jobs.pop(job)
        if not future.set_running_or_notify_cancel():
            return
        try:
            prompt, filled = job.prompt, self._prefiller.result(job)
            ms = (time.perf_counter() - at) * 1e3
            piece = PromptPiece(filled, prompt.whole_length, prompt.reused, ms, prompt.trace)
            future.set_result(piece)
        except Exception as error:  # of this prompt alone
            future.set_exception(error)

    def _run_alone(self, part: tuple[PrefillJob, int]) -> list[PrefillJob]:
        try:
            return self._prefiller.run([part])
        except Exception as error:
            self._fail(part[0], error)
            return []

    def _fail(self, job: PrefillJob, error: Exception) -> None:
        future, _ = self._jobs.pop(job)
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._fail(job, error)


class DecodeStage:
    """Runs a `DecodeBatch`; answers join and leave between two of its steps.

    No other thread may use the batch. `limit` is in bytes of keys and values; an answer that does
    not fit waits for others to end.
    """

    def __init__(self, decoder: DecodeBatch, tokenizer: Any, limit: int) -> None:
        self._decoder, self._tokenizer, self._limit = decoder, tokenizer, limit
        self._waiting: dict[str, tuple[ActiveRequest, PromptPiece]] = {}
        self._running: dict[str, ActiveRequest] = {}
        self._cancelled: set[str] = set()
        # sums over steps, for a line through them: one, rows, seconds, rows squared, their product
        self.steps = [0.0] * 5
        self._thread = StageThread("mmfast-decode", self._busy, self._round, self._fail_all)

    def add(self, request: Request, piece: PromptPiece, emit: Emit) -> None:
        """Answer; exactly one `Finish` or `Failure` comes last.

        The events are emitted in the thread that decodes. The seed of the sampling is set.
        """
        answer = ActiveRequest(request, emit, request.sampling)
        answer.writer = Writer(self._tokenizer, request.sampling, self._decoder.chooser.ends)
        answer.prefill_ms, answer.cached = piece.ms, piece.cached_tokens
        answer.read = piece.trace, piece.prompt_tokens
        with self._thread.changed:
            self._waiting[request.id] = answer, piece
            self._thread.changed.notify()

    def cancel(self, name: str) -> None:
        """Stop an answer after the running step."""
        with self._thread.changed:
            self._cancelled.add(name)
            self._thread.changed.notify()

    def close(self) -> None:
        """Stop; running answers fail."""
        self._thread.close()
        for name in [*self._waiting, *self._running]:
            self._remove(name).end(STOPPED)

    def _busy(self) -> bool:
        return bool(self._waiting or self._running or self._cancelled)

    def _round(self) -> None:
        with self._thread.changed:
            cancelled, self._cancelled = self._cancelled, set()
        for name in cancelled:
            if name in self._waiting or name in self._running:
                self._remove(name).end(CANCELLED)
        while self._waiting and self._fits(next(iter(self._waiting))):
            self._begin(next(iter(self._waiting)))
        self._step()

    def _fits(self, name: str) -> bool:
        """Return True if there is room; an answer alone always has room."""
        if len(self._running) >= self._decoder.most:
            return False
        answer, piece = self._waiting[name]
        if not self._running or piece.filled.row is not None:
            return True
        reserve = piece.filled.length + answer.sampling.max_tokens
        token = piece.filled.kv.nbytes / piece.filled.length
        return self._decoder.store.needed([reserve]) * token <= self._limit

    def _begin(self, name: str) -> None:
        with self._thread.changed:
            answer, piece = self._waiting.pop(name)
            # Keys and values are copied to a row: no second copy of the prompt is kept.
            self._running[name] = answer
        try:
            token = self._decoder.first(piece.filled, answer.sampling)
            if self._push(name, token):
                self._decoder.admit(name, piece.filled, token, answer.sampling)
        except Exception as error:
            self._remove(name).fail(error)

    def _step(self) -> None:
        start = time.perf_counter()
        try:
            found = self._decoder.step()
        except Exception as error:  # one pass serves all running answers
            LOG.exception("a step of decoding failed")
            for name in list(self._running):
                self._remove(name).fail(error, logged=True)
            return
        if rows := len(found):
            took = time.perf_counter() - start
            more = (1.0, rows, took, rows * rows, rows * took)
            self.steps = [a + b for a, b in zip(self.steps, more, strict=True)]
        for key, token in found:
            name = str(key)
            try:
                if isinstance(token, Exception):
                    raise token
                self._push(name, token)
            except Exception as error:  # of this answer alone
                self._remove(name).fail(error)

    def _push(self, name: str, token: int) -> bool:
        """Send the next token; return True while the answer goes on."""
        answer = self._running[name]
        if answer.push(token):
            return True
        answer.complete()
        self._remove(name)
        return False

    def _remove(self, name: str) -> ActiveRequest:
        with self._thread.changed:
            answer = self._running.pop(name, None) or self._waiting.pop(name)[0]
        self._decoder.release(name)
        return answer

    def _fail_all(self, error: Exception) -> None:
        for name in [*self._waiting, *self._running]:
            self._remove(name).fail(error, logged=True)
