"""Encoding as a service of its own: prepared requests in, embeddings out, several at a time."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from mmfast.serve.engine.encoder import Encoder, Result
from mmfast.serve.engine.parts import Embedded, Prepared

SLICE = 0.1  # seconds of the tower between two looks at what came
_Call = tuple[Prepared, "Future[Embedded]"]


class Gathering:
    """Runs an `Encoder` in a thread; what came while it was at work is encoded together.

    Requests without media pass those with some, between two slices of a call of the tower.

    Args:
        encoder: What is run; others may have it write prompts meanwhile.
    """

    def __init__(self, encoder: Encoder) -> None:
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
