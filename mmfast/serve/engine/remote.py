"""Encoding for an engine in one process, done by workers in others."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmfast.core.errors import MmfastError
from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import Media
from mmfast.serve.engine.encoder import Encoder, Result, Steps
from mmfast.serve.engine.moving import moved
from mmfast.serve.engine.parts import Prepared

PAUSE = 0.0005  # seconds that an engine with nothing else to do waits for an encoder at a time


class LostError(RuntimeError):
    """The worker that encoded is gone."""


class RemoteEncoder(Encoder):
    """An `Encoder` that writes prompts here and has media encoded elsewhere.

    While it waits, the engine goes on decoding. Prompts without media are embedded here.

    Args:
        model: As of `Encoder`.
        processor: As of `Encoder`.
        memory: As of `Encoder`.
        ask: `ask(call, prepared)` sends a request off; its result comes to `told`.

    Attributes:
        lost: Ids of requests whose encoder died.
    """

    def __init__(
        self, model: Any, processor: Any, memory: int, ask: Callable[[str, Prepared], None]
    ) -> None:
        super().__init__(model, processor, memory)
        self._ask, self._numbers = ask, itertools.count()
        self._results: dict[str, Result | None] = {}
        self._some = threading.Condition()
        self.lost: set[str] = set()

    def steps(self, batch: Sequence[Prepared]) -> Steps:
        """See `Encoder.steps`; it pauses while others encode."""
        calls = {self._send(each): i for i, each in enumerate(batch) if each.media}
        here = [i for i, each in enumerate(batch) if not each.media]
        for step in super().steps([batch[i] for i in here]):
            yield None if step is None else (here[step[0]], step[1])
        try:
            while calls:
                found = self._found(calls)
                for call, result in found.items():
                    number = calls.pop(call)
                    if isinstance(result, LostError):
                        self.lost.add(batch[number].request.id)
                    yield number, result
                if not found:
                    yield None
        finally:  # nobody waits any more: what still comes is not kept
            with self._some:
                for call in calls:
                    self._results.pop(call, None)

    def told(self, call: str, result: Result) -> None:
        """A result, or why there is none; of any thread."""
        with self._some:
            if call in self._results:
                known = isinstance(result, Exception)
                self._results[call] = result if known else moved(result, self.model.device)
                self._some.notify()

    def _send(self, prepared: Prepared) -> str:
        key = "/".join(each.key for mine in prepared.media.values() for each in mine)
        # The process is part of the name: what another one of the same place asked for is not ours.
        call = f"{os.getpid()}-{next(self._numbers)}:{zlib.crc32(key.encode())}"
        with self._some:
            self._results[call] = None
        try:
            self._ask(call, slim(prepared))
        except MmfastError as error:  # no room for it on the way
            self.told(call, error)
        return call

    def _found(self, calls: Collection[str]) -> dict[str, Result]:
        """Results that are here, if need be after a short wait."""

        def here() -> dict[str, Result]:
            known = {call: self._results[call] for call in calls}
            return {call: result for call, result in known.items() if result is not None}

        with self._some:
            found = self._some.wait_for(here, PAUSE)
            for call in found:
                del self._results[call]
            return found


def slim(prepared: Prepared) -> Prepared:
    """The same without the pictures as they came: encoders read the processor's pixels."""
    media = {
        kind: tuple(Media(_hollow(each.shot), each.key) for each in mine)
        for kind, mine in prepared.media.items()
    }
    return replace(prepared, request=replace(prepared.request, messages=()), media=media)


def _hollow(shot: Shot) -> Shot:
    return Shot(shot.kind, np.zeros((0, 0, 3), np.uint8))
