"""One call of an attached model: what hooks know of it from its first layer to its last.

Hooks that stand on a model only while some call needs them.

Reduction happens in prompts; a decode step of a hundred layers' hooks would pay for looking on.
So hooks of the layers are put in by the first call that needs them and taken out by the next one
that does not, never under a call of another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from torch.nn import functional as F
from transformers.cache_utils import StaticLayer

from mmfast.models.patching import stand_before
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.masks import padding_of
from mmfast.models.reduction.record import features_given
from mmfast.models.reduction.sequence import Sequences, locate
from mmfast.models.reduction.step import ForwardStep


class Call:
    """One call of the base model that brings visual tokens, or several tokens to a short cache.

    Attributes:
        kwargs: Arguments of the base model, until the step is made from them.
        past: Tokens of earlier calls; the cache itself counts on as soon as a layer has run.
        step: Its state from the first decoder layer on.
        given: Arguments of the text model, where a site looks ahead.
        stack: Closed when the call ends.
    """

    def __init__(self, kwargs: Mapping[str, Any]) -> None:
        self.kwargs: Mapping[str, Any] | None = kwargs
        cache = kwargs.get("past_key_values")
        self.past = 0 if cache is None else int(cache.get_seq_length())
        self.step: ForwardStep | None = None
        self.given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.stack = ExitStack()


class Local(threading.local):
    """The call that each thread is in."""

    call: Call | None = None


def apply(function: Any, *args: Any) -> Any:
    """`function(*args)`, for `torch.compiler.disable`."""
    return function(*args)


def is_shortened(cache: Any) -> bool:
    """Whether some layer of the cache was reduced."""
    return cache is not None and any(is_short(layer) for layer in cache.layers)


def needs_layers(cache: Any) -> bool:
    """Whether a decode step must give some layer of the cache a mask of its own."""
    return cache is not None and any(getattr(layer, "uneven", False) for layer in cache.layers)


def is_static(cache: Any) -> bool:
    """Whether the cache is written in place, as compiled decoding wants it."""
    return cache is not None and bool(cache.layers) and isinstance(cache.layers[0], StaticLayer)


def length_of(kwargs: Mapping[str, Any]) -> int:
    """Tokens per row that a call of the base model brings."""
    ids = kwargs.get("input_ids")
    return int((kwargs["inputs_embeds"] if ids is None else ids).shape[1])


def make_step(hooks: Any, call: Call) -> ForwardStep:
    """The state of a call from its first decoder layer on.

    Args:
        hooks: Of the attached model (`models.hooks.Hooks`).
        call: Its arguments are used up.
    """
    kwargs = call.kwargs
    assert kwargs is not None
    call.kwargs = None
    length, cache = length_of(kwargs), kwargs.get("past_key_values")
    past, ok = padding_of(kwargs.get("attention_mask"), length, call.past, cache)
    if features_given(kwargs):
        strict = bool(hooks.sites)
        sequences = locate(hooks.base, hooks.adapter, kwargs, hooks.recorder, ok, strict)
    else:
        sequences = Sequences(length, [], [], [], ok)
    blocks = hooks.adapter.blocks(kwargs)
    if blocks is not None:  # read by position, as the stock model does
        blocks = blocks[:, call.past : call.past + length]
        blocks = F.pad(blocks, (0, length - blocks.shape[1]), value=-1)
    return ForwardStep(hooks.sites, sequences, past, hooks.trace, blocks)


class _ArmedState(threading.local):
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
