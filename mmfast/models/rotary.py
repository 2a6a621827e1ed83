"""Rotate stored keys exactly as the stock attention does, with the model's own modules."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.core.errors import ModelError
from mmfast.models.masks import kind_of
from mmfast.models.raw import RawCapture

Angles = tuple[Tensor, Tensor]  # cos and sin, each [B, n, rotated width]

_CHANGING = ("dynamic", "longrope")  # their frequencies depend on the length of the prompt


class Rotary:
    """The rotary embedding of one text model.

    Args:
        decoder: `model.get_decoder()`.

    Attributes:
        axes: Axes A of its positions: 3 under M-RoPE, else 1.

    Raises:
        ModelError: It has none, or one whose frequencies change with the length.
    """

    def __init__(self, decoder: Any) -> None:
        self._module: Any = getattr(decoder, "rotary_emb", None)
        self._config = decoder.config
        name = type(decoder).__name__
        if self._module is None:
            raise ModelError(
                f"{name} has no rotary_emb, so stored keys cannot be moved; "
                "use a model with rotary positions"
            )
        kinds = self._module.rope_type
        self._typed = isinstance(kinds, dict)
        changing = [
            kind
            for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])
            if any(part in str(kind) for part in _CHANGING)
        ]
        if changing:
            raise ModelError(
                f"{name} has rotary positions of type {changing[0]!r}, whose frequencies change "
                "with the length, so stored keys cannot be moved; use 'default', 'linear', "
                "'yarn' or 'llama3'"
            )
        self.axes = 3 if hasattr(self._module, "mrope_section") else 1

    def angles(self, positions: Tensor, like: Tensor, layer: int = 0) -> Angles:
        """Cosines and sines of positions; the same for all layers of a kind and a device.

        Args:
            positions: `[A, n]`, or `[A, B, n]` where conversations differ; int64, of any sign.
            like: Keys, for device and dtype.
            layer: Decoder layer; only matters where kinds of layers have their own frequencies.
        """
        places = positions[:, None] if positions.ndim == 2 else positions
        places = places.to(like.device)
        extra = (kind_of(self._config, layer),) if self._typed else ()
        with torch.no_grad():
            turned: Angles = self._module(like, places if self.axes > 1 else places[0], *extra)
        return turned

    def turn(self, attention: Any, keys: Tensor, angles: Angles) -> Tensor:
        """Keys `[.., H, n, d]` at these angles, by the apply function of the attention's file."""
        apply: Callable[..., tuple[Tensor, Tensor]]
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        batched = keys if keys.ndim == 4 else keys[None]
        turned = apply(batched[:, :0], batched, *angles)[1]
        return turned if keys.ndim == 4 else turned[0]

    def rotate(self, attention: Any, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys as the stock attention would cache them at other positions.

        Args:
            attention: The attention module they are of.
            keys: `[H, n, d]` or `[B, H, n, d]` before RoPE.
            positions: `[A, n]` or `[A, B, n]`.

        Returns:
            Rotated keys, bit for bit those of the stock model.
        """
        angles = self.angles(positions, keys, getattr(attention, "layer_idx", 0))
        return self.turn(attention, keys, angles)


@torch.no_grad()
def check_rotation(decoder: Any, capture: RawCapture, rotary: Rotary) -> None:
    """Run three tokens and see that captured keys, rotated, are those the model caches.

    A model that norms its keys behind RoPE, or rotates in some other way, shows here.

    Raises:
        ModelError: They are not.
    """
    weight = decoder.get_input_embeddings().weight
    steps = torch.tensor([3, 5, 17], device=weight.device)
    places = torch.stack([steps + 2 * axis for axis in range(rotary.axes)])  # [A, 3]
    cache = DynamicCache(config=decoder.config)
    with capture.recording() as raw:
        decoder(
            inputs_embeds=weight[:3][None],
            position_ids=places[:, None] if rotary.axes > 1 else places,
            past_key_values=cache,
            use_cache=True,
        )
    for layer, attention in capture.attentions.items():
        held = getattr(cache.layers[layer], "keys", None)
        keys = rotary.rotate(attention, raw.keys[layer], places)
        if held is None or held.shape != keys.shape or not torch.allclose(held, keys, 1e-3, 1e-3):
            raise ModelError(
                f"{type(attention).__name__} of layer {layer} caches keys that are not its "
                "projected keys, rotated, so stored keys cannot be moved; use a model that "
                "rotates last"
            )
