"""A KV policy on one attached model: the life of a cache from prompt to decode step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.core.trace import Row, Trace
from mmfast.models.kv import notes
from mmfast.models.kv.eviction import Eviction, Leaving, Slid, chooser
from mmfast.models.kv.packs import (
    PackedLayer,
    RowPacker,
    nbytes,
    pack_recent,
    packed_layer,
    packs_of,
    shrinkable,
    split_packs,
)
from mmfast.models.kv.retrieval import Reading, as_chosen, chosen, read_of
from mmfast.models.patching import override, stand_behind
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.call import Arming, PassState, PromptPart, length_of
from mmfast.models.reduction.sequence import Sequences
from mmfast.models.wrappers import FULL, base_of, decoder_of, kind_of
from mmfast.ops.quantisation import Quantiser, quantise


class _Account(threading.local):
    """Sums over the layers of a prompt, per thread."""

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
        self._model, self._plan, self._trace, self._state = model, plan, trace, state
        text = decoder_of(model)
        self._layers: dict[int, Any] = {
            index: layer
            for index, layer in enumerate(text.layers)
            if kind_of(text.config, index) == FULL and hasattr(layer, "self_attn")
        }
        self._eviction = Eviction(plan, len(text.layers), state)
        self._packing = Packing(plan, len(text.layers), self._eviction.always)
        self._attention = notes.Attention(plan, self._eviction.rescores, state)
        self._reading = None
        if plan.retrieve is not None:
            self._reading = Reading(plan, text, self._layers, state)
        self._prompts, self._account = PromptTracker(), _Account()
        self._arming = Arming(self._on_layers)

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
            yield

    @contextmanager
    def _on_layers(self) -> Iterator[None]:
        modules = {index: layer.self_attn for index, layer in self._layers.items()}
        with ExitStack() as stack:
            for index, layer in self._layers.items():
                after = partial(torch.compiler.disable(self._after), index)
                stack.callback(stand_behind(layer, after))
            if (self._eviction.acts or self._plan.bits) and self._attention.reads:
                stack.enter_context(self._attention.watching(modules))
            if self._reading is not None:
                stack.enter_context(self._reading.capturing())
            stack.enter_context(self._eviction.masking(modules))
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, state = kwargs.get("past_key_values"), self._state
        past = 0 if cache is None else int(cache.get_seq_length())
        length = length_of(kwargs) if not args else int(args[0].shape[1])
        state.part, state.cache = self._prompts.part(past, length), cache
        state.active = kwargs.get("use_cache") is not False
        self._account.__dict__.clear()
        if length > 1 and not torch.compiler.is_compiling() and self._keeps_nothing(module, kwargs):
            self._trace.warn(
                f"cache {self._plan} did nothing: this call keeps no keys and values "
                "(use_cache=False, or gradient checkpointing); leave cache= out here"
            )
        self._arming.begin(state.part is not None or self._eviction.rescores or length > 1)
        if self._reading is not None:
            self._reading.enter()
        if cache is not None and (self._eviction.always or self._packing.packs):
            self._settle(cache, state.part is None or state.part.first)

    def _keeps_nothing(self, base: nn.Module, kwargs: dict[str, Any]) -> bool:
        if base.training and any(
            getattr(layer, "gradient_checkpointing", False) for layer in self._layers.values()
        ):
            return True
        if kwargs.get("past_key_values") is not None:
            return False
        given = kwargs.get("use_cache")
        return not (decoder_of(self._model).config.use_cache if given is None else given)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._state.active, self._state.cache = False, None
        self._arming.end()
        if self._reading is not None:
            self._reading.leave()

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
        part, call, cache = self._state.part, self._state.call, kwargs.get("past_key_values")
        masses = self._attention.take(index)
        if cache is None:
            return
        if part is None:
            layer = cache.layers[index]
            if masses and is_short(layer) and layer.notes is not None:
                notes.add_masses(layer, masses)
            return
        assert call is not None and call.step is not None
        raw = None if self._reading is None else self._reading.captured(index)
        self.arrive(cache, index, call.step.sequences, masses, raw, call.step.past)
        if part.last:
            self.prompt_ends(cache, index, part.drafts)

    def look(
        self, index: int, part: PromptPart, module: nn.Module, *attention: Any
    ) -> dict[str, Tensor]:
        """Return the notes on the attention of a layer to a part of a prompt of one row.

        `attention` are queries, keys, values, mask, scaling, and whether it is causal. For callers
        that run the layers themselves, with no hooks in place.
        """
        if not self._attention.reads or not (self._eviction.acts or self._plan.bits):
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
        return self._reading is not None

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
    ) -> None:
        """Note what a part of a prompt has stored in a layer.

        `raw` are its keys and queries before RoPE; `past` is False at padding among earlier tokens.
        """
        layer, count = shrinkable(cache, index), sequences.length
        if layer.notes is None:
            notes.begin(layer, notes.entries(layer) - count, past, len(layer.keys))
        notes.arrive(layer, notes.kinds_of(sequences))
        notes.add_masses(layer, masses)
        if self._reading is not None:
            assert raw is not None
            self._reading.arrive(layer, sequences, *raw)

    def at_rest(self, layer: Any, more: int) -> tuple[KVBlock, Leaving | None] | None:
        """Return what decode steps of one row read of a layer, and what leaves it at each of them.

        None where the policy has to act on the layer itself within `more` steps.
        """
        plain = KVBlock((layer.keys[0],), (layer.values[0],))
        if not is_short(layer) or layer.notes is None:
            return plain, None
        leaving = None
        if self._eviction.always:
            leaving = self._eviction.leaving(layer)
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

    def read(self, layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a decode step of one row reads of the entries of a layer."""
        return (keys, values) if self._reading is None else as_chosen(layer, keys, values)

    def settle(self, cache: Any) -> None:
        """Evict and pack what the last decode step brought; layers that are None rest."""
        self._settle(cache, True)

    def prompt_ends(self, cache: Any, index: int, drafts: int = 0) -> None:
        """Act on a layer behind a prompt but for drafts at its end; the last layer adds the row."""
        layer, account = cache.layers[index], self._account
        notes.remember_basis(layer)
        start = time.perf_counter()
        before = after = notes.entries(layer) * len(layer.keys)
        if self._eviction.acts:
            before, after = self._eviction.prompt_ends(cache, index, drafts)
        if self._reading is not None:
            self._reading.prompt_ends(layer, drafts)
            after = int(read_of(layer).sum())
        layer = self._packing.prompt(cache, index, drafts)
        account.ms += (time.perf_counter() - start) * 1e3
        account.before, account.after = account.before + before, account.after + after
        account.bytes += nbytes(layer)
        if index == max(self._layers):
            count = len(self._layers)
            before, after = round(account.before / count), round(account.after / count)
            row = Row("kv", before, after, account.ms, account.bytes, str(self._plan))
            self._trace.rows.append(row)


class Packing:
    """The store of a plan: `quant`, or the two precisions of `zipvl`.

    It packs behind a prompt, and whenever enough tokens have come since; small packs under
    `evicting`, as entries go at every step.
    """

    def __init__(self, plan: CachePlan, layers: int, evicting: bool) -> None:
        self._plan, self._layers = plan, layers
        self.quantiser: Quantiser | None = plan.quantiser()
        q = self.quantiser
        self._block = 0 if q is None else max(q.group, q.residual)
        self._size = self._block if evicting else None

    @property
    def packs(self) -> bool:
        """Entries are packed."""
        return self.quantiser is not None or self._plan.bits is not None

    def acts(self, layer: Any, more: int) -> bool:
        """Return True if a layer of one row has packs, or will within `more` decode steps."""
        if not isinstance(layer, PackedLayer):
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
        else:
            packer = partial(self._mixed, layer, self._important(layer, index))
        pack_recent(layer, packer, lambda recent: max(0, recent - keep))
        return layer

    def step(self, layer: Any) -> None:
        """Pack before a call, where enough tokens have been generated since."""
        if self.quantiser is not None and isinstance(layer, PackedLayer):
            pack_recent(layer, self._plain, self.due)

    @property
    def full(self) -> int:
        """Recent entries of a row from which on some are packed."""
        return 0 if self.quantiser is None else self.quantiser.residual + self._block

    def due(self, recent: int) -> int:
        """Return how many of the recent entries of a row are to be packed before a call."""
        return recent - self.full + self._block if recent >= self.full else 0

    def packed(self, keys: Tensor, values: Tensor) -> list[KVBlock]:
        """Return packs of keys and values `[H, n, d]`."""
        quantiser = self.quantiser
        assert quantiser is not None
        return packs_of(keys, values, lambda x, k: quantiser.pack(x, keys=k), self._size)

    def _plain(self, row: int, keys: Tensor, values: Tensor) -> tuple[list[KVBlock], None]:
        return self.packed(keys, values), None

    def alone(self, layer: Any) -> bool:
        """Return True if a layer of one row has nothing but packs and what came since."""
        plain = self.quantiser is not None and isinstance(layer, PackedLayer)
        return plain and layer.rows[0].live is None and not layer.front[0]

    def _important(self, layer: PackedLayer, index: int) -> list[Reduction]:
        """Per row what the plan keeps, which here means: in more bits."""
        choose = chooser(self._plan, layer, index, self._layers)
        real = notes.fill(layer)[notes.KIND][:, 0] != notes.PADDING
        return [choose(b, mine.nonzero()[:, 0]) for b, mine in enumerate(real)]

    def _mixed(
        self, layer: PackedLayer, chosen: list[Reduction], row: int, keys: Tensor, values: Tensor
    ) -> tuple[list[KVBlock], Tensor]:
        assert self._plan.bits is not None
        start, keep = layer.rows[row].packed, chosen[row].keep[0]  # the same in all heads
        here = keep[(keep >= start) & (keep < start + keys.shape[1])] - start
        high, low = (partial(_in_bits, bits) for bits in self._plan.bits)
        return split_packs(keys, values, here, (high, low))


def _in_bits(bits: int, x: Tensor, keys: bool) -> Any:
    return x if bits == 16 else quantise(x, bits, 32, along_tokens=keys)


class _PromptState(threading.local):
    inside = False
    begin: int = 0
    end: int | None = None


class PromptTracker:
    """Distinguishes prompts from decode steps of one model, per thread."""

    def __init__(self) -> None:
        self._local = _PromptState()

    @contextmanager
    def told_by_generate(self, model: Any) -> Iterator[None]:
        """Take the length of a prompt from the `generate` of a model."""
        with ExitStack() as stack:
            if hasattr(model, "_prepare_model_inputs"):  # a base model does not generate
                stack.enter_context(override(model, "generate", self._generate))
                stack.enter_context(override(model, "_prepare_model_inputs", self._inputs))
            yield

    def part(self, past: int, length: int) -> PromptPart | None:
        """The part of a prompt that a call of `length` tokens brings; None for a decode step."""
        local = self._local
        if not local.inside:  # the caller runs the model: several tokens are a prompt
            return PromptPart() if length > 1 else None
        if local.end is None or past >= local.end:
            return None
        behind = past + length - local.end
        return PromptPart(max(0, behind), max(0, -behind), past <= local.begin)

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        local = self._local
        before = local.inside, local.begin, local.end
        local.inside, local.end = True, None
        try:
            return stock(*args, **kwargs)
        finally:
            local.inside, local.begin, local.end = before

    def _inputs(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        ids, name, options = stock(*args, **kwargs)
        mask: Tensor | None = options.get("attention_mask")
        # A mask spans the cache too; without one, ids are those of the whole conversation.
        end = int((ids if mask is None else mask).shape[1])
        cache = options.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        # An answer that goes on feeds its last token again: that is no prompt.
        self._local.begin = past
        self._local.end = None if past and end - past <= 1 else end
        return ids, name, options
