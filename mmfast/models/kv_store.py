"""Cache layers that hold older entries in few bits and unpack them when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from mmfast.caches.store import leave
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.models.kv_notes import KIND, PADDING, entries, fill
from mmfast.models.kv_pack import Packer, Row, packs_of
from mmfast.models.lengths import Shorter, is_short, regroup, shorten


class _StoredLayer(Shorter, DynamicLayer):  # type: ignore[misc]
    """A layer whose `keys` and `values` are the recent entries in full precision.

    Rows are right-aligned: padding in front, packs, recent entries.

    Attributes:
        rows: What lies beside them, per batch row.
        front: Padding in front of the recent entries of each row.
        extra: Entries per row of the whole layer, minus those of `keys`.
    """

    _layer_type = None
    rows: tuple[Row, ...] = ()
    front: tuple[int, ...] = ()
    extra = 0

    def get_seq_length(self) -> Any:
        return super().get_seq_length() + self.extra

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        length, offset = super().get_mask_sizes(query_length)
        return length + self.extra, offset

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        super().update(key_states, value_states, *args, **kwargs)
        return self.whole()

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, n, d]` of all entries that are left."""
        width = self.keys.shape[2] + self.extra
        parts = [
            row.read(self.keys[b, :, self.front[b] :], self.values[b, :, self.front[b] :])
            for b, row in enumerate(self.rows)
        ]
        return _stack([k for k, _ in parts], width), _stack([v for _, v in parts], width)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.keys.nbytes + self.values.nbytes + sum(row.nbytes for row in self.rows)

    def crop(self, tokens_to_remove: int) -> None:
        count = -tokens_to_remove
        if count > min((self.keys.shape[2] - f for f in self.front), default=0):
            self.open()
        super().crop(tokens_to_remove)
        recent = self.keys.shape[2]
        self.rows = tuple(
            row.without_last(count, recent - f)
            for row, f in zip(self.rows, self.front, strict=True)
        )

    def open(self) -> None:
        """Back to full precision throughout."""
        self.keys, self.values = self.whole()
        self.rows = tuple(Row() for _ in self.rows)
        gaps = self._gaps()
        self.front, self.extra = gaps, 0

    def _gaps(self) -> tuple[int, ...]:
        if self.notes is None:
            return (0,) * len(self.keys)
        real = fill(self)[KIND][:, 0] != PADDING
        return tuple(int(n) for n in real.shape[1] - real.sum(1))

    def reset(self) -> None:
        super().reset()
        self.rows, self.front, self.extra = (), (), 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._take(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._take([b for b in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._take(torch.arange(len(self.rows))[indices.cpu()].tolist())

    def _take(self, numbers: Sequence[int]) -> None:
        self.rows = tuple(self.rows[b] for b in numbers)
        self.front = tuple(self.front[b] for b in numbers)


StoredLayer = _StoredLayer


def _stack(rows: Sequence[Tensor], width: int) -> Tensor:
    """Rows `[H, n_b, d]` with padding in front, `[B, H, width, d]`."""
    if len(rows) == 1 and rows[0].shape[1] == width:
        return rows[0][None]
    return torch.stack([F.pad(row, (0, 0, width - row.shape[1], 0)) for row in rows])


def stored(cache: Any, index: int) -> StoredLayer:
    """Shortened layer `index` of a cache with notes, made able to hold packs."""
    layer = cache.layers[index]
    if isinstance(layer, StoredLayer):
        return layer
    align(cache, index)
    made: Any = object.__new__(StoredLayer)
    made.__dict__ = layer.__dict__  # the same tensors, now and later
    cache.layers[index] = made
    made.rows = tuple(Row() for _ in range(len(layer.keys)))
    made.front, made.extra = made._gaps(), 0
    return made  # type: ignore[no-any-return]


def align(cache: Any, index: int) -> None:
    """Put all padding of a layer in front."""
    layer = cache.layers[index]
    notes = fill(layer)
    real = notes[KIND][:, 0] != PADDING
    if not bool((real[:, :-1] & ~real[:, 1:]).any()):
        return
    where = [row.nonzero()[:, 0] for row in real]
    heads = layer.keys.shape[1]
    same = [Reduction.identity(len(w), (heads,), w.device) for w in where]
    left = leave(layer.keys, layer.values, notes, where, same)
    gone = entries(layer) - left.width
    layer.keys, layer.values = left.keys, left.values
    layer.notes, layer.valid = left.notes, left.valid
    layer.gone, layer.dropped = layer.gone + gone, layer.dropped + gone
    regroup(cache, index)


def pack_recent(
    layer: StoredLayer,
    packer: Callable[[int], Packer],
    keep: int,
    full: int | None = None,
    size: int | None = None,
) -> None:
    """Pack recent entries but for the last `keep` of each row.

    Args:
        layer: The layer.
        packer: What packs the entries of a row.
        keep: Entries that stay in full precision.
        full: Only rows that hold so many of those.
        size: Most entries of a pack; None packs all in one.
    """
    recent = [layer.keys.shape[2] - f for f in layer.front]
    moving = [max(0, r - keep) if r >= (full or 0) else 0 for r in recent]
    if not any(moving):
        return
    width = layer.keys.shape[2] + layer.extra
    rows, keys, values = [], [], []
    for b, (row, count) in enumerate(zip(layer.rows, moving, strict=True)):
        k, v = layer.keys[b, :, layer.front[b] :], layer.values[b, :, layer.front[b] :]
        if count:
            packs = packs_of(k[:, :count], v[:, :count], packer(b), size)
            row = replace(row, packs=(*row.packs, *packs))
        rows.append(row)
        keys.append(k[:, count:])
        values.append(v[:, count:])
    longest = max(k.shape[1] for k in keys)
    # Copied: a view would keep the packed entries alive.
    layer.keys, layer.values = (_stack(x, longest).clone() for x in (keys, values))
    layer.rows, layer.extra = tuple(rows), width - longest
    layer.front = tuple(longest - k.shape[1] for k in keys)


def keep_stored(layer: StoredLayer, kept: Sequence[Tensor]) -> None:
    """Evict entries of a layer with packs: per row those of its entries that stay, `[H, m]`."""
    recent = layer.keys.shape[2]
    layer.rows = tuple(
        row.keep(mine, recent - f)
        for row, mine, f in zip(layer.rows, kept, layer.front, strict=True)
    )
    layer.extra = max(mine.shape[1] for mine in kept) - recent


def shrinkable(cache: Any, index: int) -> Any:
    """Layer `index` of a cache, made able to lose entries.

    Raises:
        ModelError: It is of a kind that cannot.
    """
    layer = cache.layers[index]
    if isinstance(layer, StoredLayer) or type(layer) is DynamicLayer:
        return shorten(cache, index)
    kind = next(c for c in type(layer).__mro__ if c.__module__.startswith("transformers"))
    if is_short(layer) and kind is DynamicLayer:
        return layer
    raise ModelError(
        f"cache layer {index} is a {kind.__name__}, which cannot lose entries; leave out "
        "cache_implementation (write 'quant:8' into the cache spec for fewer bits), or pass "
        "DynamicCache(config=model.config)"
    )
