"""The layers of a Llama-like decoder, run without the Python code between their modules.

A decoding step of a small model, or of any model on a GPU, waits for Python more than for numbers.
The linear layers, the activation and the rotary table are called as they are, so adapters, packed
weights and hooks on them act as ever; norms, rotation and residuals are written out. A model is run
so only if a trial gives the same numbers as its own code, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.models.gated import PARTS, gated
from mmfast.models.patching import is_hooked
from mmfast.models.wrappers import position_axes
from mmfast.ops.attention import rotate

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEADS = {"q_norm", "k_norm"}
_TRIAL = 3  # tokens of a row in a trial

# runs embeddings `[B, n, D]` with positions `[A, B, n]` through a decoder
Run = Callable[[Tensor, Tensor], Tensor]
# (layer, queries, keys, values `[B, heads, n, d]`) -> `[B, n, H, d]`
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# (layer, what runs it, hidden states, position_embeddings=…) -> hidden states
Around = Callable[..., Any]


class LeanDecoder:
    """A decoder of pre-norm layers with gated linear units and rotary positions."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.layers = decoder, list(decoder.layers)
        self._norm = _fused if _fuses(decoder.norm) else _called
        bypassed = (m for each in self.layers for m in (each, each.self_attn, each.mlp))
        norms = (n for each in self.layers for n in (each.input_layernorm, _behind(each)))
        self._bypassed = [decoder, *bypassed, decoder.norm, *norms]

    @property
    def free(self) -> bool:
        """Nobody has hooks on the modules whose own code is not run."""
        return not any(map(is_hooked, self._bypassed))

    def run(
        self, attend: LayerAttend, embeds: Tensor, positions: Tensor, around: Around | None = None
    ) -> Tensor:
        """Return the last hidden states `[B, n, D]`; positions are `[A, B, n]`."""
        hidden, places = embeds, positions if len(positions) > 1 else positions[0]
        turns = tuple(each.unsqueeze(1) for each in self.decoder.rotary_emb(hidden, places))
        for index in range(len(self.layers)):
            layer = partial(self._layer, attend, index)
            if around is None:
                hidden = layer(hidden, turns)
            else:
                hidden = around(index, layer, hidden, position_embeddings=turns)
        return self._norm(self.decoder.norm, hidden)

    def _layer(
        self,
        attend: LayerAttend,
        index: int,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, ...],
    ) -> Tensor:
        layer, (cos, sin) = self.layers[index], position_embeddings
        query, key, value = _heads(layer.self_attn, self._norm(layer.input_layernorm, hidden))
        both = rotate(torch.cat((query, key), 1), cos, sin)
        query, key = both.split((query.shape[1], key.shape[1]), 1)
        found = attend(index, query, key, value).flatten(2)
        hidden = hidden + layer.self_attn.o_proj(found)
        more: Tensor = gated(layer.mlp, self._norm(_behind(layer), hidden))
        return hidden + more


@torch.inference_mode()
def lean_decoder(decoder: Any, stock: Run, attend: LayerAttend) -> LeanDecoder | None:
    """Return the lean form of a decoder if it gives what `stock` gives with this attention."""
    if not _alike(decoder):
        return None
    lean, weight = LeanDecoder(decoder), decoder.norm.weight
    draws = torch.Generator().manual_seed(0)
    axes = position_axes(decoder)
    embeds = torch.randn(2, _TRIAL, len(weight), generator=draws).to(weight)
    positions = torch.randint(0, 99, (axes, 2, _TRIAL), generator=draws).to(weight.device)
    expected = stock(embeds, positions)
    try:
        found = lean.run(attend, embeds, positions)
    except Exception:  # parts of these names that are put together in another way
        return None
    return lean if lean.free and torch.equal(found, expected) else None


def _alike(decoder: Any) -> bool:
    parts = {name for name, _ in decoder.named_children()}
    return {"layers", "norm", "rotary_emb"} <= parts and all(map(_layer_alike, decoder.layers))


def _layer_alike(layer: Any) -> bool:
    if _names(layer) != _LAYER or _names(layer.mlp) != PARTS:
        return False
    extra = _names(layer.self_attn) - _ATTENTION
    return _names(layer.self_attn) >= _ATTENTION and extra in (set(), _HEADS)


def _names(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _behind(layer: Any) -> Any:
    return layer.post_attention_layernorm


def _heads(attention: Any, hidden: Tensor) -> Sequence[Tensor]:
    """Return queries, keys and values `[B, heads, n, d]`."""
    shape = *hidden.shape[:-1], -1, attention.head_dim
    query, key = attention.q_proj(hidden).view(shape), attention.k_proj(hidden).view(shape)
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    value = attention.v_proj(hidden).view(shape)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _called(norm: Any, x: Tensor) -> Tensor:
    found: Tensor = norm(x)
    return found


def _fused(norm: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _fuses(norm: Any) -> bool:
    """Return True if one operation of torch gives what the norm gives; in bfloat16 it does not."""
    if not hasattr(norm, "variance_epsilon"):
        return False
    x = torch.randn(4, len(norm.weight), generator=torch.Generator().manual_seed(0))
    x = x.to(norm.weight)
    return torch.equal(_fused(norm, x), norm(x))
