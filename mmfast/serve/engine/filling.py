"""Prefill as a service of its own: prompts in, keys and values out, several at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.failures import LOG
from mmfast.serve.engine.parts import Embedded, Filled
from mmfast.serve.engine.prefill import Job, Prefiller


@dataclass(frozen=True, eq=False)
class Piece:
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
        self._new: list[tuple[Embedded, Future[Piece], float]] = []
        self._jobs: dict[Job, tuple[Future[Piece], float]] = {}
        self._some = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, name="mmfast-prefill", daemon=True)
        self._thread.start()

    def fill(self, prompt: Embedded, answer: int) -> Future[Piece]:
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
        future: Future[Piece] = Future()
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
            self._jobs |= {Job(prompt): (future, at) for prompt, future, at in new}
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

    def _end(self, job: Job) -> None:
        future, at = self._jobs.pop(job)
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._piece(job, (time.perf_counter() - at) * 1e3))
            except Exception as error:  # of this prompt alone
                future.set_exception(error)

    def _alone(self, part: tuple[Job, int]) -> list[Job]:
        try:
            return self._prefiller.run([part])
        except Exception as error:
            future, _ = self._jobs.pop(part[0])
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return []

    def _piece(self, job: Job, ms: float) -> Piece:
        prompt = job.prompt
        filled = self._prefiller.result(job)
        return Piece(filled, prompt.whole_length, prompt.reused, ms, prompt.told)
