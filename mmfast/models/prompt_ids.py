"""The prompt's token ids while its media are encoded, for families whose layout depends on them.

Stock code encodes media without looking at the prompt. Where an image is a row of tiles and only
the prompt tells which tiles are one image, the ids are handed down here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from mmfast.models.patching import override

_IDS: ContextVar[Tensor | None] = ContextVar("prompt ids", default=None)
# The step of `generate` that encodes media before the prompt is read.
_ENCODES = "_maybe_prepare_encoder_kwargs_for_generation"


@contextmanager
def prompt_ids(ids: Tensor | None) -> Iterator[None]:
    """Media encoded inside belong to the prompts `ids` `[B, L]`; None where they are not known."""
    before = _IDS.get()
    _IDS.set(ids)
    try:
        yield
    finally:
        _IDS.set(before)


def ids_of(call: Mapping[str, Any]) -> Tensor | None:
    """Token ids `[B, L]` of the prompts whose media a call encodes, if known."""
    ids: Tensor | None = call.get("input_ids")
    return _IDS.get() if ids is None else ids


@contextmanager
def told_by_generate(model: Any) -> Iterator[None]:
    """Let the `generate` of a model tell the ids."""
    if not hasattr(model, _ENCODES):  # a base model does not generate
        yield
        return
    with override(model, _ENCODES, _around):
        yield


def _around(stock: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
    known = isinstance(inputs, Tensor) and inputs.dtype in (torch.int64, torch.int32)
    with prompt_ids(inputs if known else None):
        return stock(inputs, *args, **kwargs)
