"""A request inside an engine: its state, its events, and the checks of its options."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import replace
from typing import Any

from mmfast.core.errors import ContextError, MmfastError
from mmfast.core.spec import Spec
from mmfast.core.trace import SELECT, Trace, peak_bytes
from mmfast.models.context import longest_prompt
from mmfast.planner.target import Target
from mmfast.serve.engine.base import (
    Delta,
    Emit,
    Event,
    Failure,
    Finish,
    Media,
    Options,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.base import failure as failure_of
from mmfast.serve.engine.decode import Writer
from mmfast.serve.engine.drafts import AnswerDrafts
from mmfast.serve.engine.rules import TokenRules, needed
from mmfast.serve.engine.slots import Prepared
from mmfast.streams.reuse.schema import ModulePrompt


class ActiveRequest:
    """A request from submission to its last event."""

    def __init__(self, request: Request, emit: Emit, sampling: SamplingOptions) -> None:
        self.request, self._emit, self.sampling = request, emit, sampling
        self.id, self.payer, self.priority = request.id, request.payer, request.priority
        # inputs of the model's processor, until they are encoded
        self.prepared: Prepared | None = None
        # trace of the prompt and its number of tokens; None until prefill has ended
        self.read: tuple[dict[str, Any], int] | None = None
        self.steps: Trace | None = None  # what a policy reads that chooses at each decode step
        self.writer: Writer | None = None
        # spec string of reducers; the planner's where there is a target
        self.reduce: str | None = None
        self.cache: str | None = None
        self.prefill: str | None = None  # spec string of sparse prefill
        self.decode: str | None = None  # spec string of draft and verify
        self.drafts: AnswerDrafts | None = None
        # the part of `reduce` between vision tower and language model, and the part inside it
        self.early: str | None = None
        self.deep: tuple[Spec, ...] = ()
        self.inside: Spec | None = None  # the part of `reduce` inside the vision tower
        self.batched = False  # the request is read in a pass with others
        self.reuses = False  # its media may be in the store of the engine
        # modules that stand before its question, and the question
        self.modules: tuple[ModulePrompt, str] | None = None
        self.target = Target()  # what the planner is to meet, if anything
        self.said: list[int] | None = None  # tokens of an answer that is checked later
        self.plan_ms: float | None = None
        # reserve: most tokens whose keys and values the request may hold behind its prompt,
        # piece: those of the prompt while it is read
        self.cached = self.reserve = self.piece = 0
        # remarks that stand in the trace before those of the stages
        self.notes = [note for turn in request.messages for note in turn.notes]
        parts = (part for turn in request.messages for part in turn.content)
        self.notes += [part.note for part in parts if isinstance(part, Media) and part.note]
        self.length = 0  # tokens of the prompt, where the processor has run in this process
        # the last event was sent; the receiver of the events raised an exception
        self.over = self.broken = False
        self.began = time.perf_counter()
        self.prefill_ms = 0.0
        self._first = 0.0
        self.queued = 0.0  # when it joined the queue
        self.waited_ms: float | None = None  # time in the queue
        self._unsent = 0

    @property
    def draft_rooms(self) -> list[int]:
        """Most entries of the row on which the model itself drafts, if it does."""
        own = self.drafts
        return [own.room] if own is not None and own.room and own.plan.views else []

    def adopt(
        self, early: str | None, deep: tuple[Spec, ...], inside: Spec | None, batched: bool
    ) -> None:
        """Take the parts of `reduce`, and whether the request is read with others."""
        self.early, self.deep, self.inside, self.batched = early, deep, inside, batched
        if self.prepared is not None:
            cache = self.cache or None
            taken = replace(self.prepared, reduce=early, deep=deep, cache=cache)
            self.prepared = replace(taken, inside=inside)

    def push(self, token: int) -> bool:
        """Send the next token; return True while the answer goes on."""
        assert self.writer is not None
        if not self._first:
            self._first = time.perf_counter()
        if self.said is not None:
            self.said.append(token)
        text = self.writer.push(token)
        self._unsent += 1
        rules = self.sampling.rules
        chances = () if rules is None or not (text or self.writer.over) else rules.told()
        if text or chances:
            prompt = self.read[1] if self.read else self.length
            self._send(Delta(text, self._unsent, chances, prompt))
            self._unsent = 0
        return self.writer.over is None and not self.broken

    def fail(self, error: Exception, logged: bool = False) -> None:
        """End the answer with an exception; arguments as for `failure`."""
        if not self.over:
            self.end(failure_of(error, self.id, logged))

    def end(self, event: Finish | Failure) -> None:
        """Send the last event, once."""
        if not self.over:
            self.over = True
            self._send(event)

    def complete(self) -> None:
        """Finish an answer whose last token was pushed; say nothing to a broken receiver."""
        if self.broken or self.read is None:
            self.over = True
        else:
            self.finish(*self.read)

    def finish(self, trace: dict[str, Any], prompt: int) -> None:
        """Send the `Finish` event; rows of prefill and decoding are added to the trace."""
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
        read = () if self.steps is None else self.steps.rows
        rows += [row.to_dict() for row in read if row.stage == SELECT]
        if (drafts := self.drafts) is not None:
            made = drafts.proposed, drafts.accepted, drafts.seconds * 1e3
            rows.append(_row("draft", *made))
        names = ("reductions", "visual_tokens", "kept_tokens")
        whole = {"rows": rows, **{name: trace[name] for name in names}}
        if notes := [*self.notes, *trace.get("notes", ())]:
            whole["notes"] = notes
        whole["ttft_ms"] = (self._first - self.began) * 1e3
        if self.waited_ms is not None:
            whole["queue_ms"] = self.waited_ms
        self.end(Finish(self.writer.over, prompt, self.writer.count, self.cached, whole))

    def _send(self, event: Event) -> None:
        try:
            self._emit(event)
        except Exception:  # a broken receiver must not stop the other requests
            self.broken = True


def _row(stage: str, tokens_in: int, tokens_out: int, ms: float) -> dict[str, Any]:
    row = {"stage": stage, "tokens_in": tokens_in, "tokens_out": tokens_out}
    return {**row, "ms": ms, "peak_bytes": peak_bytes()}


def checked(sampling: SamplingOptions) -> SamplingOptions:
    """Return the options with a seed, and with rules of their own where any are needed.

    Numbers outside their range raise `MmfastError`.
    """
    heat = sampling.temperature
    ranges = {
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
        "temperature": (heat, math.isfinite(heat) and heat >= 0, "0 or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k, sampling.top_k >= 0, "1 or more, or 0 for all"),
        "min_p": (sampling.min_p, 0 <= sampling.min_p <= 1, "0 to 1"),
        "min_tokens": (
            sampling.min_tokens,
            0 <= sampling.min_tokens <= sampling.max_tokens,
            f"0 to max_tokens={sampling.max_tokens}",
        ),
        "repetition_penalty": (
            sampling.repetition_penalty,
            sampling.repetition_penalty is None or 0.01 <= sampling.repetition_penalty <= 10,
            "0.01 to 10",  # beyond, logits are no longer finite
        ),
    }
    for name, (value, fine, choices) in ranges.items():
        if not fine:
            raise MmfastError(f"{name}={value!r} is not allowed; give {choices}")
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed, rules=TokenRules(sampling) if needed(sampling) else None)


def check_storeless(options: Options) -> None:
    """Refuse (MmfastError) what a request wants of a store that its engine does not have."""
    if options.modules or options.arguments:
        raise MmfastError(
            f"modules={list(options.modules)}: this server has none; start it with --modules and "
            "--reuse, or leave them out"
        )
    if (reuse := options.reuse) is not None:
        raise MmfastError(
            f"reuse={reuse!r}: this server keeps no media for later requests; start it with "
            "--reuse, or leave it out"
        )


def fitting(prompt: int, answer: int, context: int) -> int:
    """Return the tokens of a prompt and its answer together; too many raise `ContextError`."""
    if prompt + answer > context:  # in the words by which clients of OpenAI know this error
        raise ContextError(
            f"this model's maximum context length is {context} tokens, and the prompt has {prompt} "
            f"beside max_tokens={answer}; ask for less, or give fewer or smaller media"
        )
    return prompt + answer


def context_of(model: Any) -> int:
    """Return the longest prompt and answer of a model in tokens."""
    return longest_prompt(model) or 4096
