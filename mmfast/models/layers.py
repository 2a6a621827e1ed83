"""Kinds of decoder layers."""

from __future__ import annotations

from typing import Any

# Decoder layers that can hold reduced tokens. A sliding window counts the tokens that are left,
# a convolution runs over them; both as the stock model does on the shortened prompt.
FULL, SLIDING, CONV = LAYER_KINDS = ("full_attention", "sliding_attention", "conv")


def kind_of(config: Any, layer: int) -> str:
    """Kind of a decoder layer, `full_attention` where the config of the text model says nothing."""
    kinds = getattr(config, "layer_types", None)
    return str(kinds[layer]) if kinds else FULL
