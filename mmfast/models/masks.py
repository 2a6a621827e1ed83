"""Masks that fit cache layers of different lengths, made by stock code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import create_causal_mask

from mmfast.models.lengths import padding_mask


def stock_mask(config: Any, hidden: Tensor, padding: Tensor | None, cache: Any, layer: int) -> Any:
    """The mask transformers makes for one layer, from its own cache lengths.

    Args:
        config: Config of the text model.
        hidden: Input of the layer, `[B, n, D]`.
        padding: `[B, offset + keys]` False at padding, or None.
        cache: The cache, or None.
        layer: The decoder layer.
    """
    return create_causal_mask(
        config=config,
        inputs_embeds=hidden,
        attention_mask=padding,
        past_key_values=cache,
        layer_idx=layer,
    )


def fit_decode(config: Any, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
    """Give a decoder layer its own mask in a step without new visual tokens.

    Args:
        config: Config of the text model.
        layer: The decoder layer.
        hidden: Its input `[B, n, D]`.
        kwargs: Its keyword arguments; the mask is replaced in place.

    Returns:
        Whether the stock mask did not fit.
    """
    cache = kwargs.get("past_key_values")
    if cache is None or len(cache.layers) <= layer:
        return False
    held = cache.layers[layer]
    if not getattr(held, "uneven", False):
        return False
    if hidden.shape[1] == 1 and held.valid is None and not isinstance(held, StaticLayer):
        kwargs["attention_mask"] = None
    elif held.group.leader == layer or torch.compiler.is_compiling():
        seen = padding_mask(held, hidden.shape[1])
        kwargs["attention_mask"] = stock_mask(config, hidden, seen, cache, layer)
        held.group.mask = kwargs["attention_mask"]
    else:
        kwargs["attention_mask"] = held.group.mask
    return True


def padding_of(mask: Any, length: int, cache: Any) -> tuple[Tensor | None, Tensor | None]:
    """Padding in the mask that a call came with.

    Args:
        mask: None, `[B, P + L]`, or what `generate` makes for a static cache: 4-D, or a dict.
        length: New tokens L.
        cache: The cache, or None.

    Returns:
        False at padding: among the tokens of earlier calls `[B, P]`, and among the new ones
        `[B, L]`; None where there is none.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention", next(iter(mask.values())))
    if mask is None:
        return None, None
    past = 0 if cache is None else int(cache.get_seq_length())
    if mask.ndim == 4:  # the last query sees all that is no padding
        past -= getattr(cache.layers[0], "dropped", 0) if cache is not None else 0
        seen = (mask if mask.dtype == torch.bool else mask == 0)[:, 0, -1, : past + length]
    else:
        seen = mask[:, -(past + length) :].bool()
    new, old = seen[:, -length:], seen[:, :-length]
    return None if bool(old.all()) else old, None if bool(new.all()) else new
