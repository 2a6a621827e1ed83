"""A KV policy on one attached model: the life of a cache from prompt to decode step."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import KVBlock
from mmfast.core.trace import Row, Trace
from mmfast.models.cache_name import cache_of, layered_cache_of
from mmfast.models.decoder.rotary import Angles
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import Eviction, Leaving, Slid, basis
from mmfast.models.kv.gates import Gating
from mmfast.models.kv.packing import Packing
from mmfast.models.kv.packs import nbytes, shrinkable
from mmfast.models.kv.patterns import SIGNALS, gates_of, require_heads
from mmfast.models.kv.queries import Expectation, RawPrompt, expected_angles
from mmfast.models.kv.repetition import Repetition
from mmfast.models.kv.retrieval import (
    WHOLE,
    Reading,
    as_chosen,
    chosen,
    frames_of,
    read_of,
    spots_of,
)
from mmfast.models.kv.selection import Selection
from mmfast.models.kv.sinks import FollowingSinks
from mmfast.models.patching import stand_behind
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.call import (
    Arming,
    PassState,
    PromptPart,
    PromptTracker,
    length_of,
)
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.reduction.training import checkpointed, refuse_cache
from mmfast.models.wrappers import (
    LayerCall,
    attention_at,
    base_of,
    decoder_of,
    keeps_all,
    layers_of,
)


class _Account(threading.local):
    """Sums over the layers of a prompt, per thread."""

    fresh: notes.FreshNotes | None = None
    ms: float = 0.0
    before: int = 0
    after: int = 0
    bytes: int = 0


class KVStage:
    """State and hooks of a KV policy on one attached model; traces a row `kv` per prompt.

    Policies act on layers of full attention: a sliding window is bounded by itself, and a
    convolution has no keys.
    """

    def __init__(self, model: Any, plan: CachePlan, trace: Trace, state: PassState) -> None:
        self._model, self.plan, self.trace, self._state = model, plan, trace, state
        text = decoder_of(model)
        self._layers: dict[int, Any] = {
            index: layer
            for index, layer in enumerate(layers_of(text))
            if keeps_all(text.config, index) and attention_at(text, index) is not None
        }
        self._modules = {index: attention_at(text, index) for index in self._layers}
        if SIGNALS & set(plan.needs):
            require_heads(model, str(plan))
        self._gating = None
        if plan.gated:
            require_heads(model, str(plan), gates=True)
            self._gating = Gating(self._modules, gates_of(self._modules), state, trace)
        self._eviction = Eviction(plan, state, self._modules)
        self._packing = Packing(plan, self._eviction.always)
        self._settles = self._eviction.always or self._packing.packs
        self._asks = plan.probes is not None and plan.every > 0  # probes of answers, too
        self._attention = notes.Attention(plan, self._eviction.rescores or self._asks, state)
        self._reading = None
        self._raw = RawPrompt(text) if plan.retrieve is not None or plan.future else None
        if plan.retrieve is not None and self._raw is not None:
            self._reading = Reading(plan, text, self._layers, state, self._raw)
        self._expectation = Expectation(text, *plan.future) if plan.future else None
        self._eviction.expectation, self._eviction.trace = self._expectation, trace
        if plan.follows:
            self._eviction.sinks = FollowingSinks(model, self._modules, plan.follows)
        self._repetition = None
        if plan.repeats and self._eviction.acts:
            self._repetition = Repetition(
                model, self._modules, plan.repeats, trace, state, plan.asks, plan.composes
            )
        self._selection = Selection.of(plan, self._layers, state, trace, model)
        self._prompts, self._account = PromptTracker(), _Account()
        self._arming = Arming(self._on_layers)

    # Of two stages, whose hooks go out and in apart, one sees a layer before the other acts on it.
    _first = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks in, hooks out."""
        base = base_of(self._model)
        with ExitStack() as stack:
            stack.enter_context(self._prompts.told_by_generate(self._model))
            enter, leave = map(torch.compiler.disable, (self._enter, self._leave))
            stack.callback(base.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(base.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(self._arming.installed())
            if self._reading is not None:
                stack.enter_context(self._reading.watching())
            if self._selection is not None:
                stack.enter_context(self._selection.watching(self._modules))
            yield

    @contextmanager
    def _on_layers(self) -> Iterator[None]:
        modules = self._modules
        with ExitStack() as stack:
            for index, layer in self._layers.items():
                after = partial(torch.compiler.disable(self._after), index)
                behind = LayerCall(layer).behind(after)
                stack.callback(stand_behind(layer, behind, first=self._first))
            if self._looks:
                stack.enter_context(self._attention.watching(modules))
            if self._raw is not None:
                stack.enter_context(self._raw.capturing())
            if self._gating is not None:
                stack.enter_context(self._gating.watching())
            stack.enter_context(self._eviction.masking(modules))
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, state = layered_cache_of(kwargs), self._state
        past = 0 if cache is None else int(cache.get_seq_length())
        length = length_of(kwargs) if not args else int(args[0].shape[1])
        state.part, state.cache = self._prompts.part(past, length), cache
        state.active = kwargs.get("use_cache") is not False
        self._account.__dict__.clear()
        if length > 1 and not torch.compiler.is_compiling() and self._keeps_nothing(module, kwargs):
            self.trace.warn(
                f"cache {self.plan} did nothing: this call keeps no keys and values "
                "(use_cache=False, or gradient checkpointing); leave cache= out here"
            )
        if length > 1 and state.part is None and self._eviction.always and self._eviction.rescores:
            self.trace.warn(
                f"cache {self.plan} chooses again while an answer is written, and drafts are read "
                "before it can: the answer may differ from that of greedy decoding; leave out the "
                "draft (assistant_model, prompt_lookup_num_tokens)"
            )
        always = self._eviction.rescores or self._eviction.by_head or self._asks
        self._arming.begin(state.part is not None or always or length > 1)
        if self._raw is not None:
            self._raw.enter(state.active and state.part is not None)
        if cache is not None and self._settles:
            self._settle(cache, state.part is None or state.part.first)
        if self._selection is not None:
            ids = args[0] if args else kwargs.get("input_ids")
            self._selection.enter(cache, state.part is None, ids)

    def _keeps_nothing(self, base: nn.Module, kwargs: dict[str, Any]) -> bool:
        cache = cache_of(kwargs)
        if base.training and any(map(checkpointed, self._layers.values())):
            refuse_cache(self._layers.values(), cache)
            return True
        if cache is not None:
            return False
        given = kwargs.get("use_cache")
        return not (decoder_of(self._model).config.use_cache if given is None else given)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._state.active, self._state.cache = False, None
        self._arming.end()
        if self._raw is not None:
            self._raw.leave()
        if self._selection is not None:
            self._selection.leave()

    def _settle(self, cache: Any, over: bool) -> None:
        """Before a call: evict and pack what the last one brought; `over`: its prompt has ended."""
        memo: list[Slid] = []
        for index in self._layers:
            layer = cache.layers[index] if index < len(cache.layers) else None
            if layer is None or not is_short(layer) or layer.notes is None:
                continue
            self._eviction.step(cache, index, over, memo)
            if over:
                self._packing.step(layer)

    def _after(
        self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        part, call, cache = self._state.part, self._state.call, cache_of(kwargs)
        masses = self._attention.take(index)
        if cache is None:
            return
        if part is None:
            self._count_step(cache.layers[index], index, masses)
            return
        assert call is not None and call.step is not None
        raw = None if self._raw is None else self._raw.captured(index)
        turned = kwargs.get("position_embeddings")
        self.arrive(cache, index, call.step.sequences, masses, raw, call.step.past, turned)
        if self._gating is not None:
            self._gating.arrive(cache.layers[index], index)
        if self._repetition is not None:
            self._repetition.arrive(cache, index, call, part)
            if part.last and index == max(self._layers):
                self._repeat(self._repetition, cache, part.drafts)
        elif part.last:
            self.prompt_ends(cache, index, part.drafts)

    def _repeat(self, repetition: Repetition, cache: Any, drafts: int) -> None:
        """Act on all layers, once the prompt has been read a second time."""
        start = time.perf_counter()
        repetition.run(cache, drafts)
        self._account.ms += (time.perf_counter() - start) * 1e3
        for index in self._layers:
            self.prompt_ends(cache, index, drafts)

    def _count_step(self, layer: Any, index: int, masses: dict[str, Tensor]) -> None:
        """Note what a later choice reads of a decode step: attention of its query, its score."""
        if not is_short(layer) or layer.notes is None:
            return
        if self._gating is not None:
            self._gating.arrive(layer, index)
        if not masses:
            return
        if notes.WINDOW in masses and not self._eviction.votes(layer):
            del masses[notes.WINDOW]
        notes.add_masses(layer, masses)

    def attend(
        self, cache: Any, index: int, attention: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store the token of a decode step of one row, `[1, H, 1, d]`, and attend: `[1, 1, Hq, d]`.

        For callers that run the layers themselves, with no hooks in place, and begin a step with
        `settle`; `attention` is the call of the model (`serve.engine.lane.AttentionCall`).
        """
        layer, module = cache.layers[index], attention.module
        keys, values = layer.update(key, value)
        if self._reading is not None:
            keys, values = as_chosen(layer, keys, values)
        if (self._eviction.rescores or self._asks) and self._attention.reads:
            self._state.active, self._state.part = True, None
            seen = query, keys, values, None, attention.scaling, True
            try:
                self._attention.look(index, module, *seen, layer=layer)
            finally:
                self._state.active = False
            self._count_step(layer, index, self._attention.take(index))
        if self._selection is not None:
            return self._selection.attend(index, attention, query, keys, values)
        if (mask := self._eviction.mask_of_heads(layer, module, query)) is None:
            return attention(query, keys, values, None)  # type: ignore[no-any-return]
        given = module, query, keys, values, mask, *attention.args
        return attention.stock(*given, **attention.options)[0]  # type: ignore[no-any-return]

    @property
    def _looks(self) -> bool:
        acts = self._eviction.acts or self.plan.bits or self._packing.pruner
        return bool(acts) and self._attention.reads

    def look(
        self, index: int, part: PromptPart, module: nn.Module, *attention: Any
    ) -> dict[str, Tensor]:
        """Return the notes on the attention of a layer to a part of a prompt of one row.

        `attention` are queries, keys, values, mask, scaling, and whether it is causal. For callers
        that run the layers themselves, with no hooks in place.
        """
        if not self._looks:
            return {}
        self._state.active, self._state.part = True, part
        try:
            self._attention.look(index, module, *attention)
        finally:
            self._state.active, self._state.part = False, None
        return self._attention.take(index)

    @property
    def retrieves(self) -> bool:
        """`arrive` needs keys and queries before RoPE."""
        return self._raw is not None

    def turned(self, positions: Tensor, index: int) -> Angles | None:
        """Cosines and sines of positions `[A, n]` in a layer, for `arrive`; None if not needed."""
        if self._expectation is None:
            return None
        return self._expectation.angles(positions, positions.float(), index)

    @property
    def layers(self) -> Collection[int]:
        """The decoder layers on which the policy acts."""
        return self._layers.keys()

    def arrive(
        self,
        cache: Any,
        index: int,
        sequences: Sequences,
        masses: Mapping[str, Tensor],
        raw: tuple[Tensor, Tensor] | None,
        past: Tensor | None = None,
        turned: Angles | None = None,
    ) -> None:
        """Note what a part of a prompt has stored in a layer.

        `raw` are its keys and queries before RoPE; `past` is False at padding among earlier tokens;
        `turned` are cosines and sines of its tokens, or of the last one.
        """
        layer, count = shrinkable(cache, index), sequences.length
        account = self._account
        account.fresh = notes.note_part(layer, sequences, past, account.fresh)
        masses = dict(masses)
        queries, power = masses.pop(notes.QUERIES, None), masses.pop(notes.POWER, None)
        if power is not None:
            layer.power = power if layer.power is None else layer.power + power
        if queries is not None:
            before = layer.pending
            layer.pending = queries if before is None else torch.cat([before, queries], 2)
        if masses and (self._eviction.acts or self.plan.bits):
            notes.add_masses(layer, masses)
        for name, numbers in (
            (notes.FRAME, partial(frames_of, block=WHOLE)),
            (notes.SPOT, spots_of),
        ):
            if name in self.plan.needs:
                notes.mark(layer, name, numbers(sequences))
        if self._selection is not None:
            self._selection.arrive(layer, sequences)
        if self._expectation is not None:
            assert raw is not None
            part, kinds = self._state.part, notes.kinds_of(sequences)
            end = count - (part.drafts if part else 0)  # what may be taken back is not read
            turned = expected_angles(turned, count, end, self._layers[index])
            queries, kinds = raw[1][:, :, :end], kinds[:, :end]
            layer.pending = self._expectation.arrive(layer.pending, queries, kinds, turned)
        if self._reading is not None:
            assert raw is not None
            self._reading.arrive(layer, sequences, *raw)

    def at_rest(self, layer: Any, more: int) -> tuple[KVBlock, Leaving | None] | None:
        """Return what decode steps of one row read of a layer, and what leaves it at each of them.

        None where the policy has to act on the layer itself within `more` steps.
        """
        plain = KVBlock((layer.keys[0],), (layer.values[0],))
        if self.selects:
            return None
        if not is_short(layer) or layer.notes is None:
            return plain, None
        leaving = None
        if self._eviction.always:
            leaving = self._eviction.leaving(basis(layer, 0))
            if leaving is None:
                return None
        if self._packing.acts(layer, more):
            return None
        where = None if self._reading is None else chosen(layer)
        if where is not None:
            plain = plain.each(lambda x, _: x.index_select(1, where.to(x.device)))
        return plain, leaving

    def packing(self, layer: Any) -> Packing | None:
        """Return the store of a layer of one row of which nothing leaves, and all of it is read."""
        bare = not self._eviction.always and self._reading is None
        return self._packing if bare and self._packing.alone(layer) else None

    def settle(self, cache: Any) -> None:
        """Begin a decode step: evict and pack what the last one brought, or choose anew.

        Layers that are None rest.
        """
        self._settle(cache, True)
        if self._selection is not None:
            self._selection.enter(cache, True, None)

    def prompt_ends(self, cache: Any, index: int, drafts: int = 0) -> None:
        """Act on a layer behind a prompt but for drafts at its end; the last layer adds the row."""
        layer = cache.layers[index]
        notes.remember_basis(layer, drafts)
        start = time.perf_counter()
        before = after = notes.entries(layer) * int(layer.keys.shape[0])
        if self._eviction.acts:
            before, after = self._eviction.prompt_ends(cache, index, drafts)
        if self._reading is not None:
            self._reading.prompt_ends(layer, drafts)
            after = int(read_of(layer).sum())
        layer = self._packing.prompt(cache, index, drafts)
        self._count(index, before, after, time.perf_counter() - start, nbytes(layer))

    @property
    def selects(self) -> bool:
        """The policy chooses at every decode step what is read."""
        return self._selection is not None

    @property
    def alike(self) -> bool:
        """The policy acts alike on all layers of a prompt; see `end_together`."""
        partly = self._eviction.always or self._reading is not None  # not all of a pack is read
        mixed = self.plan.bits is not None or (partly and self._packing.quantiser is not None)
        apart = self.selects or self._packing.pruner is not None
        return not mixed and not apart and self._eviction.alike

    def end_together(
        self,
        last: int,
        both: tuple[Tensor, Tensor],
        sequences: Sequences,
        masses: Mapping[str, Tensor],
        raw: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[list[KVBlock], list[list[KVBlock]], Leaving | None]:
        """Act on layers of a prompt of one row at once, of which `last` is the last.

        `both` are keys and values `[L, H, n, d]`, `masses` `[L, H, n]` the attention received, and
        `raw` as for `arrive`, by layer. Returns by layer what is read in full precision, and packs;
        and what leaves at each step.
        """
        start, (keys, values) = time.perf_counter(), both
        layers, _, n, _ = keys.shape
        kinds = notes.kinds_of(sequences)[0].to(keys.device)
        if self._eviction.acts:
            keys, values = self._eviction.left(keys, values, kinds, masses)
        older = self._packing.older(keys.shape[2])
        packs = self._packing.by_layer(keys[:, :, :older], values[:, :, :older])
        pairs = zip(keys[:, :, older:], values[:, :, older:], strict=True)
        rest, left = [KVBlock((k,), (v,)) for k, v in pairs], keys.shape[2] * layers
        held = sum(block.nbytes for mine in (rest, *packs) for block in mine)
        if self._reading is not None:
            places = self._reading.together(sequences, kinds, raw)
            rest = [
                KVBlock((k.index_select(1, where),), (v.index_select(1, where),))
                for k, v, where in zip(keys, values, places, strict=True)
            ]
            left = sum(map(len, places))
        self._count(last, n * layers, left, time.perf_counter() - start, held)
        return rest, packs, self._eviction.leaving(n) if self._eviction.always else None

    def packs(self, rest: KVBlock, packs: Sequence[KVBlock], more: int) -> Packing | None:
        """Return the store of a layer that has packs, or will within `more` decode steps."""
        full = self._packing.full
        soon = bool(full) and rest.keys[0].shape[1] + more >= full
        return self._packing if packs or soon else None

    def _count(self, index: int, before: int, after: int, seconds: float, held: int) -> None:
        """Add up what was done to layers up to `index`; behind the last one, trace it."""
        account = self._account
        account.ms += seconds * 1e3
        account.before, account.after = account.before + before, account.after + after
        account.bytes += held
        if index == max(self._layers):
            account.fresh = None  # an answer may keep this stage, and with it media of the prompt
            count = len(self._layers)
            before, after = round(account.before / count), round(account.after / count)
            row = Row("kv", before, after, account.ms, account.bytes, str(self.plan))
            self.trace.rows.append(row)
