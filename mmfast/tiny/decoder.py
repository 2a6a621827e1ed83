"""A lean forward pass of the stock decoder for training: same weights, same numbers, less work.

The prefix is plainly causal and the question blocks only look at it and at themselves; running
the two apart needs no big mask, and the last layer computes the questions alone.
tests/test_tiny.py compares it with the stock forward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _layer(
    layer: Any, x: Tensor, turn: tuple[Tensor, Tensor], bias: Tensor, split: int, start: int
) -> Tensor:
    """One decoder layer; only positions from `start` (0 or `split`) on come out."""
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.input_layernorm
    h = rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    heads = (h.shape[0], -1, attention.config.num_attention_heads, attention.head_dim)
    cos, sin = turn
    q = attention.q_proj(h[:, start:]).view(heads)
    q = _rotate(q, cos[:, start:], sin[:, start:]).transpose(1, 2)
    k = _rotate(attention.k_proj(h).view(heads), cos, sin).transpose(1, 2)
    v = attention.v_proj(h).view(heads).transpose(1, 2)
    parts = [scaled_dot_product_attention(q[:, :, split - start :], k, v, attn_mask=bias)]
    if start < split:
        q1, k1, v1 = (t[:, :, :split] for t in (q, k, v))
        parts.insert(0, scaled_dot_product_attention(q1, k1, v1, is_causal=True))
    mixed = torch.cat(parts, 2).transpose(1, 2).flatten(2)
    x = x[:, start:] + attention.o_proj(mixed)
    norm = layer.post_attention_layernorm
    h = rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    change: Tensor = mlp.down_proj(silu(mlp.gate_proj(h)) * mlp.up_proj(h))
    return x + change


def run_decoder(
    lm: Any, prefix: Tensor, prefix_at: Tensor, text: Tensor, text_at: Tensor, mask: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Run all layers on a prefix and the questions packed behind it.

    Args:
        lm: a Qwen2Model with as many key heads as query heads.
        prefix: embeddings of the beginning, in which each token sees the earlier ones. # [B, P, D]
        prefix_at: its position ids. # [B, P]
        text: embeddings of the packed questions. # [B, L, D]
        text_at: their position ids. # [B, L]
        mask: what the questions may look at. # bool [B, 1, L, P + L]

    Returns:
        Normalised last states of the questions [B, L, D], and the states [B, P + L, D] of all
        after each layer but the last.
    """
    split, x = prefix.shape[1], torch.cat([prefix, text], 1)
    cos, sin = lm.rotary_emb(x, torch.cat([prefix_at, text_at], 1))
    turn = (cos[:, :, None], sin[:, :, None])  # [B, P + L, 1, D / heads]
    bias = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    states = []
    for layer in lm.layers[:-1]:
        x = _layer(layer, x, turn, bias, split, 0)
        states.append(x)
    x = _layer(lm.layers[-1], x, turn, bias, split, split)
    return lm.norm(x), states
