"""The decoder on streams, for training: what a session of endless video computes, densely.

Frames see earlier frames (all of them, or a window); questions see keys that may have been moved
to other positions than those at which the frames were computed, in each layer others, as a
session moves retrieved frames between its sinks and its window. Keys before RoPE come out too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


@dataclass(frozen=True)
class StreamLayout:
    """Where everything is and who sees it.

    Attributes:
        at: Positions of the prefix while it is computed. `[B, P]`
        own: Added to the prefix's attention scores; -inf = not seen. `[P, P]`
        moved: Per layer the positions of the prefix for the questions. `[B, P]`
        text_at: Positions of the questions. `[B, L]`
        seen: Per layer added to the questions' scores on prefix and questions. `[B, 1, L, P + L]`
    """

    at: Tensor
    own: Tensor
    moved: list[Tensor]
    text_at: Tensor
    seen: list[Tensor]


@dataclass(frozen=True)
class DecoderOutput:
    """Normalised last states of the questions `[B, L, D]`, states of the prefix after each layer
    but the last `[B, P, D]`, and of every layer the prefix's keys `[B, P, D]` and the questions'
    queries `[B, L, D]` before RoPE.
    """

    states: Tensor
    layers: list[Tensor]
    keys: list[Tensor]
    queries: list[Tensor]


def run_stream(lm: Any, prefix: Tensor, text: Tensor, layout: StreamLayout) -> DecoderOutput:
    """Run all layers: prefix `[B, P, D]`, questions packed behind it `[B, L, D]`."""
    split, x = prefix.shape[1], torch.cat([prefix, text], 1)
    own_turn, text_turn = _turn(lm, x, layout.at), _turn(lm, x, layout.text_at)
    layers, keys, queries = [], [], []
    for number, layer in enumerate(lm.layers):
        attention, mlp = layer.self_attn, layer.mlp
        h = _normed(x, layer.input_layernorm)
        q, k = attention.q_proj(h), attention.k_proj(h)
        keys.append(k[:, :split])
        queries.append(q[:, split:])
        q, k, v = (
            t.unflatten(-1, (-1, attention.head_dim)) for t in (q, k, attention.v_proj(h))
        )  # [B, P + L, heads, d]
        moved = _turn(lm, x, layout.moved[number])
        known = torch.cat([_rotate(k[:, :split], moved), _rotate(k[:, split:], text_turn)], 1)
        asked = _attend(_rotate(q[:, split:], text_turn), known, v, layout.seen[number])
        last = number == len(lm.layers) - 1
        if last:
            x, mixed = x[:, split:], asked
        else:
            mine, theirs = (_rotate(t[:, :split], own_turn) for t in (q, k))
            mixed = torch.cat([_attend(mine, theirs, v[:, :split], layout.own), asked], 1)
        x = x + attention.o_proj(mixed)
        h = _normed(x, layer.post_attention_layernorm)
        x = x + mlp.down_proj(silu(mlp.gate_proj(h)) * mlp.up_proj(h))
        if not last:
            layers.append(x[:, :split])
    return DecoderOutput(lm.norm(x), layers, keys, queries)


def _normed(x: Tensor, norm: Any) -> Tensor:
    return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)


def _turn(lm: Any, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = lm.rotary_emb(x, at)
    return cos[:, :, None], sin[:, :, None]  # [B, n, 1, d]


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
