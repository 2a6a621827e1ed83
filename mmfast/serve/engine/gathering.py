"""Encoding as a service of its own: prepared requests in, embeddings out, several at a time."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

from mmfast.serve.engine.encoder import Encoder
from mmfast.serve.engine.parts import Embedded, Prepared

_Call = tuple[Prepared, "Future[Embedded]"]


class Gathering:
    """Runs an `Encoder` in a thread; what came while it was at work is encoded together.

    Args:
        encoder: What is run; others may have it write prompts meanwhile.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
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
        while (first := self._calls.get()) is not None:
            calls = [first, *self._more()]
            wanted = [each for each in calls if each[1].set_running_or_notify_cancel()]
            try:
                self._encode(wanted)
            except Exception as error:
                for _, future in wanted:
                    if not future.done():
                        future.set_exception(error)

    def _more(self) -> list[_Call]:
        found: list[_Call] = []
        while not self._calls.empty():
            call = self._calls.get()
            if call is None:
                self._calls.put(None)
                break
            found.append(call)
        return found

    def _encode(self, calls: list[_Call]) -> None:
        for step in self.encoder.steps([prepared for prepared, _ in calls]):
            if step is None:
                continue
            number, result = step
            if isinstance(result, Exception):
                calls[number][1].set_exception(result)
            else:
                calls[number][1].set_result(result)
