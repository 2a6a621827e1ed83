"""Decoding as a service of its own: keys and values in, text out, all answers in one batch."""

from __future__ import annotations

import threading
from typing import Any

from mmfast.serve.engine.answer import Answer
from mmfast.serve.engine.base import Emit, Failure, Request
from mmfast.serve.engine.decode import Decoder
from mmfast.serve.engine.failures import LOG
from mmfast.serve.engine.filling import Piece
from mmfast.serve.engine.text import Writer


class Continuing:
    """Runs a `Decoder` in a thread; answers join and leave between two of its steps.

    Args:
        decoder: What is run; nobody else may use it meanwhile.
        tokenizer: Of the model.
        limit: Bytes of keys and values; an answer that does not fit waits for others to end.
    """

    def __init__(self, decoder: Decoder, tokenizer: Any, limit: int) -> None:
        self._decoder, self._tokenizer, self._limit = decoder, tokenizer, limit
        self._waiting: dict[str, tuple[Answer, Piece]] = {}
        self._running: dict[str, tuple[Answer, dict[str, Any], int]] = {}  # trace, prompt tokens
        self._gone: set[str] = set()
        self._some = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="mmfast-decode", daemon=True)
        self._thread.start()

    def add(self, request: Request, piece: Piece, emit: Emit) -> None:
        """Answer; exactly one `Finish` or `Failure` comes last.

        Args:
            request: What was asked; the seed of its sampling is set.
            piece: Its prompt.
            emit: Gets the events, in the thread that decodes.
        """
        answer = Answer(request, emit, request.sampling)
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

    def _leave(self, name: str) -> Answer:
        with self._some:
            held = self._running.pop(name, None) or self._waiting.pop(name)
        self._decoder.release(name)
        return held[0]
