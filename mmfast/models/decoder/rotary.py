"""Rotate stored keys exactly as the stock attention does, with the model's own modules.

Keys and queries before RoPE are read off the stock attention while it runs, by forward hooks on the
last module that makes them: `k_norm` where there is one, else `k_proj`. A hook only writes where
the thread that runs the model asked for it, so other threads see no difference.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE
from mmfast.models.wrappers import attention_at, kind_of, layers_of, position_axes

_KEYS = ("k_norm", "k_layernorm", "key_layernorm", "k_proj")
_QUERIES = ("q_norm", "q_layernorm", "query_layernorm", "q_proj")
_FUSED = "qkv_proj"  # queries, keys and values side by side


@dataclass(eq=False)
class Raw:
    """Keys and queries of a thread's last pass before RoPE: decoder layer to `[B, H, n, d]`."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    queries: dict[int, Tensor] = field(default_factory=dict)


class RawCapture:
    """Hooks on every attention layer of a text model; they stay until `remove`.

    Layers without `self_attn` (convolutions) are passed over; `attentions` maps the others to their
    modules. ModelError where there is none, or one does not show its keys before RoPE.
    """

    def __init__(self, decoder: Any) -> None:
        self._local = threading.local()
        self.attentions: dict[int, Any] = attentions(decoder)
        sites = [site for i, a in self.attentions.items() for site in _sites(i, a)]
        self._handles = [
            module.register_forward_hook(partial(self._note, name, layer, read))
            for module, name, layer, read in sites
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_local": None}  # a copy of the model has a copy of its hooks

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _local=threading.local())

    @contextmanager
    def recording(self) -> Iterator[Raw]:
        """Record what this thread runs into the `Raw` that is given; recordings may be nested."""
        raw = Raw()
        stack: list[Raw] = self._local.__dict__.setdefault("stack", [])
        stack.append(raw)
        try:
            yield raw
        finally:
            stack.remove(raw)

    def remove(self) -> None:
        """Take all hooks off the model; a second time does nothing."""
        while self._handles:
            self._handles.pop().remove()

    def _note(
        self,
        name: str,
        layer: int,
        read: Callable[[Tensor], Tensor],
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,
    ) -> None:
        stack: list[Raw] | None = self._local.__dict__.get("stack")
        if not stack:
            return
        heads = _heads_first(read(output), args[0], self.attentions[layer].head_dim)
        for raw in stack:
            getattr(raw, name)[layer] = heads


def attentions(decoder: Any) -> dict[int, nn.Module]:
    """Decoder layer to its attention module; ModelError where the decoder has none."""
    found = {i: attention_at(decoder, i) for i in range(len(layers_of(decoder)))}
    found = {i: module for i, module in found.items() if module is not None}
    if not found:
        raise ModelError(
            f"{type(decoder).__name__} has no layers with self_attn, so its keys cannot be read; "
            "give model.get_decoder() of a transformers vision-language model"
        )
    return found


_Site = tuple[nn.Module, str, int, Callable[[Tensor], Tensor]]


def _sites(layer: int, attention: Any) -> Iterator[_Site]:
    """Places in a layer where its keys and queries appear, and their readers."""
    if not hasattr(attention, "head_dim"):
        raise _unreadable(layer, attention, "head_dim")
    fused = getattr(attention, _FUSED, None)
    if isinstance(fused, nn.Module):
        if not hasattr(attention.config, "num_key_value_heads"):
            raise _unreadable(layer, attention, "num_key_value_heads")
        key = attention.config.num_key_value_heads * attention.head_dim
        query = attention.config.num_attention_heads * attention.head_dim
        yield fused, "queries", layer, partial(_slice, 0, query)
        yield fused, "keys", layer, partial(_slice, query, key)
        return
    for name, choices in (("keys", _KEYS), ("queries", _QUERIES)):
        modules = (getattr(attention, choice, None) for choice in choices)
        found = next((m for m in modules if isinstance(m, nn.Module)), None)
        if found is None:
            raise _unreadable(layer, attention, f"{choices[-1]} or {_FUSED}")
        yield found, name, layer, _whole


def _unreadable(layer: int, attention: Any, missing: str) -> ModelError:
    return ModelError(
        f"{type(attention).__name__} of layer {layer} has no {missing}, so its keys before RoPE "
        "cannot be read; use a model whose attention has k_proj and q_proj"
    )


def _whole(output: Tensor) -> Tensor:
    return output


def _slice(start: int, length: int, output: Tensor) -> Tensor:
    return output.narrow(-1, start, length)


def _heads_first(output: Tensor, given: Tensor, width: int) -> Tensor:
    """`[B, H, n, d]` of what a projection `[B, n, H*d]` or a norm per head returned."""
    if output.ndim == 3:
        return output.view(*output.shape[:-1], -1, width).transpose(1, 2)
    # A norm stands before or after the transposition; it got a view of the projection, whose
    # strides tell tokens (far apart) from heads (side by side). One head is side by side with none.
    near, far = given.stride(1), given.stride(2)
    first = near < far or (near == far and output.shape[1] == 1)
    return output if first else output.transpose(1, 2)


Angles = tuple[Tensor, Tensor]  # cos and sin, each [B, n, rotated width]

_CHANGING = ("dynamic", "longrope")  # their frequencies depend on the length of the prompt


class Rotary:
    """The rotary embedding of one text model; its positions have 3 `axes` under M-RoPE, else 1.

    ModelError where it has none, or one whose frequencies change with the length. Without `moves`
    it gives angles alone, also those of GPT-J, whose layers turn keys in a way of their own.
    """

    def __init__(self, decoder: Any, moves: bool = True) -> None:
        self._module: Any = getattr(decoder, "rotary_emb", None)
        self._config = decoder.config
        name, kinds = type(decoder).__name__, getattr(self._module, "rope_type", None)
        if self._module is None or (moves and kinds is None):
            raise ModelError(
                f"{name} has no rotary_emb, so stored keys cannot be moved; "
                "use a model with rotary positions"
            )
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
        self.axes = position_axes(decoder)
        self.most: int | None = getattr(self._module, "max_positions", None)  # GPT-J has a table

    def angles(self, positions: Tensor, like: Tensor, layer: int = 0) -> Angles:
        """Cosines and sines of positions `[A, n]`, or `[A, B, n]` where conversations differ.

        They are the same for all layers of a kind and a device; `like` gives device and dtype, and
        `layer` only matters where kinds of layers have their own frequencies.
        """
        places = positions[:, None] if positions.ndim == 2 else positions
        places = places.to(like.device)
        if self.most is not None:
            places = places.clamp(max=self.most - 1)
        extra = (kind_of(self._config, layer),) if self._typed else ()
        with torch.no_grad():
            turned: Angles = self._module(like, places if self.axes > 1 else places[0], *extra)
        return turned

    def turn(self, attention: Any, keys: Tensor, angles: Angles) -> Tensor:
        """Keys `[.., H, n, d]` at these angles, by the apply function of the attention's file."""
        apply: Callable[..., tuple[Tensor, Tensor]]
        apply = sys.modules[type(attention).__module__].apply_rotary_pos_emb
        batched = keys if keys.ndim == 4 else keys[None]
        width = getattr(attention, "rotary_ndims", batched.shape[-1])  # Phi turns a part of a head
        part, rest = batched[..., :width], batched[..., width:]
        turned = torch.cat([apply(part[:, :0], part, *angles)[1], rest], -1)
        return turned if keys.ndim == 4 else turned[0]

    def rotate(self, attention: Any, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys rotated to positions `[A, (B,) n]`, bit for bit those of the stock model."""
        angles = self.angles(positions, keys, getattr(attention, "layer_idx", 0))
        return self.turn(attention, keys, angles)


@torch.no_grad()
def check_rotation(decoder: Any, capture: RawCapture, rotary: Rotary) -> None:
    """Run three tokens and see that captured keys, rotated, are those the model caches.

    ModelError for a model that norms its keys behind RoPE, or rotates in some other way.
    """
    weight = decoder.get_input_embeddings().weight
    steps = torch.tensor([3, 5, 17], device=weight.device)
    places = torch.stack([steps + 2 * axis for axis in range(rotary.axes)])  # [A, 3]
    cache = DynamicCache(config=decoder.config)
    # In the precision of the weights: what autocast rounds is not rotated otherwise.
    plain = torch.autocast(weight.device.type, enabled=False)
    with capture.recording() as raw, plain:
        decoder(
            inputs_embeds=weight[:3][None],
            position_ids=places[:, None] if rotary.axes > 1 else places,
            **{CACHE: cache},
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
