"""Encoding as a service of its own: prepared requests in, embeddings out, several at a time."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Emit, Failure, Request
from mmfast.serve.engine.decode import DecodeBatch, Writer
from mmfast.serve.engine.encoder import MediaEncoder, Result
from mmfast.serve.engine.failures import LOG
from mmfast.serve.engine.prefill import Prefiller, PrefillJob
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.slots import Embedded, Filled, Prepared

SLICE = 0.1  # seconds of the tower between two looks at what came
_Call = tuple[Prepared, "Future[Embedded]"]


class Gathering:
    """Runs an `Encoder` in a thread; what came while it was at work is encoded together.

    Requests without media pass those with some, between two slices of a call of the tower.

    Args:
        encoder: What is run; others may have it write prompts meanwhile.
    """

    def __init__(self, encoder: MediaEncoder) -> None:
        self.encoder = encoder
        encoder.slicer.budget = SLICE
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._held: list[_Call | None] = []  # taken from there, and not at work yet
        self._thread = threading.Thread(target=self._run, name="mmfast-encode", daemon=True)
        self._thread.start()

    def encode(self, prepared: Prepared) -> Future[Embedded]:
        """Encode, reduce and embed; cancelling the future keeps what has not begun from it."""
        future: Future[Embedded] = Future()
        self._calls.put((prepared, future))
        return future

    def close(self) -> None:
        """Stop behind what came before."""
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
            self._encode([each for each in calls if each[1].set_running_or_notify_cancel()])
            if over:
                return

    def _take(self) -> None:
        """What came meanwhile."""
        while not self._calls.empty():
            self._held.append(self._calls.get())

    def _encode(self, calls: list[_Call]) -> None:
        try:
            for step in self.encoder.steps([prepared for prepared, _ in calls]):
                if step is not None:
                    _tell(calls[step[0]][1], step[1])
                self._texts()
        except Exception as error:
            for _, future in calls:
                if not future.done():
                    future.set_exception(error)

    def _texts(self) -> None:
        """Requests without media wait for nobody's call of the tower."""
        self._take()
        texts = [call for call in self._held if call is not None and not call[0].media]
        for prepared, future in texts:
            self._held.remove((prepared, future))
            if future.set_running_or_notify_cancel():
                _tell(future, self.encoder.encode([prepared])[0])


def _tell(future: Future[Embedded], result: Result) -> None:
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(frozen=True, eq=False)
class PromptPiece:
    """What decoding gets of a prompt.

    Attributes:
        filled: Keys and values, and logits of the first token.
        prompt_tokens: Tokens of the prompt before it was reduced.
        cached_tokens: Those whose work was reused.
        ms: Milliseconds of prefill, waiting for others included.
        trace: Of encoding, and how many tokens went into prefill.
    """

    filled: Filled
    prompt_tokens: int
    cached_tokens: int = 0
    ms: float = 0.0
    trace: dict[str, Any] = field(default_factory=dict)


class Filling:
    """Runs a `Prefiller` in a thread; prompts that come meanwhile share its passes.

    Args:
        prefiller: What is run; nobody else may use it meanwhile.
        context: Longest prompt and answer in tokens.
    """

    def __init__(self, prefiller: Prefiller, context: int) -> None:
        self._prefiller, self._context = prefiller, context
        self._new: list[tuple[Embedded, Future[PromptPiece], float]] = []
        self._jobs: dict[PrefillJob, tuple[Future[PromptPiece], float]] = {}
        self._some = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="mmfast-prefill", daemon=True)
        self._thread.start()

    def fill(self, prompt: Embedded, answer: int) -> Future[PromptPiece]:
        """Read a prompt; cancelling the future stops that.

        Args:
            prompt: The prompt.
            answer: Tokens that its answer may have.

        Raises:
            MmfastError: It is too long.
        """
        if prompt.length + answer > self._context:
            raise MmfastError(
                f"a prompt of {prompt.length} tokens and an answer of {answer} are more than the "
                f"{self._context} that fit; shorten one, or reduce the media"
            )
        future: Future[PromptPiece] = Future()
        with self._some:
            self._new.append((prompt, future, time.perf_counter()))
            self._some.notify()
        return future

    def close(self) -> None:
        """Stop; what still runs is cancelled."""
        with self._some:
            self._over = True
            self._some.notify()
        self._thread.join()
        for _, future, _ in self._new:
            future.cancel()
        for future, _ in self._jobs.values():
            future.cancel()

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._new or self._jobs or self._over)
                if self._over:
                    return
                new, self._new = self._new, []
            self._jobs |= {PrefillJob(prompt): (future, at) for prompt, future, at in new}
            self._jobs = {job: how for job, how in self._jobs.items() if not how[0].cancelled()}
            try:
                self._pass()
            except Exception as error:  # what is not one prompt's fault ends all that are here
                LOG.exception("prefill failed")
                for future, _ in self._jobs.values():
                    if future.set_running_or_notify_cancel():
                        future.set_exception(error)
                self._jobs.clear()

    def _pass(self) -> None:
        plan = self._prefiller.plan(list(self._jobs))
        try:
            ended = self._prefiller.run(plan)
        except Exception:  # one of them is broken: alone, only that one fails
            ended = [job for part in plan for job in self._alone(part)]
        for job in ended:
            self._end(job)

    def _end(self, job: PrefillJob) -> None:
        future, at = self._jobs.pop(job)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._piece(job, (time.perf_counter() - at) * 1e3))
            except Exception as error:  # of this prompt alone
                future.set_exception(error)

    def _alone(self, part: tuple[PrefillJob, int]) -> list[PrefillJob]:
        try:
            return self._prefiller.run([part])
        except Exception as error:
            future, _ = self._jobs.pop(part[0])
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return []

    def _piece(self, job: PrefillJob, ms: float) -> PromptPiece:
        prompt = job.prompt
        filled = self._prefiller.result(job)
        return PromptPiece(filled, prompt.whole_length, prompt.reused, ms, prompt.told)


class Continuing:
    """Runs a `Decoder` in a thread; answers join and leave between two of its steps.

    Args:
        decoder: What is run; nobody else may use it meanwhile.
        tokenizer: Of the model.
        limit: Bytes of keys and values; an answer that does not fit waits for others to end.
    """

    def __init__(self, decoder: DecodeBatch, tokenizer: Any, limit: int) -> None:
        self._decoder, self._tokenizer, self._limit = decoder, tokenizer, limit
        self._waiting: dict[str, tuple[ActiveRequest, PromptPiece]] = {}
        self._running: dict[
            str, tuple[ActiveRequest, dict[str, Any], int]
        ] = {}  # trace, prompt tokens
        self._gone: set[str] = set()
        self._some = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="mmfast-decode", daemon=True)
        self._thread.start()

    def add(self, request: Request, piece: PromptPiece, emit: Emit) -> None:
        """Answer; exactly one `Finish` or `Failure` comes last.

        Args:
            request: What was asked; the seed of its sampling is set.
            piece: Its prompt.
            emit: Gets the events, in the thread that decodes.
        """
        answer = ActiveRequest(request, emit, request.sampling)
        ends = self._decoder.chooser.ends
        answer.writer = Writer(self._tokenizer, request.sampling, ends)
        answer.prefill_ms, answer.cached = piece.ms, piece.cached_tokens
        with self._some:
            self._waiting[request.id] = answer, piece
            self._some.notify()

    def cancel(self, name: str) -> None:
        """Stop an answer behind the step that runs."""
        with self._some:
            self._gone.add(name)
            self._some.notify()

    def close(self) -> None:
        """Stop; what still runs fails."""
        with self._some:
            self._over = True
            self._some.notify()
        self._thread.join()
        for name in [*self._waiting, *self._running]:
            self._leave(name).end(Failure("the server stops", 503))

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(
                    lambda: self._waiting or self._running or self._gone or self._over
                )
                if self._over:
                    return
                gone, self._gone = self._gone, set()
            try:
                self._round(gone)
            except Exception as error:  # what is not one answer's fault ends all that are here
                LOG.exception("decoding failed")
                for name in [*self._waiting, *self._running]:
                    self._fail(name, error, logged=True)

    def _round(self, gone: set[str]) -> None:
        for name in gone:
            if name in self._waiting or name in self._running:
                self._leave(name).end(Failure("cancelled", 499, "cancelled"))
        while self._waiting and self._fits(next(iter(self._waiting))):
            self._begin(next(iter(self._waiting)))
        self._step()

    def _fits(self, name: str) -> bool:
        """Whether the next answer has room; alone it always has."""
        slots = self._decoder.slots
        if len(self._running) >= slots.most:
            return False
        answer, piece = self._waiting[name]
        reserve = piece.filled.length + answer.sampling.max_tokens
        token = piece.filled.nbytes / piece.filled.length
        return not self._running or slots.needed([reserve]) * token <= self._limit

    def _begin(self, name: str) -> None:
        with self._some:
            answer, piece = self._waiting.pop(name)
            # Keys and values are copied to a row: nothing of the prompt is kept beside it.
            self._running[name] = answer, piece.trace, piece.prompt_tokens
        try:
            token = self._decoder.first(piece.filled, answer.sampling)
            if self._push(name, token):
                self._decoder.admit(name, piece.filled, token, answer.sampling)
        except Exception as error:
            self._fail(name, error)

    def _step(self) -> None:
        try:
            found = self._decoder.step()
        except Exception as error:  # a pass is of all answers
            LOG.exception("a step of decoding failed")
            for name in list(self._running):
                self._fail(name, error, logged=True)
            return
        for key, token in found:
            try:
                if isinstance(token, Exception):
                    raise token
                self._push(str(key), token)
            except Exception as error:  # of this answer alone
                self._fail(str(key), error)

    def _push(self, name: str, token: int) -> bool:
        """Say the next token; whether the answer goes on."""
        answer, trace, prompt_tokens = self._running[name]
        if answer.push(token):
            return True
        if not answer.broken:
            answer.finish(trace, prompt_tokens)
        self._leave(name)
        return False

    def _fail(self, name: str, error: Exception, logged: bool = False) -> None:
        self._leave(name).fail(error, logged)

    def _leave(self, name: str) -> ActiveRequest:
        with self._some:
            held = self._running.pop(name, None) or self._waiting.pop(name)
        self._decoder.release(name)
        return held[0]
