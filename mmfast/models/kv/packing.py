"""The store of a plan on the layers of a cache: when what is packed, and how."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import basis, chooser
from mmfast.models.kv.packs import (
    PackedLayer,
    PackedRow,
    RowPacker,
    by_token,
    in_groups,
    pack_recent,
    packed_layer,
    packs_of,
    split_packs,
)
from mmfast.ops.quantisation import Quantiser


class Packing:
    """The store of a plan: `quant`, or the two precisions of `zipvl` and `zipcache`.

    It packs behind a prompt, and whenever enough tokens have come since (under `zipvl` never);
    small packs under `evicting`, as entries go at every step. `packs` says that it ever does.
    """

    def __init__(self, plan: CachePlan, evicting: bool) -> None:
        self._plan = plan
        self.quantiser: Quantiser | None = plan.quantiser()
        self.pruner = plan.pruner()
        q = self.quantiser
        self._block = 0 if q is None else max(q.group, q.residual)
        self._size = self._block if evicting else None
        self._again = plan.every if plan.bits else 0
        self.packs = any(each is not None for each in (q, self.pruner, plan.bits))

    def acts(self, layer: Any, more: int) -> bool:
        """Return True if a layer of one row has packs, or will within `more` decode steps."""
        if not layer.in_packs:
            return False
        if layer.rows[0].packs or layer.rows[0].live is not None:
            return True
        return self.quantiser is not None and layer.keys.shape[2] + more >= self.full

    def prompt(self, cache: Any, index: int, drafts: int) -> Any:
        """Pack behind a prompt; returns the cache layer as it stands then."""
        if not self.packs:
            return cache.layers[index]
        layer = packed_layer(cache, index)
        packer: RowPacker = self._plain
        keep = drafts
        if self.quantiser is not None:
            keep = max(self.quantiser.residual, drafts)
        elif self.pruner is not None:
            assert layer.power is not None
            keep = max(self.pruner.residual, drafts)
            # Keys that stay whole vote, too: channels are those of the whole prompt.
            rows = zip(layer.keys, layer.front, layer.power, strict=True)
            scores = [self.pruner.score(k[:, first:], power) for k, first, power in rows]
            packer, layer.power = partial(self._thin, scores), None
        else:
            packer = partial(self._mixed, layer, self._important(layer, index))
        pack_recent(layer, packer, lambda recent: max(0, recent - keep))
        return layer

    def step(self, layer: Any) -> None:
        """Pack before a call, where enough tokens have been generated since."""
        if not layer.in_packs:
            return
        if self.quantiser is not None:
            pack_recent(layer, self._plain, self.due)
        elif self._again:
            pack_recent(layer, partial(self._answered, layer), self.due)

    @property
    def full(self) -> int:
        """Recent entries of a row from which on some are packed."""
        return 0 if self.quantiser is None else self.quantiser.residual + self._block

    def due(self, recent: int) -> int:
        """Return how many of the recent entries of a row are to be packed before a call."""
        if self._again:
            return recent // self._again * self._again
        return recent - self.full + self._block if recent >= self.full else 0

    def packed(self, keys: Tensor, values: Tensor) -> list[KVBlock]:
        """Return packs of keys and values `[H, n, d]`."""
        quantiser = self.quantiser
        assert quantiser is not None
        return packs_of(keys, values, lambda x, k: quantiser.pack(x, keys=k), self._size)

    def older(self, n: int) -> int:
        """Return how many of n entries behind a prompt are packed."""
        return 0 if self.quantiser is None else max(0, n - self.quantiser.residual)

    def by_layer(self, keys: Tensor, values: Tensor) -> list[list[KVBlock]]:
        """Return packs of each of the layers `[L, H, n, d]`; none of no entries."""
        blocks = self.packed(keys, values) if keys.shape[2] else []
        pairs = [(block.keys[0].rows(), block.values[0].rows()) for block in blocks]
        return [[KVBlock((k[i],), (v[i],)) for k, v in pairs] for i in range(len(keys))]

    def _plain(self, row: int, keys: Tensor, values: Tensor) -> tuple[list[KVBlock], None]:
        return self.packed(keys, values), None

    def _thin(
        self, scores: list[Tensor], row: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KVBlock], None]:
        assert self.pruner is not None
        return [KVBlock((self.pruner.prune(keys, scores[row]),), (values.clone(),))], None

    def alone(self, layer: Any) -> bool:
        """Return True if a layer of one row has nothing but packs and what came since."""
        plain = self.quantiser is not None and isinstance(layer, PackedLayer)
        return plain and layer.rows[0].live is None and not layer.front[0]

    def _important(self, layer: PackedLayer, index: int) -> list[Reduction]:
        """Per row what the plan keeps of the entries after `_known`: in more bits, that is."""
        choose = chooser(self._plan, layer, index)
        real = notes.fill(layer)[notes.KIND][:, 0] != notes.PADDING
        known = [self._known(row) for row in layer.rows]
        return [choose(b, mine.nonzero()[known[b] :, 0]) for b, mine in enumerate(real)]

    def _known(self, row: PackedRow) -> int:
        """Return how many first entries of a row a choice leaves out: under probes those in packs.

        A later turn has probes of its own, which see old and new entries alike.
        """
        return 0 if self._plan.probes is None else row.packed

    def _mixed(
        self, layer: PackedLayer, chosen: list[Reduction], row: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KVBlock], Tensor]:
        assert self._plan.bits is not None
        before, keep = layer.rows[row], chosen[row].keep[0]  # the same in all heads
        start = before.packed - self._known(before)
        here = keep[(keep >= start) & (keep < start + keys.shape[1])] - start
        return self._split(keys, values, here)

    def _answered(
        self, layer: PackedLayer, row: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KVBlock], Tensor]:
        """Split tokens of an answer by the share of the prompt that is salient."""
        score, known, count = self._plan.score, notes.fill(layer), keys.shape[1]
        assert score is not None
        start = layer.rows[row].packed
        real = (known[notes.KIND][row, 0] != notes.PADDING).nonzero()[:, 0]
        here = real[start : start + count]
        share = score.budget
        if isinstance(share, int):
            share = min(1.0, share / max(1, basis(layer, row)))
        seen = {k: known[k][row].index_select(-1, here) for k in (notes.PROBED, notes.PROBES)}
        signals = {"attn_probed": notes.saliency(seen)}
        chosen = CachePlan(score=replace(score, budget=share)).reduce(Tokens(keys, signals=signals))
        return self._split(keys, values, chosen.keep[0])

    def _split(self, keys: Tensor, values: Tensor, chosen: Tensor) -> tuple[list[KVBlock], Tensor]:
        assert self._plan.bits is not None
        pack = in_groups if self._plan.probes is None else by_token
        high, low = (partial(pack, bits) for bits in self._plan.bits)
        return split_packs(keys, values, chosen, (high, low))
