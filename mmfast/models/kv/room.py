"""Room for new entries behind the old ones of a cache layer, so that a step copies nothing.

The stock cache joins old and new entries at every step, which reads and writes all of it: a sixth
of a step behind 16,384 tokens of the 0.5B shape, and nothing to be seen behind a thousand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from mmfast.models.cache_name import CACHE, NEW, OLD
from mmfast.models.kv.host_entries import under_way
from mmfast.models.reduction.cache_layers import adopt

_SPARE = 256  # entries of room for new ones, at least
_OTHERS = ("cache_implementation", "prompt_lookup_num_tokens", "assistant_model", NEW, OLD)
_SEVERAL = ("num_beams", "num_return_sequences")


def roomy(entries: int) -> int:
    """Return how many entries the buffers have that are made for so many."""
    return entries + max(_SPARE, entries // 8)


class Room:
    """Keys and values of one cache layer in longer buffers, and the state of a method beside them.

    Other code sees slices of the buffers on the layer, as plain tensors. It may put shorter ones in
    their place, which takes entries back, or others, which makes the room void.
    """

    def __init__(self, layer: Any, device: torch.device | None = None) -> None:
        # Weak, and compared by identity: a copy of the layer does not write into this room.
        self._layer: Callable[[], Any] = weakref.ref(layer)
        self._device = device  # of the buffers; None is where the entries come from
        self._buffers: tuple[Tensor, ...] = ()
        self._held = 0
        self.memory: dict[Any, dict[str, Any]] = {}

    def holds(self, layer: Any) -> bool:
        """Return True if the entries of the layer are the first ones of this room."""
        if self._layer() is not layer or not self._buffers or not layer.keys.numel():
            return False
        return layer.keys.shape[2] <= self._held and all(
            mine.data_ptr() == its.data_ptr()
            and mine.shape[:2] == its.shape[:2]
            and mine.stride() == its.stride()
            for mine, its in zip(self._buffers, (layer.keys, layer.values), strict=True)
        )

    def write(self, before: int, old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> None:
        """Put new entries `[B, H, m, d]` behind the first `before` ones, which `old` has."""
        if before < self._held:
            self._trim(before)
        total = before + new[0].shape[2]
        if not self._buffers or self._buffers[0].shape[2] < total:
            wider = roomy(total)
            device = self._device
            grown = tuple(x.new_empty(*x.shape[:2], wider, x.shape[3], device=device) for x in new)
            for buffer, x in zip(grown, old, strict=True):
                if before:
                    buffer[:, :, :before] = x
            self._buffers = grown
        for buffer, x in zip(self._buffers, new, strict=True):
            buffer[:, :, before:total] = x
        self._held = total

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, and of what methods keep beside them."""
        states = [state for mine in list(self.memory.values()) for state in list(mine.values())]
        facts = [x for state in states for x in vars(state).values() if isinstance(x, Tensor)]
        return sum(each.nbytes for each in (*self._buffers, *facts))

    def views(self) -> tuple[Tensor, Tensor]:
        """Keys and values of all entries."""
        keys, values = (buffer[:, :, : self._held] for buffer in self._buffers)
        return keys, values

    def _trim(self, entries: int) -> None:
        for (_, _, start), mine in self.memory.items():
            for name in [k for k, state in mine.items() if not state.trim(entries - start)]:
                del mine[name]


class RoomyLayer:
    """Mixed into the class of cache layers whose new entries are written in place."""

    room: Room | None = None
    host = False  # entries lie in host memory
    fetched = False  # in a step that fetches what it reads from there

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "room": None}  # a room is of one layer, and its copies make their own

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        layer: Any = self
        held = self.room is not None and self.room.holds(layer)
        return self.room.nbytes if held else layer.keys.nbytes + layer.values.nbytes  # type: ignore[union-attr]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store new entries `[B, H, m, d]`; returns all keys and values."""
        layer: Any = self
        if key_states.requires_grad or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        before = layer.keys.shape[2] if layer.keys.numel() else 0
        if self.room is None or not self.room.holds(layer):
            self.room = Room(layer, torch.device("cpu") if self.host else None)
        self.room.write(before, (layer.keys, layer.values), (key_states, value_states))
        layer.keys, layer.values = self.room.views()
        if self.host and not self.fetched:
            return layer.keys.to(key_states.device), layer.values.to(key_states.device)
        return layer.keys, layer.values

    def move_to_host(self) -> int:
        """Put all entries into host memory; returns the bytes of those that were sent for."""
        layer: Any = self
        if not layer.is_initialized or not layer.keys.numel() or layer.keys.requires_grad:
            return 0
        if self.room is None or not self.room.holds(layer):
            self.room = Room(layer, torch.device("cpu"))
        old = layer.keys, layer.values
        self.room.write(layer.keys.shape[2], old, (layer.keys[:, :, :0], layer.values[:, :, :0]))
        layer.keys, layer.values = self.room.views()
        return under_way(self.room.memory)


def growing_cache(model: Any, how: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `generate` is to be given beside `how`: a cache that grows in place.

    Nothing where the call or the model wants another cache, with beams, which reorder it at every
    step, and for models that make their own.
    """
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return {}

    def wanted(name: str) -> Any:
        found = how.get(name)
        return getattr(model.generation_config, name, None) if found is None else found

    several = any((wanted(name) or 1) > 1 for name in _SEVERAL)
    if several or any(wanted(n) is not None for n in _OTHERS) or wanted("use_cache") is False:
        return {}
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            adopt(cache, index, RoomyLayer)
    return {CACHE: cache}
