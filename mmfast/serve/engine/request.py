"""One request on its way: what is known of it, and what its caller hears."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.trace import peak_bytes
from mmfast.serve.engine.base import (
    BusyError,
    Delta,
    Emit,
    Event,
    Failure,
    Finish,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.decode import Writer
from mmfast.serve.engine.encoder import early
from mmfast.serve.engine.failures import failure
from mmfast.serve.engine.processes.crew import WorkerPlace
from mmfast.serve.engine.slots import Prepared


class ActiveRequest:
    """A request from submission to its last event.

    Args:
        request: The request.
        emit: Hears the events.
        sampling: Of the request, its seed set.

    Attributes:
        prepared: What the processor wrote, until it is encoded.
        read: What the trace says of its prompt, and tokens of that; None until it is read.
        writer: Turns tokens into text.
        reduce: Spec string of reducers; of the planner where there is a target.
        cache: Spec string of cache policies.
        target: Milliseconds to the first token that the planner aims at.
        plan_ms: Milliseconds of planning.
        cached: Tokens whose work was reused.
        reserve: Tokens it may come to hold.
        over: The last event was sent.
        broken: Its caller cannot hear.
    """

    def __init__(self, request: Request, emit: Emit, sampling: SamplingOptions) -> None:
        self.request, self._emit, self.sampling = request, emit, sampling
        self.prepared: Prepared | None = None
        self.read: tuple[dict[str, Any], int] | None = None
        self.writer: Writer | None = None
        self.reduce: str | None = None
        self.cache: str | None = None
        self.target: float | None = None
        self.plan_ms: float | None = None
        self.cached = self.reserve = 0
        self.over = self.broken = False
        self.began = time.perf_counter()
        self.prefill_ms = 0.0
        self._first = 0.0
        self._unsaid = 0

    @property
    def id(self) -> str:
        """Of the request."""
        return self.request.id

    @property
    def payer(self) -> str:
        """Whose share it takes."""
        return self.request.payer

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self.request.priority

    def adopt(self, reduce: str | None) -> None:
        """Take the reducers that the planner chose."""
        self.reduce = reduce
        if self.prepared is not None and early(reduce):
            self.prepared = replace(self.prepared, reduce=reduce)

    def push(self, token: int) -> bool:
        """The next token; whether the answer goes on."""
        assert self.writer is not None
        if not self._first:
            self._first = time.perf_counter()
        text = self.writer.push(token)
        self._unsaid += 1
        if text:
            self._send(Delta(text, self._unsaid))
            self._unsaid = 0
        return self.writer.over is None and not self.broken

    def fail(self, error: Exception, logged: bool = False) -> None:
        """The answer ends here; arguments as of `failure`."""
        if not self.over:
            self.end(failure(error, self.id, logged))

    def end(self, event: Finish | Failure) -> None:
        """Send the last event, once."""
        if not self.over:
            self.over = True
            self._send(event)

    def finish(self, trace: dict[str, Any], prompt: int) -> None:
        """The answer is over.

        Args:
            trace: Rows and reductions so far; those of prefill and decoding are added.
            prompt: Tokens of the prompt.
        """
        assert self.writer is not None and self.writer.over is not None
        now = time.perf_counter()
        planned = [] if self.plan_ms is None else [_row("plan", 0, 0, self.plan_ms)]
        rows = [
            *trace["rows"][:1],
            *planned,
            *trace["rows"][1:],
            _row("prefill", trace["prompt"], 1, self.prefill_ms),
            _row("decode", 1, self.writer.count, (now - self._first) * 1e3),
        ]
        told = {
            "rows": rows,
            "reductions": trace["reductions"],
            "visual_tokens": trace["visual_tokens"],
            "kept_tokens": trace["kept_tokens"],
            "ttft_ms": (self._first - self.began) * 1e3,
        }
        count, reason = self.writer.count, self.writer.over
        self.end(Finish(reason, prompt, count, self.cached, told))

    def _send(self, event: Delta | Finish | Failure) -> None:
        try:
            self._emit(event)
        except Exception:  # nobody hears it; the others do
            self.broken = True


def _row(stage: str, tokens_in: int, tokens_out: int, ms: float) -> dict[str, Any]:
    return {
        "stage": stage,
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "ms": ms,
        "peak_bytes": peak_bytes(),
    }


LOG = logging.getLogger("mmfast.serve")


@dataclass(eq=False)
class Awaited:
    """A request and where it is.

    Attributes:
        request: The request.
        emit: Hears the events.
        place: Of the worker that answers.
        verdict: None until the worker took it or not; True, or why not.
        decided: There is a verdict.
    """

    request: Request
    emit: Emit
    place: WorkerPlace
    verdict: Exception | bool | None = None
    decided: threading.Event = field(default_factory=threading.Event)

    def decide(self, verdict: Exception | bool) -> None:
        """The first verdict counts."""
        if not self.decided.is_set():
            self.verdict = verdict
            self.decided.set()

    def hear(self, event: Event) -> None:
        """Pass an event on; a worker that sends one has taken the request."""
        self.decide(True)
        self._tell(event)

    def end(self, failure: Failure) -> None:
        """Nobody answers any more: an error, or a refusal where nobody ever began."""
        if self.decided.is_set():
            self._tell(failure)
        else:
            self.decide(BusyError(f"{failure.message}; try again in a second"))

    def _tell(self, event: Event) -> None:
        try:
            self.emit(event)
        except Exception:  # whoever listened is gone; others still wait for this thread
            LOG.exception("request %s cannot be told", self.request.id)


def checked(sampling: SamplingOptions) -> SamplingOptions:
    """The same with a seed.

    Raises:
        MmfastError: A number is outside its range.
    """
    heat = sampling.temperature
    ranges = {
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
        "temperature": (heat, math.isfinite(heat) and heat >= 0, "0 or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
    }
    for name, (value, fine, choices) in ranges.items():
        if not fine:
            raise MmfastError(f"{name}={value!r} is not allowed; give {choices}")
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed)


def fitting(prompt: int, answer: int, context: int) -> int:
    """Tokens of a prompt and its answer.

    Raises:
        MmfastError: They are more than fit.
    """
    if prompt + answer > context:
        raise MmfastError(
            f"{prompt} tokens of prompt and max_tokens={answer} are more than the {context} that "
            "fit; ask for less, or give fewer or smaller media"
        )
    return prompt + answer


def context_of(model: Any) -> int:
    """Longest prompt and answer of a model in tokens."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 4096)
