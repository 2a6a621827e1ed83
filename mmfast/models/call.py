"""One call of an attached model: what hooks know of it from its first layer to its last."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch.nn import functional as F
from transformers.cache_utils import StaticLayer

from mmfast.models.lengths import is_short
from mmfast.models.locate import locate
from mmfast.models.masks import padding_of
from mmfast.models.records import features_given
from mmfast.models.sequence import Sequences
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


def make_step(hooks: Any, call: Call) -> Step:
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
    return Step(hooks.sites, sequences, past, hooks.trace, blocks)
