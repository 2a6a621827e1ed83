"""One call of an attached model: what hooks know of it from its first layer to its last."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mmfast.models.lengths import is_short
from mmfast.models.step import Step


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
        self.step: Step | None = None
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


def length_of(kwargs: Mapping[str, Any]) -> int:
    """Tokens per row that a call of the base model brings."""
    ids = kwargs.get("input_ids")
    return int((kwargs["inputs_embeds"] if ids is None else ids).shape[1])
