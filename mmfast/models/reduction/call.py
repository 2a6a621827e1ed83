"""The forward pass at hand, and hooks that are in place only while a pass needs them.

Reduction happens in prompts; in a decode step hooks on a hundred layers would only cost time. A
pass that needs the hooks of the layers puts them in, and the next one that does not takes them out,
never under a pass of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers.cache_utils import StaticLayer

from mmfast.models.patching import stand_before
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.step import ForwardStep


class Call:
    """One call of the base model that brings visual tokens, or several tokens to a short cache.

    `past` counts tokens of earlier calls (the cache itself counts on as soon as a layer has run);
    `step` is made from `kwargs` at the first decoder layer; `given` are arguments of the text
    model, where a site looks ahead; `stack` is closed when the call ends.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs: Mapping[str, Any] | None = kwargs
        cache = kwargs.get("past_key_values")
        self.past = 0 if cache is None else int(cache.get_seq_length())
        self.step: ForwardStep | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.stack = ExitStack()


@dataclass(frozen=True)
class PromptPart:
    """The part of a prompt that one call of the model brings.

    `drafts` of its tokens stand behind the prompt and may be taken back; `rest` tokens come later.
    """

    drafts: int = 0
    rest: int = 0
    first: bool = True

    @property
    def last(self) -> bool:
        """The prompt ends here."""
        return self.rest == 0


class PassState(threading.local):
    """The pass that each thread is in; all hooks of one attached model share it.

    There is no `call` in a plain decode step, no `part` in any decode step or without a KV policy.
    `cache` is set while a KV policy is at work, `active` where keys and values are stored, too.
    `left` are the tokens that the latest call left (`training.Remainder`), None where all stayed.
    """

    call: Call | None = None
    part: PromptPart | None = None
    cache: Any = None
    active = False
    left: Any = None

    @property
    def padding(self) -> Tensor | None:
        """`[B, n]` False at padding of the new tokens; None where there is none."""
        return None if self.call is None or self.call.step is None else self.call.step.sequences.ok

    @property
    def has_media(self) -> bool:
        """The pass brings visual tokens."""
        return (
            self.call is not None
            and self.call.step is not None
            and bool(self.call.step.sequences.items)
        )


def apply(function: Any, *args: Any) -> Any:
    """`function(*args)`, for `torch.compiler.disable`."""
    return function(*args)


def is_shortened(cache: Any) -> bool:
    """Some layer of the cache was reduced."""
    return cache is not None and any(is_short(layer) for layer in cache.layers)


def needs_layers(cache: Any) -> bool:
    """A decode step must give some layer of the cache a mask of its own."""
    return cache is not None and any(getattr(layer, "uneven", False) for layer in cache.layers)


def is_static(cache: Any) -> bool:
    """The cache is written in place, as compiled decoding needs it."""
    return cache is not None and bool(cache.layers) and isinstance(cache.layers[0], StaticLayer)


def length_of(kwargs: Mapping[str, Any]) -> int:
    """Tokens per row that a call of the base model brings."""
    ids = kwargs.get("input_ids")
    return int((kwargs["inputs_embeds"] if ids is None else ids).shape[1])


class _ArmedState(threading.local):
    depth = 0


class Arming:
    """Puts hooks in and out between calls.

    A hook may be met by a call of another thread that does not need it, so it has to leave such a
    call alone. `idle` is True when a call has taken the hooks out: compiled code guards on it.
    Leaving for good does not count, or else code would be compiled anew at every `attach`.
    """

    def __init__(self, hooks: Callable[[], AbstractContextManager[Any]]) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()
        self._held: AbstractContextManager[Any] | None = None
        self._running = 0  # calls of all threads
        self._pinned = False
        self._local = _ArmedState()
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
