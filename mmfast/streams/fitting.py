"""Masks for layers that hold different numbers of tokens, made when each layer attends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.models.masks import stock_mask
from mmfast.models.probe import intercepting


@contextmanager
def fitting(
    config: Any, attentions: Sequence[nn.Module], embeds: Tensor, cache: Any
) -> Iterator[None]:
    """Give every layer that this thread runs the stock mask of its own length.

    How much a layer holds is known only when it attends: it may have read stored tokens a moment
    before. Positions are kept from flash attention, which takes gaps for packed sequences.

    Args:
        config: Config of the text model.
        attentions: Attention module per layer.
        embeds: What the pass runs, `[1, n, D]`.
        cache: Its cache.
    """
    thread = threading.get_ident()
    masks: dict[tuple[int, torch.device], Any] = {}
    numbers = {module: layer for layer, module in enumerate(attentions)}

    def around(call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        layer, query = numbers[module], args[0]
        key = (cache.get_seq_length(layer), query.device)
        if key not in masks:
            masks[key] = stock_mask(config, embeds.to(query.device), None, cache, layer)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = None
        if len(args) > 3:
            return call(module, *args[:3], masks[key], *args[4:], **kwargs)
        return call(module, *args, **{**kwargs, "attention_mask": masks[key]})

    with intercepting(dict.fromkeys(attentions, around)):
        yield
