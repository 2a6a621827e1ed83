"""Specs of a request, acting on its prompt and its row through their own code.

Reducers inside the language model cut a prompt between two of its layers, and KV policies act on
the layers when the prompt ends. Both are those of `attach`; here they get what a pass over parts of
many prompts has brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import KVBlock
from mmfast.core.spec import Spec, count
from mmfast.core.trace import Trace
from mmfast.models.kv.policy import KVStage, Packing
from mmfast.models.reduction.call import PassState, PromptPart
from mmfast.models.reduction.decoder_signals import LayerAttention
from mmfast.models.reduction.look_ahead import layer_ahead, signals_ahead
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.reduction.site import Site
from mmfast.models.reduction.step import ForwardStep, SiteCut
from mmfast.models.wrappers import CONV, SLIDING
from mmfast.ops.quantisation import Quantiser
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.bucket import Entries, windowed
from mmfast.serve.engine.lane import AttentionCall, Lane
from mmfast.serve.engine.packed_rows import PackedEntries
from mmfast.serve.engine.rows import AnswerRow, Held, State, layer_bytes


@dataclass(frozen=True, eq=False)
class PromptRecipe:
    """Reducers inside the model and the KV policy of a prompt, with the places of its media."""

    sites: tuple[Site, ...]
    plan: CachePlan | None
    sequences: Sequences
    trace: Trace


@dataclass(eq=False)
class _LayerNotes:
    """Notes on a layer for its policy, which acts when the prompt ends."""

    masses: list[dict[str, Tensor]] = field(default_factory=list)
    raw: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and queries before RoPE


class PromptPolicy:
    """The policies of one prompt while it is read; `most` entries go into its row at last."""

    def __init__(self, model: Any, lane: Lane, recipe: PromptRecipe, most: int) -> None:
        self.step = ForwardStep(recipe.sites, recipe.sequences, None, recipe.trace)
        self.cuts = sorted({site.layer for site in self.step.sites})
        self._lane, self._recipe, self._more = lane, recipe, most - recipe.sequences.length
        # While this layer is to be read for a reducer before the first one, nothing else counts.
        ahead = [site.specs[0] for site in self.step.sites if site.ahead]
        self.ahead = layer_ahead(ahead[0], lane.decoder.layers) if ahead else None
        self._parts: list[Entries | State | Held] = []
        self._queries: list[Tensor] = []
        self._notes: dict[int, _LayerNotes] = {}
        self._stage: KVStage | None = None
        if recipe.plan is not None:
            self._stage = KVStage(model, recipe.plan, recipe.trace, PassState())
            self._cache = DynamicCache(config=lane.decoder.config)

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that have ended."""
        parts = [part for part in list(self._parts) if isinstance(part, Entries)]
        return sum(part.keys.nbytes + part.values.nbytes for part in parts)

    @property
    def retrieves(self) -> bool:
        """Keys and queries before RoPE are needed."""
        return self.ahead is None and self._stage is not None and self._stage.retrieves

    def reads(self, index: int) -> bool:
        """Return True if a layer's attention is needed."""
        if self.ahead is not None:
            return index == self.ahead
        mine = self._stage is not None and index in self._stage.layers
        return mine or bool(self.step.reads(index))

    def look(
        self, index: int, attention: AttentionCall, part: PromptPart, *given: Any
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Return what of the attention of a layer to a part is to be kept, see `keep`.

        `given` are queries `[1, H, n, d]`, keys, values and mask.
        """
        masses: dict[str, Tensor] = {}
        if self.ahead is not None:
            return given[0], masses
        if self._stage is not None and index in self._stage.layers:
            more = (attention.scaling, True)
            masses = self._stage.look(index, part, attention.module, *given, *more)
        return (given[0] if self.step.reads(index) else None), masses

    def keep(
        self,
        index: int,
        seen: tuple[Tensor | None, dict[str, Tensor]],
        raw: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Keep what `look` returned, and keys and queries before RoPE, when a pass has ended."""
        queries, masses = seen
        if queries is not None:
            self._queries.append(queries)
        notes = self._notes.setdefault(index, _LayerNotes())
        notes.masses += [masses] if masses else []
        notes.raw += [raw] if raw is not None else []

    def cut(
        self, layer: int, hidden: Tensor, keys: Tensor | None, scaling: float | None, mask: Any
    ) -> list[SiteCut]:
        """Reduce the whole prompt `[1, n, D]` before a layer; returns how."""
        found: list[dict[str, Tensor]] = []
        if self._queries and keys is not None:
            query = torch.cat(self._queries, 2)
            seen = LayerAttention(query, keys, mask, scaling, True, 0)
            if self.ahead is None:
                self.step.observe(layer - 1, seen)
            else:
                found = signals_ahead(self.step.sequences, seen)
            self._queries, self.ahead = [], None
        self.step.cuts = []
        for site in self.step.sites:
            if site.layer == layer:
                hidden = self.step.reduce(site, hidden, lambda *_: found)
        return self.step.cuts

    @property
    def ended(self) -> int:
        """Layers that have ended."""
        return len(self._parts)

    def end(self, own: RowBuffer | None, state: Any) -> None:
        """Take the keys and values of the next layer, in which all of the prompt has been read."""
        n, index = self.step.sequences.length, len(self._parts)
        kind = self._lane.kinds[index]
        if own is None:
            self._parts.append(State(state))
            return
        keys, values = own.read(0, 0, n), own.read(1, 0, n)
        found: Entries | Held
        if kind == SLIDING:
            found = windowed(keys, values, self._lane.window, n + self._more)
        elif self._stage is None or index not in self._stage.layers:
            found = Entries(KVBlock((keys,), (values,)), n + self._more)
        else:
            found = self._chosen(self._stage, index, keys, values)
        self._parts.append(found)

    def _chosen(self, stage: KVStage, index: int, keys: Tensor, values: Tensor) -> Entries | Held:
        cache, known = self._cache, self._notes.pop(index, _LayerNotes())
        cache.update(keys[None], values[None], index)
        masses: dict[str, Tensor] = {}
        for name in known.masses[-1] if known.masses else ():
            masses[name] = _summed([each[name] for each in known.masses])
        raw = None
        if known.raw:
            raw = tuple(torch.cat(each, 2) for each in zip(*known.raw, strict=True))
        stage.arrive(cache, index, self.step.sequences, masses, raw)  # type: ignore[arg-type]
        stage.prompt_ends(cache, index)
        return part_of(stage, cache, index, self._more)

    def row(self) -> AnswerRow:
        """Return the row of the answer; all layers have ended."""
        return row_of(self._parts, self._stage, getattr(self, "_cache", None))


def _summed(parts: Sequence[Tensor]) -> Tensor:
    """Add masses `[1, H, n]` that parts of a prompt gave to all tokens up to their end."""
    total = parts[-1].clone()
    for part in parts[:-1]:
        total[..., : part.shape[-1]] += part
    return total


def part_of(stage: KVStage, cache: Any, index: int, more: int) -> Entries | Held:
    """Return a layer of a cache of one row behind its prompt, as decode steps are to read it.

    `more` tokens follow. A layer that its policy need not act on is no longer in the cache.
    """
    layer = cache.layers[index]
    rest = stage.at_rest(layer, more)
    if rest is None and (packing := stage.packing(layer)) is not None:
        return _packed(cache, index, packing, more)
    if rest is None:
        token = 2 * layer.keys[:, :, :1].nbytes or 2 * layer.keys.shape[1] * layer.keys.shape[3] * 4
        return Held(layer, layer_bytes(layer) + token * more, partial(stage.read, layer))
    block, leaving = rest
    keys = block.keys[0]
    most = int(keys.shape[1]) + more
    if leaving is not None and (gone := len(leaving(most))):
        most += 1 - gone  # the new token comes before it is decided what goes
    cache.layers[index] = None
    return Entries(block, most, leaving)


def _packed(cache: Any, index: int, packing: Packing, more: int) -> PackedEntries:
    """Return a layer whose older entries are in packs, and are to be, as `part_of`."""
    layer, quantiser = cache.layers[index], packing.quantiser
    assert quantiser is not None
    keys, values, packs = layer.keys[0], layer.values[0], layer.rows[0].packs
    heads, recent, width = keys.shape
    whole, share = recent + layer.rows[0].packed + more, packed_share(quantiser, keys.itemsize)
    token = 2 * heads * width * keys.itemsize
    cache.layers[index] = None
    return PackedEntries(
        KVBlock((keys,), (values,)),
        packing.full + 1,
        packs=packs,
        store=packing,
        form=(quantiser.bits, quantiser.group),
        whole=whole,
        bytes=round(token * whole * share),
    )


def packed_share(quantiser: Quantiser, itemsize: int) -> float:
    """Return the memory of packs over that of what is packed."""
    return quantiser.bits / (8 * itemsize) + 2 / quantiser.group


def row_of(parts: Sequence[Any], stage: KVStage | None, cache: Any) -> AnswerRow:
    """Return the row of these parts, with the policy that acts on what it holds itself."""
    held = stage is not None and any(isinstance(part, Held) for part in parts)
    return AnswerRow(
        list(parts), partial(stage.settle, cache) if held and stage is not None else None
    )


def attached_row(
    model: Any, lane: Lane, cache: Any, plan: CachePlan | None, more: int
) -> AnswerRow:
    """Return the row of a prompt that was read under `attach`, from its cache of one row."""
    stage = None if plan is None else KVStage(model, plan, Trace(), PassState())
    parts: list[Entries | State | Held] = []
    for index, kind in enumerate(lane.kinds):
        layer = cache.layers[index]
        if kind == CONV:
            parts.append(State(layer))
        elif stage is not None and index in stage.layers:
            parts.append(part_of(stage, cache, index, more))
        else:
            cache.layers[index] = None
            keys, values = layer.keys[0], layer.values[0]
            most = int(keys.shape[1]) + more
            sliding = kind == SLIDING
            whole = Entries(KVBlock((keys,), (values,)), most)
            parts.append(windowed(keys, values, lane.window, most) if sliding else whole)
    return row_of(parts, stage, cache)


def bound(plan: CachePlan | None, prompt: int, more: int, itemsize: int) -> int:
    """Return the most tokens, in full precision, that a row takes behind its prompt.

    What a policy decides from the prompt itself counts in full.
    """
    most = prompt + more
    if plan is None or plan.retrieve is not None or plan.bits:
        return most
    specs = [*plan.position, *([plan.score] if plan.score else [])]
    if specs and all(spec.budget is not None for spec in specs):
        kept = min(prompt, sum(_kept(spec, prompt) for spec in specs))
        always = plan.score is None
        most = min(most, kept + 1) if always and kept < prompt else kept + more
    if (quantiser := plan.quantiser()) is not None:
        recent = quantiser.residual + max(quantiser.group, quantiser.residual)
        most = min(most, recent + round(packed_share(quantiser, itemsize) * most))
    return most


def _kept(spec: Spec, n: int) -> int:
    return min(n, spec.budget) if isinstance(spec.budget, int) else count(spec.budget, n) or n
