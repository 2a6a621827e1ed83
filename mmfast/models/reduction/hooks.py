"""The hooks of one attached model: base model, decoder layers, DeepStack."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.core.trace import Trace
from mmfast.models.cache_name import cache_of, layered_cache_of, name_in, returned_cache
from mmfast.models.decoder.concepts import ContextReader
from mmfast.models.encoder_names import FEATURES, no_features, takes_features
from mmfast.models.families.adapter import adapter_for
from mmfast.models.families.prompt_ids import alike_ids, ids_of, prompt_ids, told_by_generate
from mmfast.models.patching import override, stand_before, stand_behind
from mmfast.models.reduction.bypass import Bypass
from mmfast.models.reduction.cache_layers import CacheSet, held
from mmfast.models.reduction.call import (
    Arming,
    Call,
    PassState,
    PromptTracker,
    apply,
    is_shortened,
    is_static,
    length_of,
    needs_layers,
    on_layers,
)
from mmfast.models.reduction.choice import items_of, shortens
from mmfast.models.reduction.decoder_signals import DRIFT, INNER, LayerAttention
from mmfast.models.reduction.look_ahead import layer_ahead, look_ahead
from mmfast.models.reduction.masks import (
    Offsets,
    Recount,
    fit_decode,
    forget_masks,
    padding_of,
    refuse_own_mask,
    refuse_packed,
)
from mmfast.models.reduction.probe import probing
from mmfast.models.reduction.record import Recorder, features_given, recording
from mmfast.models.reduction.revival import Reviver, told_of_drafts
from mmfast.models.reduction.sequence import Sequences, locate, of_text
from mmfast.models.reduction.site import POSITIONS, Site, refuse_parts
from mmfast.models.reduction.step import ForwardStep, before_of
from mmfast.models.reduction.training import (
    CHECKPOINTING,
    CLASSIFIER,
    Remainder,
    RemainderLoss,
    checkpointed,
    inputs_again,
    note_change,
    refuse_cache,
    refuse_places,
    tell_constant,
)
from mmfast.models.wrappers import attention_at, base_of, decoder_of, layers_of, turns_once


class Hooks:
    """State and hooks of one attached model.

    All layers are hooked if `whole`, for a KV policy; one that `repeats` a prompt reads how the
    text model is called.
    """

    def __init__(
        self,
        model: Any,
        sites: Sequence[Site],
        trace: Trace,
        state: PassState,
        whole: bool = False,
        repeats: bool = False,
    ) -> None:
        self._model, self._base, self._text = model, base_of(model), decoder_of(model)
        self._adapter = adapter_for(model)
        self._sites, self._trace, self._state, self._whole = sites, trace, state, whole
        self._recorder: Recorder
        self._offsets = Offsets(model, self._base) if self._adapter.mrope else None
        # Text is cut and fused in prompts alone, and what skipped leaves at their end, so their
        # length has to be known; a KV policy tracks it, too.
        ends = any(site.of_text or site.bypasses or site.fuses for site in sites)
        self._prompts = PromptTracker() if ends else None
        self._tracks = self._prompts is not None and not whole
        # What reads the end of a prompt, or its question, must not find drafts there.
        reads_end = any(site.deep or site.asks for site in sites) and not whole
        self._ends = self._prompts if self._tracks else PromptTracker() if reads_end else None
        self._reviving = reviving = {site.layer for site in sites if site.revives}
        self._turns = turns_once(self._text, self._adapter.mrope)
        renumbers = any(site.renumbers(self._turns) for site in sites)
        self._recount = Recount() if renumbers else None
        self._reviver = Reviver(reviving, self._text, trace) if reviving else None
        passing = [site.layer for site in sites if site.bypasses]
        self._bypass = Bypass(passing[0], self._text, state) if passing else None
        self._looks = repeats or any(site.ahead for site in sites)
        reads = [s.layer - 1 for s in sites if s.deep and s.needs & (INNER | {DRIFT})]
        self._before = before_of(sites, self._text)
        reads += self._before.values()
        self._first = 0 if whole else max(0, min([site.layer for site in sites] + reads))
        # What is compiled for one attach() serves the next one that only looks on in steps.
        self._halts = any(site.halts for site in sites)
        self._key = None if whole or reviving or self._halts else f"mmfast {self._first}"
        # Only decode steps run well compiled; anything longer steps out of the compiled code.
        self._uncompiled: Any = torch.compiler.disable(apply)
        self._names = list(inspect.signature(self._base.forward).parameters)
        self._arming = Arming(self._on_layers)
        written = [s for site in sites if site.concepts for s in site.specs if not s.whole]
        knobs = [{**s.method.knobs, **s.knobs} for s in written]
        self._context = ContextReader(model, knobs[0]) if knobs else None
        self._loss = RemainderLoss(model, state)
        self._pools = type(model).__name__.endswith(CLASSIFIER)
        self._caches = CacheSet()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hooks in, hooks out."""
        # A share of 1.0 reads nothing, so the tower need not give signals for it.
        before = [spec for site in self._sites if not site.deep for spec in site.specs]
        needs = {need for spec in before if not spec.whole for need in spec.method.needs}
        with ExitStack() as stack:
            stack.callback(self._caches.release)
            stack.enter_context(told_by_generate(self._model))
            if self._ends is not None:
                guided = not self._tracks
                stack.enter_context(self._ends.told_by_generate(self._model, guided))
            self._recorder = stack.enter_context(recording(self._base, self._adapter, needs))
            if any(not spec.whole for site in self._sites for spec in site.specs):
                stack.callback(stand_before(self._model, refuse_places, f"{self._key} places"))
            stack.callback(stand_before(self._base, self._enter, self._key))
            stack.callback(stand_behind(self._base, self._leave, self._key, always=True))
            stack.enter_context(self._arming.installed())
            stack.enter_context(self._loss.installed())
            if self._offsets is not None:
                stack.enter_context(self._offsets.installed())
            if self._bypass is not None:
                stack.enter_context(self._bypass.installed())
            if any(s.method.revives and not s.whole for site in self._sites for s in site.specs):
                stack.enter_context(told_of_drafts(self._model, self._trace))
            if self._adapter.deepstack:
                around = self._deepstack
                stack.enter_context(override(self._text, "_deepstack_process", around))
            yield

    def _on_layers(self) -> AbstractContextManager[None]:
        keep = self._keep if self._looks and self._text is not self._base else None
        after = self._behind if self._halts or self._reviver is not None else None
        return on_layers(self._text, self._first, self._layer, self._key, keep, after)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = self._named(args, kwargs)
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._open(kwargs)
        elif length_of(kwargs) > 1 or self._arming.idle:
            self._uncompiled(self._open, kwargs)
        if self._recount is None or compiling:
            return None
        if is_static(cache_of(kwargs)):
            raise ModelError(
                "a static cache may be compiled, which cannot count positions anew; write "
                f"{POSITIONS}=original, or leave out cache_implementation"
            )
        shifted = self._recount.shifted(kwargs, length_of(kwargs))
        return None if shifted is None else ((), {**kwargs, "position_ids": shifted})

    def _leave(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        last = kwargs.get("logits_to_keep")
        if isinstance(last, int) and last and output is not None:  # Gemma 4 leaves it to us
            output.last_hidden_state = output.last_hidden_state[:, -last:]
        if not torch.compiler.is_compiling():
            self._close(output)
        elif length_of(kwargs := self._named(args, kwargs)) > 1:
            self._uncompiled(self._close, output)
        else:
            forget_masks(cache_of(kwargs))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the base model's forward by name; some models give the ids by position."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs} if args else kwargs

    def _layer(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not torch.compiler.is_compiling():
            again = inputs_again(index, args, kwargs) if module.training else None
            if again is not None:
                return again
            call = self._state.call
            if call is None:
                return self._decode(index, module, args, kwargs)
            return self._visual(call, index, module, args, kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] == 1 and self._reviver is None:
            return self._decode(index, module, args, kwargs)
        return self._uncompiled(self._compiled_layer, index, module, args, kwargs)

    def _compiled_layer(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._layer(index, module, args, kwargs) or (args, kwargs)

    def _open(self, kwargs: dict[str, Any]) -> None:
        cache = layered_cache_of(kwargs)
        self._caches.meet(cache)
        if kwargs.get(FEATURES) and not takes_features(self._base):
            raise no_features(self._base)
        if self._text.training:
            refuse_cache(layers_of(self._text), cache)
        if self._offsets is not None:
            self._offsets.store(cache)
        if self._prompts is not None and self._tracks:
            past = 0 if cache is None else int(cache.get_seq_length())
            self._state.part = self._prompts.part(past, length_of(kwargs))
        prompting = self._state.part is not None
        several = length_of(kwargs) > 1 and is_shortened(cache)
        wanted = prompting or several or features_given(kwargs)
        needed = wanted or self._reviver is not None or needs_layers(cache)
        needed = needed or self._text.training  # layers may run again in the backward pass
        if is_static(cache):  # its steps may be compiled, and then open no call
            self._arming.pin()
        self._arming.begin(bool(needed))
        self._loss.stand()
        self._state.left, self._state.call = None, Call(kwargs) if wanted else None
        call = self._state.call
        if call is not None:
            ids = kwargs.get("input_ids")
            if ids is None and features_given(kwargs):
                ids = alike_ids(self._base, kwargs["inputs_embeds"])
            call.stack.enter_context(prompt_ids(ids))
            if self._text is self._base:  # whose own hooks may be put in only now
                call.given = ((), kwargs)

    def _close(self, output: Any) -> None:
        self._arming.end()
        self._caches.meet(returned_cache(output))
        if self._offsets is not None:
            self._offsets.store(returned_cache(output))
            self._offsets.forget()
        if self._reviver is not None:
            self._reviver.close()
        call = self._state.call
        if call is not None:
            self._state.call = None
            call.stack.close()
            if self._recount is not None and call.step is not None:
                cache = returned_cache(output)
                self._recount.store(cache, call.step.shrunk)
            cache, part = returned_cache(output), self._state.part
            if self._bypass is not None and call.step is not None and cache is not None and part:
                self._bypass.close(cache, call.step, part.last)
            if call.step is not None and (places := call.step.left) is not None:
                self._state.left = left = Remainder(call.step.full, *places)
                if self._pools and output is not None:
                    output.last_hidden_state = left.spread(output.last_hidden_state)

    def _visual(
        self,
        call: Call,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if call.step is None:
            call.step = self._begin(call, cache_of(kwargs))
        step, given = call.step, dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        if checkpointed(module):
            kwargs[name_in(kwargs)] = None  # such a layer stores nothing
            if passing := [str(site.specs[0]) for site in step.sites if site.bypasses]:
                raise ModelError(
                    f"{passing[0]!r} chooses while a prompt is read, and gradient checkpointing "
                    f"runs layers again later; call model.{CHECKPOINTING}_disable()"
                )
        ahead = partial(self._ahead, call)
        hidden = step.before_layer(index, hidden, kwargs, self._text.config, ahead)
        step.enter(index, hidden)
        if module.training:
            note_change(index, given, step.cuts, kwargs)
        if step.reads(index) or step.reads_early(index):
            self._probe(call, step, index, cache_of(kwargs))
        return (hidden, *(step.beside(each) for each in args[1:])), kwargs

    def _behind(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Behind the last layer: tokens that halted come back, those called back go."""
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.compiler.is_compiling() and hidden.shape[1] > 1:
            return self._uncompiled(self._settle, module, args, output)
        if torch.compiler.is_compiling() and self._reviver is None:
            return None
        return self._settle(module, args, output)

    def _settle(self, module: nn.Module, args: Any, output: Any) -> Any:
        call = self._state.call
        if call is None or call.step is None:
            return None if self._reviver is None else self._reviver.after(module, args, output)
        hidden = output[0] if isinstance(output, tuple) else output
        whole = call.step.rest(hidden)
        return (whole, *output[1:]) if isinstance(output, tuple) else whole

    def _begin(self, call: Call, stored: Any) -> ForwardStep:
        """The state of a call from its first decoder layer on; its arguments are used up.

        Its layers store keys and values in `stored`.
        """
        kwargs = call.kwargs
        assert kwargs is not None
        call.kwargs = None
        length, cache = length_of(kwargs), cache_of(kwargs)
        mask = kwargs.get("attention_mask")
        past, ok = padding_of(mask, length, call.past, cache, self._text.config)
        sequences, sites = Sequences(length, [], [], [], ok), self._sites
        if features_given(kwargs):
            strict = bool(self._sites)
            sequences = locate(self._base, self._adapter, kwargs, self._recorder.last, ok, strict)
        elif self._prompts is not None:
            sequences = of_text(kwargs, ok)
        part = self._state.part
        if self._prompts is not None:
            sequences.drafts = 0 if part is None else part.drafts
            sites = [site for site in sites if part is not None or not site.of_text]
        blocks = self._adapter.blocks(kwargs)
        if blocks is not None:  # read by position, as the stock model does
            blocks = blocks[:, call.past : call.past + length]
            blocks = F.pad(blocks, (0, length - blocks.shape[1]), value=-1)
        step = ForwardStep(sites, sequences, past, self._trace, blocks)
        if step.sites or self._whole:
            refuse_own_mask(mask, length, call.past, cache, blocks, self._text.config)
        if step.sites:
            refuse_packed(kwargs.get("position_ids"), mask, stored)
        acting = (spec for site in step.sites for spec in site.specs)
        tell_constant(acting, self._base, self._text, self._trace)
        step.before = self._before
        # A store follows drafts, too, which sites of text do not cut.
        step.reviving = self._reviving
        step.turns, step.restores = self._turns, not self._text.training
        if part is None and self._ends is not None:
            part = self._ends.part(call.past, length)
        if part is not None and (part.rest or not part.first):
            whole = length + part.rest  # a budget may exceed a part, which then acts on nothing
            late = [s for s in sites if s.of_text and shortens(s, whole - s.last)]
            refuse_parts([*step.sites, *late])
        return step

    def _keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note how the text model is called, in case its first layers have to run twice."""
        if torch.compiler.is_compiling():
            hidden = kwargs.get("inputs_embeds")
            if hidden is not None and hidden.shape[1] > 1:
                self._uncompiled(self._keep, module, args, kwargs)
            return
        call = self._state.call
        if call is not None and call.step is None:
            call.given = (args, kwargs)

    def _ahead(self, call: Call, site: Site, hidden: Tensor) -> list[dict[str, Tensor]]:
        if site.concepts:
            assert self._context is not None and call.step is not None
            prompts = [(item.row, item.where) for item in items_of(site, call.step.sequences)]
            ids = ids_of({})
            if ids is not None and bool((ids < 0).any()):  # of embeddings: numbers of one call
                ids = None
            return self._context.signals(prompts, hidden, ids, call.past)
        layer = layer_ahead(site.specs[0], self._text)
        # A model of text alone is the text model, whose call must not begin a second time.
        run = self._text.forward if self._text is self._base else self._text
        return look_ahead(self._state, call, site, (layer, self._text, run), hidden)

    def _decode(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        fitted = fit_decode(self._text.config, index, hidden, kwargs)
        if self._reviver is not None:
            more = self._reviver.before(index, module, hidden, kwargs)
            if more is not None:
                kwargs.pop("hidden_states", None)
                return (more, *args[1:]), kwargs
        return (args, kwargs) if fitted else None

    def _probe(self, call: Call, step: ForwardStep, index: int, cache: Any) -> None:
        """Watch the attention of this layer once, for the site before the next one."""
        filled = cache is not None and len(cache.layers) > index
        start = held(cache.layers[index]) if filled else 0

        def look(
            _: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float | None, so: bool
        ) -> None:
            if self._state.call is call:  # else another thread's pass
                step.observe(index, LayerAttention(q, k, mask, scale, so, start, v))

        watch: Any = partial(self._uncompiled, look)
        call.stack.enter_context(probing({attention_at(self._text, index): watch}))

    def _deepstack(self, stock: Any, hidden: Tensor, places: Tensor, planes: Tensor) -> Any:
        if torch.compiler.is_compiling():  # prompts alone bring planes
            return self._uncompiled(self._add_planes, stock, hidden, places, planes)
        return self._add_planes(stock, hidden, places, planes)

    def _add_planes(self, stock: Any, hidden: Tensor, places: Tensor, planes: Tensor) -> Any:
        call = self._state.call
        step = None if call is None else call.step
        if step is None or step.sequences.index is None:
            return stock(hidden, places, planes)
        return step.add_planes(hidden, planes.to(hidden.device, hidden.dtype))
