"""A request that somebody waits for, while a worker answers it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

from mmfast.serve.engine.base import BusyError, Emit, Event, Failure, Request
from mmfast.serve.engine.place import Place

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
    place: Place
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
