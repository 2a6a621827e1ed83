"""Sinks that follow the window: positions inside the cache, as StreamingLLM (2309.17453) has them.

Attention knows differences of positions alone. Behind an eviction the window lies as it lay, so it
is enough to turn the sinks ahead by as many positions as tokens have left behind them. They are
turned from the keys they had at first, so that no error adds up, however many steps follow.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.rotary import RawCapture, Rotary
from mmfast.models.kv.notes import KIND, PADDING, PLACE, fill
from mmfast.models.wrappers import decoder_of

_TURNING: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
_FIRST = "sinks"  # state of each row of a layer: its first keys as they were stored, `[H, s, d]`


class FollowingSinks:
    """Turns the first `count` keys of each row before a call.

    ModelError: see `rotary_of`, and where a layer does not show its keys before RoPE.
    """

    def __init__(self, model: Any, modules: dict[int, Any], count: int) -> None:
        self._rotary, self._count = rotary_of(model), count
        self._modules = {i: modules[i] for i in turning_layers(decoder_of(model)) if i in modules}
        self._last: tuple[Any, list[int]] = None, []

    def follow(self, layer: Any, index: int) -> None:
        """Let the sinks of a layer stand right before what is left behind them."""
        if index not in self._modules:
            return
        notes, count = fill(layer), self._count
        starts, places = self._starts(notes[KIND]), notes[PLACE][:, 0]
        if max(starts) + count >= places.shape[1]:
            return
        if _FIRST not in layer.per_row:
            first = (layer.keys[row, :, at : at + count] for row, at in enumerate(starts))
            layer.per_row = {**layer.per_row, _FIRST: tuple(keys.clone() for keys in first)}
        ends = torch.tensor(starts, device=places.device)[:, None] + count
        gaps = places.gather(1, ends) - places.gather(1, ends - 1) - 1  # [B, 1]
        turned = self._turned(torch.stack(layer.per_row[_FIRST]), gaps, index)
        for row, at in enumerate(starts):
            layer.keys[row, :, at : at + count] = turned[row]

    def _starts(self, kinds: Tensor) -> list[int]:
        """Return the place of the first entry of each row that is no padding."""
        if self._last[0] is not kinds:
            self._last = kinds, (kinds[:, 0] == PADDING).sum(-1).tolist()
        return self._last[1]

    def _turned(self, keys: Tensor, gaps: Tensor, index: int) -> Tensor:
        """Turn keys `[B, H, s, d]` by so many positions `[B, 1]`."""
        module, rotary = self._modules[index], self._rotary
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        ahead = gaps.expand(-1, keys.shape[2])
        (cos, sin), (unit, _) = (
            rotary.angles(places[None], wide, index) for places in (ahead, torch.zeros_like(ahead))
        )  # some embeddings scale what they turn, which has been done once
        return rotary.turn(module, wide, (cos / unit, sin / unit)).to(keys.dtype)


def rotary_of(model: Any) -> Rotary:
    """Return the rotary embedding of a model; ModelError where keys cannot be turned by a gap."""
    rotary = Rotary(decoder_of(model))
    if rotary.axes > 1:
        raise ModelError(
            f"positions of {type(model).__name__} are frames, rows and columns, which do not close "
            "up; leave out positions=new"
        )
    return rotary


def turning_layers(decoder: Any) -> list[int]:
    """Return the layers that turn their keys, which some families (SmolLM3) do not in all.

    It is seen from a token of noise at position 1, once for a model: nothing in a config says so
    alike everywhere.
    """
    if decoder not in _TURNING:
        _TURNING[decoder] = _turned_in(decoder)
    return _TURNING[decoder]


@torch.no_grad()
def _turned_in(decoder: Any) -> list[int]:
    capture, weight = RawCapture(decoder), decoder.get_input_embeddings().weight
    drawn = torch.randn(1, 1, weight.shape[1], generator=torch.Generator().manual_seed(0))
    given = {"inputs_embeds": drawn.to(weight), "position_ids": weight.new_ones(1, 1).long()}
    cache = DynamicCache(config=decoder.config)
    try:
        with capture.recording() as raw:
            decoder(**given, use_cache=True, **{CACHE: cache})
    finally:
        capture.remove()
    pairs = ((i, keys, cache.layers[i].keys) for i, keys in raw.keys.items())
    return [i for i, keys, stored in pairs if stored is not None and not torch.equal(keys, stored)]
