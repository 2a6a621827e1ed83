"""Cache layers of short convolutions, which run over the tokens that are left.

Rows of a batch that are left with different numbers of tokens get padding in front of the new
ones. At the start of a prompt that is what the convolution expects; later it would part the new
tokens from those the layer remembers, so the padding is moved in front of what is remembered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from mmfast.core.errors import ModelError


class _Joined:
    """Mixed into the class of the convolution layers of one cache; other caches never see it.

    Attributes:
        gaps: `[B]` padding in front of the tokens that come next, or None.
    """

    gaps: Tensor | None = None

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        held: Any = super()
        gaps, self.gaps = self.gaps, None
        joins = gaps is not None and self.has_previous_state[state_idx]  # type: ignore[attr-defined]
        states: Tensor = held.update_conv_state(conv_states, state_idx, **kwargs)  # [B, D, S + n]
        if not joins:
            return states
        assert gaps is not None
        states = _padding_first(states, states.shape[-1] - conv_states.shape[-1], gaps)
        self._store(states, state_idx)
        return states

    def _store(self, states: Tensor, state_idx: int) -> None:
        layer: Any = self
        if layer.record_past:
            layer.conv_states[state_idx] = states
        else:  # copied, because a static cache must keep its addresses
            kernel = layer.conv_kernel_size[state_idx]
            layer.conv_states[state_idx].copy_(states[..., -kernel:])


_CLASSES: dict[type, type] = {}


def join(cache: Any, index: int, ok: Tensor | None) -> None:
    """Let convolution layer `index` of `cache` step over padding in front of the next tokens.

    Args:
        cache: A cache made for the model.
        index: The layer.
        ok: `[B, n]` False at padding of the next tokens, or None.

    Raises:
        ModelError: The cache has no convolution layer there.
    """
    layer = cache.layers[index] if index < len(cache.layers) else None
    if not isinstance(layer, LinearAttentionLayer):
        raise ModelError(
            f"cache layer {index} is a {type(layer).__name__}, but the model's layer is a "
            "convolution; pass DynamicCache(config=model.config), or no cache"
        )
    if ok is None:
        return
    if not isinstance(layer, _Joined):
        kind = type(layer)
        if kind not in _CLASSES:
            _CLASSES[kind] = type(f"Joined{kind.__name__}", (_Joined, kind), {"_layer_type": None})
        joined: Any = object.__new__(_CLASSES[kind])
        joined.__dict__ = layer.__dict__  # the same tensors, now and later
        cache.layers[index] = layer = joined
    layer.gaps = (~ok).sum(1)


def _padding_first(states: Tensor, held: int, gaps: Tensor) -> Tensor:
    """Exchange the `held` states `[B, D, held + n]` of each row with the padding after them."""
    places = torch.arange(states.shape[-1], device=states.device)[None]  # [1, S]
    gaps = gaps.to(states.device)[:, None]
    moved = torch.where(places < gaps + held, places - gaps, places)
    order = torch.where(places < gaps, held + places, moved)  # [B, S]
    return states.gather(-1, order[:, None].expand_as(states))
