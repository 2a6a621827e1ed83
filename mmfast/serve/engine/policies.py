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
from mmfast.models.kv.notes import QUERIES
from mmfast.models.kv.packing import Packing
from mmfast.models.kv.policy import KVStage
from mmfast.models.kv.room import roomy
from mmfast.models.reduction.cache_layers import claim
from mmfast.models.reduction.call import PassState, PromptPart
from mmfast.models.reduction.decoder_signals import DRIFT, LayerAttention
from mmfast.models.reduction.look_ahead import layer_ahead, signals_ahead
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.reduction.site import Site
from mmfast.models.reduction.step import ForwardStep, SiteCut
from mmfast.models.wrappers import CONV, SLIDING
from mmfast.ops.quantisation import Quantiser
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.kv.bucket import Entries, Leaving, windowed
from mmfast.serve.engine.kv.packed_rows import PackedEntries
from mmfast.serve.engine.kv.rows import AnswerRow, Held, State, layer_bytes
from mmfast.serve.engine.lane import AttentionCall, Lane


@dataclass(frozen=True, eq=False)
class PromptRecipe:
    """Reducers inside the model and the KV policy of a prompt, with the places of its media.

    With `drafts`, the plan chooses what the model drafts on, and the answer reads all of it.
    """

    sites: tuple[Site, ...]
    plan: CachePlan | None
    sequences: Sequences
    trace: Trace
    drafts: bool = False

    @property
    def rereads(self) -> int | None:
        """Last tokens to read where the keys and values of all are known; None means all.

        Behind a cut inside the model, what is left depends on what has been read.
        """
        if self.sites:
            return None
        return 0 if self.plan is None else self.plan.rereads


@dataclass(eq=False)
class _LayerNotes:
    """Notes on a layer for its policy, which acts when the prompt ends."""

    masses: list[dict[str, Tensor]] = field(default_factory=list)
    raw: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # keys and queries before RoPE

    def masses_of_all(self) -> dict[str, Tensor]:
        """Return the attention `[1, H, n]` that all tokens received, by note, and queries."""
        names = self.masses[-1] if self.masses else ()
        return {
            name: (_joined if name == QUERIES else _summed)(
                [each[name] for each in self.masses if name in each]
            )
            for name in names
        }

    def raw_of_all(self) -> tuple[Tensor, Tensor]:
        """Return keys and queries of all tokens before RoPE."""
        keys, queries = zip(*self.raw, strict=True)
        return torch.cat(keys, 2), torch.cat(queries, 2)


class PromptPolicy:
    """The policies of one prompt while it is read; `most` entries go into its row at last.

    `last` `[A, 1]` is the position of its last token.
    """

    def __init__(
        self, model: Any, lane: Lane, recipe: PromptRecipe, most: int, last: Tensor
    ) -> None:
        self.step = ForwardStep(recipe.sites, recipe.sequences, None, recipe.trace)
        # Where a cut reads what a layer changes, reading stops before that layer, too.
        drifts = {site.layer - 1 for site in self.step.sites if DRIFT in site.needs}
        self.cuts = sorted({site.layer for site in self.step.sites} | (drifts - {-1}))
        self._last = last
        self._lane, self._recipe, self._more = lane, recipe, most - recipe.sequences.length
        # While this layer is to be read for a reducer before the first one, nothing else counts.
        ahead = [site.specs[0] for site in self.step.sites if site.ahead]
        self.ahead = layer_ahead(ahead[0], lane.decoder) if ahead else None
        self._parts: list[Entries | State | Held] = []
        self._whole: list[Entries | State | Held] = []  # of an answer that drafts on its parts
        self._queries: list[Tensor] = []
        self._notes: dict[int, _LayerNotes] = {}
        self._stage: KVStage | None = None
        if recipe.plan is not None:
            trace = Trace() if recipe.drafts else recipe.trace
            self._stage = KVStage(model, recipe.plan, trace, PassState())
            self._cache = DynamicCache(config=lane.decoder.config)

    @property
    def nbytes(self) -> int:
        """Bytes of the layers that have ended."""
        parts = list(self._parts)
        held = sum(layer_bytes(part.layer) for part in parts if isinstance(part, Held))
        return held + sum(
            part.keys.nbytes + part.values.nbytes for part in parts if isinstance(part, Entries)
        )

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
        self,
        layer: int,
        hidden: Tensor,
        keys: Tensor | None,
        scaling: float | None,
        mask: Any,
        entered: Tensor | None = None,
    ) -> list[SiteCut]:
        """Reduce the whole prompt `[1, n, D]` before a layer; returns how.

        `entered` `[1, n, D]` is what entered the layer before, where reading stopped there.
        """
        if entered is not None:
            self.step.enter(layer - 1, entered)
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

    def end(self, layers: Sequence[tuple[RowBuffer | None, Any]]) -> None:
        """Take the keys and values of the next layers, in which all of the prompt has been read.

        Layers without any have the state of a convolution.
        """
        n, index, stage = self.step.sequences.length, len(self._parts), self._stage
        mine: list[tuple[int, Tensor, Tensor]] = []  # layers on which the policy acts
        found: dict[int, Entries | State | Held] = {}
        for i, (own, state) in enumerate(layers, index):
            if own is None:
                found[i] = State(state)
                continue
            keys, values = own.read(0, 0, n), own.read(1, 0, n)
            if stage is None or i not in stage.layers or self._recipe.drafts:
                found[i] = self._all(i, keys, values)
            if self._recipe.drafts:
                self._whole.append(self._all(i, keys, values))
            if stage is not None and i in stage.layers:
                mine.append((i, keys, values))
        if stage is not None and mine:
            alike = stage.alike and len({keys.shape for _, keys, _ in mine}) == 1
            alike = alike and not self._recipe.drafts  # which choose beside what stands
            found |= self._together(stage, mine) if alike else self._apart(stage, mine)
        self._parts += [found[i] for i in sorted(found)]

    def _all(self, index: int, keys: Tensor, values: Tensor) -> Entries:
        """Return the entries of a layer on which nothing acts."""
        most = self.step.sequences.length + self._more
        if self._lane.kinds[index] == SLIDING:
            return windowed(keys, values, self._lane.window, most)
        return Entries(KVBlock((keys,), (values,)), most)

    def _together(
        self, stage: KVStage, layers: Sequence[tuple[int, Tensor, Tensor]]
    ) -> dict[int, Entries | Held]:
        """Let the policy act on layers at once."""
        indices, keys, values = zip(*layers, strict=True)
        known = [self._notes.pop(index, _LayerNotes()) for index in indices]
        masses = [each.masses_of_all() for each in known]
        joined = {name: torch.cat([each[name] for each in masses]) for name in masses[0]}
        raw = [each.raw_of_all() for each in known if each.raw]
        both = torch.stack(keys), torch.stack(values)
        given = self.step.sequences, joined, raw
        left, packs, leaving = stage.end_together(indices[-1], both, *given)
        found = dict[int, Entries | Held]()
        for index, block, packed in zip(indices, left, packs, strict=True):
            packing = stage.packs(block, packed, self._more)
            if packing is None:
                found[index] = _entries(block, self._more, leaving)
            else:
                found[index] = _packed(block, packed, packing, self._more)
        return found

    def _apart(
        self, stage: KVStage, layers: Sequence[tuple[int, Tensor, Tensor]]
    ) -> dict[int, Entries | Held]:
        """Let the policy act on layer after layer."""
        return {index: self._chosen(stage, index, *both) for index, *both in layers}

    def _chosen(self, stage: KVStage, index: int, keys: Tensor, values: Tensor) -> Entries | Held:
        cache, known = self._cache, self._notes.pop(index, _LayerNotes())
        cache.update(keys[None], values[None], index)
        raw, masses = known.raw_of_all() if known.raw else None, known.masses_of_all()
        turned = stage.turned(self._last, index)
        stage.arrive(cache, index, self.step.sequences, masses, raw, turned=turned)
        stage.prompt_ends(cache, index)
        return part_of(stage, cache, index, self._more)

    def row(self) -> AnswerRow:
        """Return the row of the answer; all layers have ended."""
        if self._recipe.drafts:
            return AnswerRow(list(self._whole))
        return row_of(self._parts, self._stage, getattr(self, "_cache", None))

    def view(self) -> AnswerRow | None:
        """Return the row on which the model drafts; None where it would read all there is."""
        if not self._recipe.drafts:
            return None
        pairs = zip(self._parts, self._whole, strict=True)
        both = [(a, b) for a, b in pairs if isinstance(a, Entries) and isinstance(b, Entries)]
        shorter = any(part.keys.shape[1] < whole.keys.shape[1] for part, whole in both)
        return AnswerRow(list(self._parts)) if shorter and len(both) == len(self._parts) else None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Join queries `[1, H, n, d]` of the parts of a prompt."""
    return torch.cat(list(parts), 2)


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
    claim(cache)  # decode steps make their masks
    layer = cache.layers[index]
    rest = stage.at_rest(layer, more)
    if rest is None and (packing := stage.packing(layer)) is not None:
        cache.layers[index] = None
        block = KVBlock((layer.keys[0],), (layer.values[0],))
        return _packed(block, layer.rows[0].packs, packing, more)
    if rest is None:
        token = 2 * layer.keys[:, :, :1].nbytes or 2 * layer.keys.shape[1] * layer.keys.shape[3] * 4
        most = layer_bytes(layer) + token * more
        if stage.selects:
            most = token * entries_with_room(stage.plan, int(layer.keys.shape[2]) + more)
        return Held(cache, index, most, partial(stage.attend, cache, index))
    cache.layers[index] = None
    return _entries(rest[0], more, rest[1])


def _entries(block: KVBlock, more: int, leaving: Leaving | None) -> Entries:
    """Return entries to which so many tokens come, and from which others leave."""
    most = int(block.keys[0].shape[1]) + more
    if leaving is not None and (gone := len(leaving(most))):
        most += 1 - gone  # the new token comes before it is decided what goes
    return Entries(block, most, leaving)


def _packed(block: KVBlock, packs: Sequence[KVBlock], packing: Packing, more: int) -> PackedEntries:
    """Return recent entries behind those in packs; as many more come, which are packed in turn."""
    quantiser = packing.quantiser
    assert quantiser is not None
    heads, recent, width = block.keys[0].shape
    itemsize = block.keys[0].element_size()
    share = packed_share(quantiser, itemsize)
    whole = recent + sum(int(pack.keys[0].shape[-2]) for pack in packs) + more
    token = 2 * heads * width * itemsize
    return PackedEntries(
        block,
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
    if stage is None or not any(isinstance(part, Held) for part in parts):
        return AnswerRow(list(parts))
    return AnswerRow(list(parts), partial(stage.settle, cache), stage.trace)


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
    position = plan.position if plan.select is None else ()  # that is what it always reads
    specs = [*position, *([plan.score] if plan.score else [])]
    if any(spec.method.uneven and spec.method.adaptive for spec in specs):
        return most
    if specs and all(spec.budget is not None for spec in specs):
        kept = min(prompt, sum(_kept(spec, prompt) for spec in specs))
        always = plan.score is None
        most = min(most, kept + 1) if always and kept < prompt else kept + more
    if (quantiser := plan.quantiser()) is not None:
        recent = quantiser.residual + max(quantiser.group, quantiser.residual)
        most = min(most, recent + round(packed_share(quantiser, itemsize) * most))
    return entries_with_room(plan, most)


def entries_with_room(plan: CachePlan, entries: int) -> int:
    """Return the entries whose memory a layer takes that holds so many under a plan, at most."""
    selector = plan.selector()
    if selector is None:
        return entries
    return round(roomy(entries) * (1 + selector.beside)) + 32  # what it keeps has room, too


def _kept(spec: Spec, n: int) -> int:
    return min(n, spec.budget) if isinstance(spec.budget, int) else count(spec.budget, n) or n
