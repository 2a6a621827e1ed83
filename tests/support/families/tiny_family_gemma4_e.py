"""Gemma 4 E: the last layers read keys of earlier ones, and all get inputs of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tiny_base import plain_mask
from tiny_family_gemma4 import FAMILY as LARGE
from tiny_family_gemma4 import build

FAMILY = replace(
    LARGE,
    build=partial(
        build,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        attention_k_eq_v=False,
        use_bidirectional_attention=None,
    ),
    mask=plain_mask,
    blocks=False,
    windowed=False,
)
