"""A KV policy on one attached model: what leaves its cache, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.trace import Row, Trace
from mmfast.models.kv.eviction import DraftMasks, Known, Slid, chooser, evict, pin, slide, stayer
from mmfast.models.kv.notes import (
    BASIS,
    WINDOW,
    Attention,
    add_masses,
    arrive,
    begin,
    entries,
    kinds_of,
    remember_basis,
)
from mmfast.models.kv.packed import shrinkable
from mmfast.models.kv.packing import Packing, nbytes
from mmfast.models.kv.prompt import PromptPart, PromptTracker
from mmfast.models.kv.retrieval import Reading, read_of
from mmfast.models.patching import stand_behind
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.call import Arming, Call, length_of
from mmfast.models.reduction.masks import FULL, kind_of


class _PolicyState(threading.local):
    active = False
    cache: Any = None
    part: PromptPart | None = None
    ms: float = 0.0
    before: int = 0
    after: int = 0
    bytes: int = 0


class KVStage:
    """State and hooks of a KV policy on one attached model.

    Policies act on layers of full attention: a sliding window is bounded by itself, and a
    convolution has no keys.

    Args:
        model: Model of a known family.
        plan: The policies.
        trace: Gets a row `kv` per prompt.
    """

    def __init__(self, model: Any, plan: CachePlan, trace: Trace) -> None:
        self._model, self._plan, self._trace = model, plan, trace
        self._base, text = model.base_model, model.get_decoder()
        self._modules = text.layers
        self._layers = [
            index
            for index, layer in enumerate(text.layers)
            if kind_of(text.config, index) == FULL and hasattr(layer, "self_attn")
        ]
        specs = (*plan.position, *((plan.score,) if plan.score else ()))
        kept = any(spec.whole for spec in specs) or plan.bits or plan.retrieve
        self._evicts = bool(specs) and not kept
        always = [spec.method.moment == "always" for spec in specs]
        shares = any(isinstance(spec.budget, float) for spec in specs)
        self._always, self._each = any(always), all(always) and not shares
        self._rescores = plan.score is not None and plan.score.method.moment == "always"
        self._packing = Packing(plan, len(text.layers), self._always and self._evicts)
        self._reading = None
        if plan.retrieve is not None:
            self._reading = Reading(plan, text, self._layers, self._seeing)
        self._prompts, self._known = PromptTracker(), Known()
        self._local = _PolicyState()
        self._call: Callable[[], Call | None] = lambda: None
        self._attention = Attention(plan, self._rescores, self._now)
        self._arming = Arming(self._on_layers)

    @property
    def prompting(self) -> bool:
        """Whether the call that has just begun in this thread brings a part of a prompt."""
        return self._local.part is not None

    @contextmanager
    def installed(self, call: Callable[[], Call | None]) -> Iterator[None]:
        """Hooks in, hooks out; `call` gives the call that this thread is in."""
        self._call = call
        with ExitStack() as stack:
            stack.enter_context(self._prompts.told_by_generate(self._model))
            enter, leave = map(torch.compiler.disable, (self._enter, self._leave))
            handles = [
                self._base.register_forward_pre_hook(enter, with_kwargs=True),
                self._base.register_forward_hook(leave, always_call=True),
            ]
            for handle in handles:
                stack.callback(handle.remove)
            stack.enter_context(self._arming.installed())
            if self._reading is not None:
                stack.enter_context(self._reading.watching())
            yield

    @contextmanager
    def _on_layers(self) -> Iterator[None]:
        """What stands on the layers while a call needs it: a prompt, drafts, or every step."""
        modules = {index: self._modules[index].self_attn for index in self._layers}
        with ExitStack() as stack:
            for index in self._layers:
                after = partial(torch.compiler.disable(self._after), index)
                stack.callback(stand_behind(self._modules[index], after))
            if (self._evicts or self._plan.bits) and self._attention.reads:
                stack.enter_context(self._attention.watching(modules))
            if self._reading is not None:
                stack.enter_context(self._reading.capturing())
            if self._evicts and self._always and not self._rescores:
                stack.enter_context(DraftMasks(self._plan, self._stepping).watching(modules))
            yield

    def _stepping(self) -> Any:
        """The cache of the call that this thread is in, unless it brings a prompt."""
        return None if self._local.part is not None else self._local.cache

    def _seeing(self) -> bool:
        call = self._call()
        return call is not None and call.step is not None and bool(call.step.sequences.items)

    def _now(self) -> tuple[PromptPart | None, Tensor | None] | None:
        call, local = self._call(), self._local
        if not local.active:
            return None
        ok = None if call is None or call.step is None else call.step.sequences.ok
        return local.part, ok

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        past = 0 if cache is None else int(cache.get_seq_length())
        length = length_of(kwargs) if not args else int(args[0].shape[1])
        local = self._local
        local.part = self._prompts.part(past, length)
        local.active = kwargs.get("use_cache") is not False
        local.cache = cache
        local.ms, local.before, local.after, local.bytes = 0.0, 0, 0, 0
        self._arming.begin(local.part is not None or self._rescores or length > 1)
        if self._reading is not None:
            self._reading.enter(cache, local.part if local.active else None)
        if cache is not None and ((self._always and self._evicts) or self._packing.packs):
            self._settle(cache, local.part is None or local.part.first)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._local.active, self._local.cache = False, None
        self._arming.end()
        if self._reading is not None:
            self._reading.leave()

    def _settle(self, cache: Any, over: bool) -> None:
        """Before a call, when nothing that the last one brought can be taken back any more.

        A prompt that is not over is thinned between its chunks where all that it waits for are
        policies that act at every step, on numbers of tokens.
        """
        memo: list[Slid] = []
        for index in self._layers:
            layer = cache.layers[index] if index < len(cache.layers) else None
            if layer is None or not is_short(layer) or layer.notes is None:
                continue
            ready = over and BASIS in layer.notes
            if self._always and self._evicts and (ready or self._each):
                self._evict_again(cache, index, memo)
            if over:
                self._packing.step(layer)

    def _evict_again(self, cache: Any, index: int, memo: list[Slid]) -> None:
        layer = cache.layers[index]
        if self._plan.score is None and slide(cache, index, self._plan, memo, self._known):
            return
        if self._rescores:
            choose = chooser(self._plan, layer, index, len(self._modules), prompt=False)
        else:
            choose = stayer(self._plan, layer)
        evict(cache, index, choose)

    def _after(
        self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> None:
        """A decoder layer has stored what a call brings."""
        part, call, cache = self._local.part, self._call(), kwargs.get("past_key_values")
        masses = self._attention.take(index)
        if cache is None:
            return
        if part is None:
            layer = cache.layers[index]
            if masses and is_short(layer) and layer.notes is not None:
                add_masses(layer, masses)
            return
        assert call is not None and call.step is not None
        layer, step = shrinkable(cache, index), call.step
        if layer.notes is None:
            count = step.sequences.length
            begin(layer, entries(layer) - count, step.past, len(layer.keys))
        arrive(layer, kinds_of(step.sequences))
        add_masses(layer, masses)
        if self._reading is not None:
            self._reading.arrive(layer, index, step.sequences)
        if part.last:
            self._prompt_ends(cache, index, part)

    def _prompt_ends(self, cache: Any, index: int, part: PromptPart) -> None:
        layer, local = cache.layers[index], self._local
        remember_basis(layer)
        start = time.perf_counter()
        if self._evicts:
            choose = chooser(self._plan, layer, index, len(self._modules))
            before, after = evict(cache, index, choose, part.drafts)
            if self._always and not self._rescores and self._plan.score is not None:
                pin(self._plan, layer)
            layer.notes.pop(WINDOW, None)
        else:
            before = after = entries(layer) * len(layer.keys)
        if self._reading is not None:
            self._reading.prompt_ends(layer, part.drafts)
            after = int(read_of(layer).sum())
        layer = self._packing.prompt(cache, index, part.drafts)
        local.ms += (time.perf_counter() - start) * 1e3
        local.before, local.after = local.before + before, local.after + after
        local.bytes += nbytes(layer)
        if index == self._layers[-1]:
            count = len(self._layers)
            before, after = round(local.before / count), round(local.after / count)
            row = Row("kv", before, after, local.ms, local.bytes, str(self._plan))
            self._trace.rows.append(row)
