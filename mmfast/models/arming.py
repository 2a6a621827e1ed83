"""Hooks that stand on a model only while some call needs them.

Reduction happens in prompts; a decode step of a hundred layers' hooks would pay for looking on.
So hooks of the layers are put in by the first call that needs them and taken out by the next one
that does not, never under a call of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from mmfast.models.patching import stand_before


class _Local(threading.local):
    depth = 0


class Arming:
    """Puts hooks in and out between calls.

    A hook may be met by a call of another thread that does not need it, so it has to leave such
    a call alone.

    Args:
        hooks: Makes the context that holds the hooks.

    Attributes:
        idle: A call has taken the hooks out. Compiled code guards on it: what is compiled without
            them is not used where they are needed. Leaving for good does not count, or else
            code would be compiled anew whenever a model is attached again.
    """

    def __init__(self, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()
        self._held: AbstractContextManager[Any] | None = None
        self._running = 0  # calls of all threads
        self._pinned = False
        self._local = _Local()
        self.idle = False

    def begin(self, needed: bool) -> None:
        """A call begins; `end` must follow, also after an exception."""
        with self._lock:
            if needed:
                self._arm()
            elif self._held is not None and not self._running and not self._pinned:
                self._disarm()
                self.idle = True
            self._running += 1
            self._local.depth += 1

    def end(self) -> None:
        """A call that may have begun in this thread ends."""
        if self._local.depth:
            with self._lock:
                self._local.depth -= 1
                self._running -= 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place at first, out for good at the end."""
        with self._lock:
            self._arm()
        try:
            yield
        finally:
            with self._lock:
                self._disarm()

    def pin(self) -> None:
        """In place until the end: calls follow that do not say what they need (compiled ones)."""
        with self._lock:
            self._pinned = True
            self._arm()

    def _arm(self) -> None:
        if self._held is None:
            held = self._hooks()
            held.__enter__()
            self._held, self.idle = held, False

    def _disarm(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            held.__exit__(None, None, None)


@contextmanager
def on_layers(
    text: Any,
    first: int,
    before: Callable[..., Any],
    key: str | None = None,
    keep: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
) -> Iterator[None]:
    """Hooks of a text model: before its layers from `first` on, before itself, after its last.

    The first two are called `key`, so that compiled code knows them again.
    """
    with ExitStack() as stack:
        for index in range(first, len(text.layers)):
            stack.callback(stand_before(text.layers[index], partial(before, index), key))
        if keep is not None:
            stack.callback(stand_before(text, keep, key))
        if after is not None:
            stack.callback(text.layers[-1].register_forward_hook(after).remove)
        yield
