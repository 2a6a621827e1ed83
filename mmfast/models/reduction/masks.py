"""Masks that fit cache layers of different lengths, and M-RoPE offsets per conversation.

Masks are made by stock code. Stock models keep `rope_deltas`, the distance between token counts and
positions, on the model: a conversation that is continued after another one would get the positions
of the other one, so the offsets are kept per cache here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import (
    blockwise_overlay,
    create_causal_mask,
    create_sliding_window_causal_mask,
    sliding_window_overlay,
)

from mmfast.core.errors import ModelError
from mmfast.core.locks import WholeLock
from mmfast.models.cache_name import CACHE, cache_of
from mmfast.models.patching import override
from mmfast.models.reduction.cache_layers import layer_of_model_mask, padding_mask
from mmfast.models.wrappers import (
    FULL,
    KEEPS_ALL,
    SLIDING,
    decoder_of,
    kind_of,
    lender_of,
    position_axes,
)


def stock_mask(
    config: Any,
    hidden: Tensor,
    padding: Tensor | None,
    cache: Any,
    layer: int,
    blocks: Tensor | None = None,
) -> Any:
    """The mask transformers makes for one attention layer, from its own cache lengths.

    `padding` `[B, offset + keys]` is False at padding; `blocks` `[B, n]` numbers the block inside
    which a token sees forward, -1 outside.
    """
    common = {
        "config": config,
        "inputs_embeds": hidden,
        "attention_mask": padding,
        CACHE: cache,
        "layer_idx": layer,
    }
    sliding = kind_of(config, layer) == SLIDING
    if config.model_type == "gemma4_text":  # only some of them, and in windows alone
        blocks = blocks if sliding and config.use_bidirectional_attention == "vision" else None
    if blocks is None:
        return (create_sliding_window_causal_mask if sliding else create_causal_mask)(**common)
    ids = _by_position(blocks, cache, layer)
    if not sliding:
        return create_causal_mask(**common, block_sequence_ids=ids)
    if config.model_type == "gemma2":  # in PaliGemma 2, blocks see past the window
        return create_sliding_window_causal_mask(**common, block_sequence_ids=ids)
    return create_causal_mask(
        **common,
        or_mask_function=blockwise_overlay(ids),
        and_mask_function=sliding_window_overlay(config.sliding_window),
    )


def _by_position(blocks: Tensor, cache: Any, layer: int) -> Tensor:
    """Block numbers `[B, n]` of the new tokens among the logical places of this layer's keys."""
    if cache is None:
        return blocks
    held = cache.layers[layer]
    start, new = int(held.get_seq_length()), blocks.shape[1]
    length, offset = held.get_mask_sizes(new)
    return F.pad(blocks, (start, max(0, length + offset - start - new)), value=-1)


def fit_decode(config: Any, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
    """Replace the mask in `kwargs` in a step without new visual tokens; True if it did not fit."""
    cache, lender = cache_of(kwargs), lender_of(config, layer)
    if cache is None or len(cache.layers) <= lender:
        return False
    held = cache.layers[lender]
    if not getattr(held, "uneven", False):
        return False
    untyped = kind_of(config, layer) == SLIDING and not held.is_sliding  # holds more than it sees
    short = held.valid is None and not isinstance(held, StaticLayer) and not untyped
    if hidden.shape[1] == 1 and short:
        kwargs["attention_mask"] = None
    elif (held.group.leader == layer and layer == lender) or held.group.mask is None:
        seen = padding_mask(held, hidden.shape[1])
        kwargs["attention_mask"] = stock_mask(config, hidden, seen, cache, layer)
        held.group.mask = kwargs["attention_mask"]
    else:
        kwargs["attention_mask"] = held.group.mask
    return True


def forget_masks(cache: Any) -> None:
    """Drop the masks of a step: a compiled one would otherwise have to return them."""
    for layer in () if cache is None else cache.layers:
        if getattr(layer, "uneven", False):
            layer.group.mask = None


def padding_of(
    mask: Any, length: int, past: int, cache: Any, config: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Masks of the P earlier and L new tokens, `[B, P]` and `[B, L]`, False at padding, or None.

    The mask is None, `[B, P + L]`, or what `generate` makes for a static cache: 4-D, or a dict.
    `past` counts dropped tokens, too.
    """
    kind, mask = _kind_and_mask(mask, config)
    if mask is None:
        return None, None
    if mask.ndim == 4:
        seen = _visible(mask, length, past, cache)[:, 0]
        n, rows = seen.shape[-1], -1
        if kind == SLIDING:  # the last query that has a token in its window sees it
            last = torch.arange(n, device=seen.device) + config.sliding_window - 1
            rows = last.clamp(n - length, n - 1) - n
        seen = seen[:, rows, torch.arange(n, device=seen.device)]
    else:
        seen = mask[:, -(past + length) :].bool()
    new, old = seen[:, -length:], seen[:, :-length]
    return None if bool(old.all()) else old, None if bool(new.all()) else new


def _kind_and_mask(mask: Any, config: Any) -> tuple[str, Any]:
    """Of the masks of a call the one that hides least, and of which kind of layers it is."""
    if not isinstance(mask, dict):
        return kind_of(config, 0), mask
    kind = FULL if FULL in mask else next(iter(mask))
    return kind, mask[kind]


def _visible(mask: Tensor, length: int, past: int, cache: Any) -> Tensor:
    """Tokens so far that new ones see by a 4-D mask, `[B, H, L, P + L]`."""
    past -= getattr(layer_of_model_mask(cache), "dropped", 0) if past else 0
    return (mask if mask.dtype == torch.bool else mask == 0)[..., : past + length]


def refuse_own_mask(
    mask: Any, length: int, past: int, cache: Any, blocks: Tensor | None, config: Any
) -> None:
    """Refuse a 4-D mask that hides more than padding and what comes later (ModelError).

    Shortened prompts get masks of stock code, which would show what such a mask hides. `blocks`
    `[B, L]` numbers the block inside which a new token may see forward, -1 outside.
    """
    kind, mask = _kind_and_mask(mask, config)
    if mask is None or mask.ndim != 4:
        return
    seen = _visible(mask, length, past, cache)
    if kind == SLIDING and not bool(seen[..., -1, : -config.sliding_window].any()):
        if seen.shape[-1] > config.sliding_window:
            return  # of windows, behind which padding cannot be told
    elif kind not in (*KEEPS_ALL, SLIDING):
        return
    real = seen[:, :1, -1:]  # `[B, 1, 1, P + L]`
    causal = torch.ones(seen.shape[-2:], dtype=torch.bool, device=seen.device)
    other = seen != (real & causal.tril(seen.shape[-1] - length))
    other &= real[..., -length:].transpose(-1, -2)  # rows of padding see anything
    if blocks is not None:
        numbers = blocks.to(seen.device)
        other[..., -length:] &= (numbers[:, None, :, None] != numbers[:, None, None]) | (
            numbers[:, None, None] < 0
        )
    if bool(other.any()):
        raise ModelError(
            f"an attention_mask {list(mask.shape)} hides more than padding and what comes later, "
            "and a shortened prompt gets a stock mask, which would not; give a mask [B, L] of "
            "padding, and sequences as rows of a batch"
        )


def refuse_packed(positions: Any, mask: Any, cache: Any) -> None:
    """Refuse several sequences in one row, which stock code parts by `positions` (ModelError)."""
    if positions is None or mask is not None or cache is not None:
        return
    if positions.ndim == 3:  # of M-RoPE, those of text come first where there are four
        positions = positions[0] if len(positions) == 4 else None
    if positions is not None and bool((positions.diff(dim=-1) != 1).any()):
        raise ModelError(
            "position_ids begin anew or have a gap, by which stock code parts packed sequences; a "
            "shortened prompt is one sequence: give sequences as rows of a batch, or an "
            "attention_mask beside positions with gaps"
        )


class _RopeState(threading.local):
    fresh: Tensor | None = None  # computed in this thread, not yet stored with a cache


class Offsets:
    """Remembers the offset `[B, 1]` of every cache that an attached model fills."""

    def __init__(self, model: Any, base: Any) -> None:
        self._model = model
        self._base = base
        self._known: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
        self._local = _RopeState()
        self._lock = WholeLock()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Override the two methods that read and write `rope_deltas`."""
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
        cache = cache_of(kwargs)
        known = None if cache is None else self._known.get(cache)
        with self._lock:
            if known is not None:
                self._base.rope_deltas = known
            positions = stock(inputs, kwargs)
            self._local.fresh = self._base.rope_deltas
        return positions

    def _forward(self, stock: Callable[..., Any], **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        known = None if cache is None else self._known.get(cache)
        if known is not None and cache is not None and cache.get_seq_length() > 0:
            axes = position_axes(decoder_of(self._base))
            mask = kwargs.get("attention_mask")
            given = "inputs_embeds" if "inputs_embeds" in kwargs else "input_ids"  # HunYuan-VL: ids
            source = kwargs[given]
            return _continued(known, cache, source, mask, axes)
        with self._lock:
            positions = stock(**kwargs)
            self._local.fresh = self._base.rope_deltas
        return positions


_SHRUNK: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()  # of caches


def shrinkage(cache: Any) -> Tensor | int:
    """Return by how much positions behind a cache shrank, `[B, 1]`, also when hooks are gone."""
    return _SHRUNK.get(cache, 0)


class Recount:
    """Counts positions behind a cache anew, by how much those of what it holds have shrunk."""

    def store(self, cache: Any, shrunk: Tensor | None) -> None:
        """Add `[B, 1]` positions that a call saved."""
        if cache is not None and shrunk is not None:
            _SHRUNK[cache] = shrunk + self._of(cache, len(shrunk), shrunk.device)

    def shifted(self, kwargs: Mapping[str, Any], length: int) -> Tensor | None:
        """Positions `[B, n]` of the next tokens of a cache; None where it holds nothing anew."""
        cache, given = cache_of(kwargs), kwargs.get("position_ids")
        if cache is None or cache not in _SHRUNK or not int(cache.get_seq_length()):
            return None
        source = kwargs.get("input_ids")
        source = kwargs["inputs_embeds"] if source is None else source
        if given is None:
            given = torch.arange(length, device=source.device)[None] + int(cache.get_seq_length())
        return given - self._of(cache, len(source), source.device)

    def _of(self, cache: Any, batch: int, device: torch.device) -> Tensor:
        known = _SHRUNK.get(cache)
        if known is None or not int(cache.get_seq_length()):
            return torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return known.repeat_interleave(batch // len(known), dim=0).to(device)


def _continued(offset: Tensor, cache: Any, embeds: Tensor, mask: Any, axes: int) -> Tensor:
    """Positions `[axes, B, L]` of text that follows what the cache holds."""
    batch, length = embeds.shape[:2]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        counted = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -length:]
    else:
        past = cache.get_seq_length()
        counted = (torch.arange(length, device=embeds.device) + past).expand(batch, -1)
    offset = offset.repeat_interleave(batch // len(offset), dim=0).to(counted.device)
    return (counted + offset).expand(axes, -1, -1)
