"""M-RoPE offsets per conversation instead of per model.

Stock models keep `rope_deltas`, the distance between token counts and positions, on the model: a
conversation that is continued after another one ran would get the other one's positions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmfast.models.patching import override


class _Local(threading.local):
    fresh: Tensor | None = None  # computed in this thread, not yet stored with a cache


class Offsets:
    """Remembers the offset `[B, 1]` of every cache that an attached model fills.

    Args:
        model: The model that generates.
        base: Its base model.
    """

    def __init__(self, model: Any, base: Any) -> None:
        self._model = model
        self._base = base
        self._known: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._local = _Local()
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand around the two methods that read and write `rope_deltas`."""
        with override(self._base, "compute_3d_position_ids", self._forward):
            if self._model is self._base:
                yield
                return
            with override(self._model, "_prepare_position_ids_for_generation", self._generate):
                yield

    def store(self, cache: Any) -> None:
        """Keep the offset computed last in this thread with the cache it belongs to."""
        if self._local.fresh is not None and cache is not None:
            self._known[cache], self._local.fresh = self._local.fresh, None

    def forget(self) -> None:
        """Drop what no cache claimed, when a forward pass ends."""
        self._local.fresh = None

    def _generate(self, stock: Callable[..., Any], inputs: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        known = None if cache is None else self._known.get(cache)
        with self._lock:
            if known is not None:
                self._base.rope_deltas = known
            positions = stock(inputs, kwargs)
            self._local.fresh = self._base.rope_deltas
        return positions

    def _forward(self, stock: Callable[..., Any], **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        known = None if cache is None else self._known.get(cache)
        if known is not None and cache is not None and cache.get_seq_length() > 0:
            return _continued(known, cache, kwargs["inputs_embeds"], kwargs.get("attention_mask"))
        with self._lock:
            positions = stock(**kwargs)
            self._local.fresh = self._base.rope_deltas
        return positions


def _continued(offset: Tensor, cache: Any, embeds: Tensor, mask: Any) -> Tensor:
    """Positions `[3, B, L]` of text that follows what the cache holds."""
    batch, length = embeds.shape[:2]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        counted = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
    else:
        past = cache.get_seq_length()
        counted = (torch.arange(length, device=embeds.device) + past).expand(batch, -1)
    offset = offset.repeat_interleave(batch // len(offset), dim=0).to(counted.device)
    return (counted + offset).expand(3, -1, -1)
