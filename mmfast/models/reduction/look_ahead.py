"""A look ahead: queries and keys of a deeper layer before layer 0 reduces anything (GemFilter).

The text model itself runs a second time, over a temporary copy of the cache, and is stopped in the
attention of the layer that is asked for. So masks, positions and DeepStack planes are its own, and
no later layer costs anything.
"""

from __future__ import annotations

import contextvars
import copy
import warnings
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

from mmfast.core.errors import SpecError
from mmfast.core.spec import Spec
from mmfast.models.cache_name import cache_of, name_in
from mmfast.models.reduction.cache_layers import held, is_short, shorten
from mmfast.models.reduction.call import Call, PassState
from mmfast.models.reduction.choice import items_of
from mmfast.models.reduction.decoder_signals import LayerAttention, inner_signals, last_products
from mmfast.models.reduction.probe import probing
from mmfast.models.reduction.sequence import MediaItem, Sequences
from mmfast.models.reduction.site import Site
from mmfast.models.reduction.step import ForwardStep
from mmfast.models.wrappers import attention_at, layers_of

DEPTH = 0.4  # of the model; GemFilter reads layer 13 of 32


class _StopError(Exception):
    """Ends the pass once the attention has been seen."""


class _Peek(ForwardStep):
    """A step that reduces nothing further and leaves the real one alone."""

    def __init__(self, step: ForwardStep, hidden: Tensor) -> None:
        self.__dict__.update(step.__dict__)
        self.sites, self._groups, self._masks, self._plane = [], {}, {}, 0
        self.reviving = set()
        self.rebuild = True  # the given mask may be made for a static cache
        self._hidden = hidden

    def before_layer(
        self, layer: int, hidden: Tensor, kwargs: dict[str, Any], config: Any, ahead: Any = None
    ) -> Tensor:
        """As in a step, from the tokens as they stand."""
        return super().before_layer(layer, hidden if layer else self._hidden, kwargs, config)


def look_ahead(
    state: PassState, call: Call, site: Site, where: tuple[int, Any, Any], hidden: Tensor
) -> list[dict[str, Tensor]]:
    """Run the first layers of a text model once more, for the attention of one of them.

    `where` are that layer, the text model, and what runs it; `hidden` is the input of layer 0 as it
    stands, `[B, n, D]`. Returns the signals of each item, see `signals_ahead`.
    """
    (args, kwargs), (layer, text, run) = call.given, where
    cache = _copy(cache_of(kwargs), layer)
    start = 0 if cache is None else held(cache.layers[layer])
    step, seen = call.step, list[LayerAttention]()
    assert step is not None

    def look(
        _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, so: bool
    ) -> None:
        if state.call is call:  # else another thread's pass
            seen.append(LayerAttention(q, k, mask, scale, so, start))
            raise _StopError

    quiet = {"output_hidden_states": False, "output_attentions": False, "use_cache": False}
    call.step = _Peek(step, hidden)
    try:
        quietly = warnings.catch_warnings(action="ignore")  # of checkpoints without gradients
        with torch.no_grad(), quietly, probing({attention_at(text, layer): look}):
            # A context of its own, so that nothing of this pass is recorded as an output.
            contextvars.Context().run(run, *args, **{**kwargs, **quiet, name_in(kwargs): cache})
    except _StopError:
        pass
    finally:
        call.step = step
    items = items_of(site, step.sequences)
    return [each for attention in seen for each in signals_ahead(step.sequences, attention, items)]


def signals_ahead(
    sequences: Sequences, seen: LayerAttention, items: Seq[MediaItem] | None = None
) -> list[dict[str, Tensor]]:
    """Return `attn_ahead` and `mass_ahead`, `[n]` each, per item.

    Both are of the last query of its row in the layer ahead: products with its keys, summed over
    heads in front of the softmax, and attention, mean over heads.
    """
    items = sequences.items if items is None else items
    attended = inner_signals({"attn"}, sequences, seen, items)
    return [
        {"attn_ahead": last_products(sequences, seen, item), "mass_ahead": found["attn"]}
        for item, found in zip(items, attended, strict=True)
    ]


def layer_ahead(spec: Spec, text: Any) -> int:
    """The decoder layer whose attention a stage reads: its knob `layer`, or 0.4 of the depth.

    SpecError where the model has no such layer, or that layer has no attention.
    """
    count = len(layers_of(text))
    able = [i for i in range(count) if attention_at(text, i) is not None]
    asked: int | None = spec.knobs.get("layer")
    if asked is None:
        return min(able, key=lambda i: (abs(i - round(DEPTH * count)), i))
    if asked not in able:
        raise SpecError(
            f"knob layer={asked} of {spec.method.name!r} is no attention layer of this model; "
            f"choose {able[0]} to {able[-1]}"
        )
    return asked


def _copy(cache: Any, last: int) -> Any:
    """The layers of a cache up to `last`, writable without effect on it; None for an empty one."""
    if cache is None or not len(cache.layers) or not int(cache.get_seq_length()):
        return None
    copied = DynamicCache()
    for index, layer in enumerate(cache.layers[: last + 1]):
        copied.layers.append(_copy_layer(layer))
        if is_short(layer) and not is_short(copied.layers[index]):
            short = shorten(copied, index)
            short.dropped, short.valid, short.group = layer.dropped, layer.valid, layer.group
    return copied


def _copy_layer(layer: Any) -> Any:
    if isinstance(layer, DynamicLayer):
        return copy.copy(layer)  # an update replaces the tensors
    if not isinstance(layer, StaticLayer) or layer.is_sliding:
        return copy.deepcopy(layer)  # written in place, and small
    length, grown = held(layer), DynamicLayer()
    grown.lazy_initialization(layer.keys, layer.values)
    grown.keys, grown.values = layer.keys[:, :, :length], layer.values[:, :, :length]
    return grown
