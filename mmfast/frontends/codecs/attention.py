"""A transformer with a sliding window on an endless stream.

Keys are kept unrotated and rotated to their place in the window at every step: attention depends on
distances only, so no number grows with the length of the stream.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmfast.core.kv import KVBlock
from mmfast.frontends.codecs.layers import CodecLayer
from mmfast.ops.stream_cache import empty


class Transformer(CodecLayer):
    """Mimi's transformer, `[B, C, t]` to `[B, C, t]`; its modules are used as they are.

    Its state holds the last keys, before rotation, and values; `advance` `[B]` counts those of them
    that belong to the stream.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, list(model.layers)
        self.past = int(model.config.sliding_window) - 1  # beside the query itself

    def start(self, batch: int) -> KVBlock:
        """Return an empty window, which has its full size from the start."""
        attention = self.layers[0].self_attn
        weight = attention.k_proj.weight
        shape = (batch, attention.num_key_value_heads, self.past, attention.head_dim)
        zeros = tuple(weight.new_zeros(shape) for _ in self.layers)
        return replace(empty(batch, weight.device), keys=zeros, values=zeros)

    def step(self, state: KVBlock, x: Tensor) -> tuple[KVBlock, Tensor]:
        """Run `[B, C, t]` through all layers; each moment sees the window that ends with it."""
        n = x.shape[-1]
        if not n:
            return state, x
        hidden = x.transpose(1, 2)  # [B, t, C]
        places = torch.arange(self.past + n, device=x.device)
        turn = self.model.rotary_emb(hidden, places[None])
        mask = self._mask(state.advance, places, n)
        keys, values = [], []
        for layer, k, v in zip(self.layers, state.keys, state.values, strict=True):
            hidden, k, v = _layer(layer, hidden, k, v, turn, mask)
            keys.append(k[:, :, n:])
            values.append(v[:, :, n:])
        seen = (state.advance + n).clamp(max=self.past)
        state = KVBlock(tuple(keys), tuple(values), state.relative, seen)
        return state, hidden.transpose(1, 2)

    def _mask(self, seen: Tensor, places: Tensor, n: int) -> Tensor:
        """`[B, 1, n, past + n]`: causal, inside the window, of this stream."""
        query = places[self.past :, None]
        near = (places <= query) & (places >= query - self.past)
        own = places >= self.past - seen[:, None]  # [B, past + n]
        return (near[None] & own[:, None])[:, None]


def _layer(
    layer: Any, x: Tensor, past_k: Tensor, past_v: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    inner = layer.self_attn
    normed = layer.input_layernorm(x)
    heads = (*x.shape[:2], -1, inner.head_dim)
    q, k, v = (
        project(normed).view(heads).transpose(1, 2)
        for project in (inner.q_proj, inner.k_proj, inner.v_proj)
    )
    keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    cos, sin = turn
    n = x.shape[1]
    out = functional.scaled_dot_product_attention(
        _rotate(q, cos[:, -n:], sin[:, -n:]),
        _rotate(keys, cos, sin),
        values,
        attn_mask=mask,
        scale=inner.scaling,
        enable_gqa=inner.num_key_value_groups > 1,
    )
    out = inner.o_proj(out.transpose(1, 2).flatten(2))
    x = x + layer.self_attn_layer_scale(out)
    return x + layer.mlp_layer_scale(layer.mlp(layer.post_attention_layernorm(x))), keys, values


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: the two halves of a head are the two coordinates."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]
