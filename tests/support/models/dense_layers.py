"""Decoder layers of an eager model, one at a time, under masks made by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]


def run(layer: Any, hidden: Tensor, mask: Tensor, places: Any) -> Tensor:
    return layer(hidden, attention_mask=additive(mask), position_embeddings=places)


def weights_of(layer: Any, hidden: Tensor, mask: Tensor, places: Any) -> Tensor:
    """Attention weights `[L, L]`, mean over heads."""
    return heads_of(layer, hidden, mask, places).mean(0)


def heads_of(layer: Any, hidden: Tensor, mask: Tensor, places: Any) -> Tensor:
    """Attention weights `[H, L, L]` of each head."""
    x = layer.input_layernorm(hidden)
    out = layer.self_attn(x, attention_mask=additive(mask), position_embeddings=places)
    weights: Tensor = out[1][0]
    return weights
