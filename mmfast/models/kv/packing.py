"""When a plan packs what a cache holds: behind a prompt, and whenever enough came since."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.reduction import Reduction
from mmfast.models.kv.eviction import chooser
from mmfast.models.kv.notes import KIND, PADDING
from mmfast.models.kv.packed import Packer, StoredLayer, pack_recent, stored
from mmfast.ops.quantisation import Quantiser, pack_mixed


def nbytes(layer: Any) -> int:
    """Bytes of the keys and values that a cache layer holds."""
    if isinstance(layer, StoredLayer):
        return layer.nbytes
    return int(layer.keys.nbytes + layer.values.nbytes)


class Packing:
    """The store of a plan: `quant`, or the two precisions of `zipvl`.

    Args:
        plan: The plan.
        layers: Decoder layers of the model.
        evicting: Entries go at every step, so packs are small enough to go with them.
    """

    def __init__(self, plan: CachePlan, layers: int, evicting: bool) -> None:
        self._plan, self._layers = plan, layers
        self._quantiser: Quantiser | None = plan.quantiser()
        self._bits = plan.bits
        q = self._quantiser
        self._block = 0 if q is None else max(q.group, q.residual)
        self._size = self._block if evicting else None

    @property
    def packs(self) -> bool:
        """Whether anything is packed at all."""
        return self._quantiser is not None or self._bits is not None

    def prompt(self, cache: Any, index: int, drafts: int) -> Any:
        """Behind a prompt; gives the cache layer as it stands then."""
        if not self.packs:
            return cache.layers[index]
        layer = stored(cache, index)
        if self._quantiser is not None:
            keep = max(self._quantiser.residual, drafts)
            pack_recent(layer, self._plain, keep, size=self._size)
        else:
            chosen = self._important(layer, index)
            pack_recent(layer, lambda row: self._mixed(layer, row, chosen[row], drafts), drafts)
        return layer

    def step(self, layer: Any) -> None:
        """Before a call: what generated tokens have filled up."""
        if self._quantiser is not None and isinstance(layer, StoredLayer):
            keep = self._quantiser.residual
            pack_recent(layer, self._plain, keep, full=keep + self._block, size=self._size)

    def _plain(self, row: int) -> Packer:
        quantiser = self._quantiser
        assert quantiser is not None
        return lambda x, keys: quantiser.pack(x, keys=keys)

    def _important(self, layer: Any, index: int) -> list[Reduction]:
        """Per row what the plan keeps, which here means: in more bits."""
        choose = chooser(self._plan, layer, index, self._layers)
        real = layer.notes[KIND][:, 0] != PADDING
        return [choose(b, mine.nonzero()[:, 0]) for b, mine in enumerate(real)]

    def _mixed(self, layer: StoredLayer, row: int, chosen: Reduction, drafts: int) -> Packer:
        assert self._bits is not None
        bits, before = self._bits, layer.rows[row].packed
        count = layer.keys.shape[2] - layer.front[row] - drafts
        recent = _between(chosen.keep, before, before + count)
        return lambda x, keys: pack_mixed(x, recent, bits, keys=keys)


def _between(keep: Tensor, start: int, stop: int) -> Reduction:
    """The kept ones among the entries `start:stop`, the same in all heads, as a Reduction."""
    mine = keep[0][(keep[0] >= start) & (keep[0] < stop)] - start
    return Reduction.prune(mine.expand(len(keep), -1), stop - start)
