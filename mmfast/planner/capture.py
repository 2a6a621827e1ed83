"""The arguments a module really gets: run the model up to it, take them, and stop there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmfast.models.timing import Clock, timed


class _ReachedError(Exception):
    """The module was reached; nothing behind it needs to run."""


@dataclass
class Reached:
    """A call that was caught.

    Attributes:
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        ms: Milliseconds until it came.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ms: float

    @property
    def hidden(self) -> Tensor:
        """The first tensor among the arguments: what the module works on."""
        found = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor)]
        return found[0]

    def rows(self, count: int) -> Reached:
        """The same call for the first `count` rows of the batch."""
        batch = self.hidden.shape[0]

        def cut(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == batch:
                return value[:count]
            return value

        args = tuple(map(cut, self.args))
        return Reached(args, {k: cut(v) for k, v in self.kwargs.items()}, self.ms)


def reach(
    module: nn.Module, run: Callable[[], Any], clock: Clock = time.perf_counter
) -> Reached | None:
    """Call `run` until it calls `module` in this thread; None where it never does.

    The model is as before afterwards, and other threads pass through undisturbed.
    """
    me, found = threading.get_ident(), list[Reached]()

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() == me:
            found.append(Reached(args, kwargs, 0.0))
            raise _ReachedError

    def attempt() -> None:
        with contextlib.suppress(_ReachedError):
            run()

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        _, ms = timed(attempt, clock)
    finally:
        handle.remove()
    if not found:
        return None
    found[0].ms = ms
    return found[0]
