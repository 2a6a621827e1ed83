"""The stage of `attach` that lets `generate` draft and verify."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError, SpecError, an
from mmfast.core.spec import AUTO, Spec
from mmfast.core.trace import Row, Trace, peak_bytes
from mmfast.decoding.row import Costs
from mmfast.decoding.speculation import BILD, DRAFT, EXIT, LOOKUP, RECYCLE, DecodePlan, Recycler
from mmfast.models import loading
from mmfast.models.cache_name import CACHE, cache_of
from mmfast.models.context import placeholders
from mmfast.models.decoder.draft_weights import DraftWeights, LightReader
from mmfast.models.decoder.drafters import (
    BatchText,
    Drafter,
    LookupDrafter,
    ModelDrafter,
    RecycleDrafter,
    prompt_reader,
)
from mmfast.models.decoder.early_exit import ExitStates, exit_drafter, load_exit
from mmfast.models.decoder.online_draft import OnlineLearner
from mmfast.models.decoder.reader import SequenceReader
from mmfast.models.decoder.speculation import VerifiedDecoding
from mmfast.models.decoder.token_tree import TreeDrafter
from mmfast.models.families.adapter import adapter_for
from mmfast.models.kv.view import CacheView, ViewStage, view_plan
from mmfast.models.packing import pack_weights
from mmfast.models.patching import override, stand_before
from mmfast.models.reduction.call import PassState
from mmfast.models.wrappers import base_of

# A `custom_generate` of ours that only says by which seed tokens are drawn.
SEED = "mmfast_seed"
_DECODING = ContextVar("decoding", default=False)  # inside a call of `generate`
_STEPS = 2  # passes of a single token in a row that are a loop of the caller's own
_EVIDENCE = 8  # drafts before their share that stands is believed
RISES_TO = 0.5  # share that a rising draft reads at most: more is no draft
_COSTS = {RECYCLE: (0.001, 0.03), LOOKUP: (0.001, 0.03), DRAFT: (0.3, 0.05)}


def check_decode(
    plan: DecodePlan, model: Any, specs: Sequence[Spec] | str, cache: CachePlan | None
) -> None:
    """Refuse draft and verify where a model or a stage beside it cannot; ModelError, SpecError."""
    name = type(model).__name__
    if adapter_for(model).alone or not hasattr(model, "generate"):
        raise ModelError(f"decode={plan.text!r} acts in generate(), which {name} does not have")
    revives = [] if specs == AUTO else [s for s in specs if s.method.revives]  # type: ignore[union-attr]
    if revives:
        raise SpecError(
            f"{str(revives[0])!r} brings tokens back step by step, which cannot be undone when "
            f"drafts fall; leave out decode={plan.text!r}, or reduce at 'pre'"
        )
    skips = [] if specs == AUTO else [s for s in specs if s.method.bypasses]  # type: ignore[union-attr]
    if skips and plan.views:
        raise SpecError(
            f"'{skips[0]}' drops visual keys that decode={plan.text!r} reads; leave out one of them"
        )
    if plan.kind == EXIT and (specs or cache is not None):
        raise SpecError(
            f"decode={plan.text!r} reads the whole cache of its first layers; leave out reduce= "
            "and cache=, or use decode='recycle'"
        )
    _check_cache(plan, cache)
    if not plan.shares:
        return
    if plan.views and not adapter_for(model).media:
        raise SpecError(
            f"decode={plan.text!r} reads part of the visual keys, and {name} reads text alone; "
            "use decode='recycle', or 'self?weights=int4' on a CPU"
        )
    acts = () if cache is None else cache.parts
    odd = [
        each for each in acts if each.method.moment == "always" or each.method.role == "retrieve"
    ]
    if odd or (cache is not None and cache.bits):
        raise SpecError(
            f"decode={plan.text!r} cuts its draft from a cache that changes only behind a prompt, "
            f"which {str(cache)!r} does not promise; use 'snapkv:1024', or decode='recycle'"
        )


def _check_cache(plan: DecodePlan, cache: CachePlan | None) -> None:
    """Refuse policies whose choice depends on where one pass ends and the next begins."""
    if cache is None:
        return
    anew = cache.score is not None and (cache.every or cache.score.method.moment == "always")
    moves = cache.store is not None or cache.select is not None or cache.follows
    if anew or moves:
        raise SpecError(
            f"cache {str(cache)!r} chooses or packs anew from pass to pass, and decode="
            f"{plan.text!r} has other passes, so the answer would change; use a policy that acts "
            "behind the prompt, such as 'snapkv:1024', or leave out decode="
        )


class DraftSource:
    """Draft and verify for one model; the draft model, if any, is loaded at once.

    It keeps prices, statistics and what a draft model learns for as long as it lives, and nothing
    of a prompt. `early_exit` is the adapter of `exit:`, None in other specs.

    Raises:
        ModelError: The draft model cannot be loaded, or has another vocabulary.
    """

    def __init__(self, model: Any, plan: DecodePlan) -> None:
        self.plan, self._model, self._trace = plan, model, Trace()
        self._recycler = Recycler(plan.width)
        draft, wide = _COSTS.get(plan.kind, (0.6, 0.05))
        self._costs = Costs(draft, wide, live=plan.adapt)
        self._stage: ViewStage | None = None
        self._share = RisingShare(plan) if plan.rise else None
        self._draft: Any = None
        if plan.kind in (DRAFT, BILD):
            kind = torch.float32 if plan.learn else model.dtype  # small steps vanish in 16 bits
            self._draft = load_draft(plan.model, model, kind)
        elif plan.runs_model:
            self._draft = loading.twin(model, None)[0]
        self._light: DraftWeights | None = None
        self._note = ""
        if plan.weights and self._draft is not None:
            self._note = f"draft model, {pack_weights(self._draft, plan.weights).note}"
        elif plan.weights:
            self._light = DraftWeights(model, plan.weights)
            self._note = self._light.note
        self.early_exit = load_exit(plan.model, model) if plan.kind == EXIT else None
        self._learner = OnlineLearner(self._draft, plan.learn) if plan.learn else None

    def __str__(self) -> str:
        return self.plan.text

    @property
    def draft(self) -> Any:
        """The model that drafts over a cache of its own; None where there is none."""
        return self._draft

    @property
    def light_bytes(self) -> int:
        """Bytes of weights in fewer bits, beside those of the model."""
        return 0 if self._light is None else self._light.nbytes

    @property
    def sees(self) -> bool:
        """True where that model reads the media of a prompt."""
        return self.plan.media and bool(adapter_for(self._draft).media)

    def views(self, state: PassState) -> ViewStage | None:
        """The stage that chooses what a draft on part of the cache reads; None for other drafts."""
        if self.plan.views:
            budget = self.plan.budget if self._share is None else self._share.value
            self._stage = ViewStage(self._model, view_plan(self.plan.score, budget), state)
        return self._stage

    @contextmanager
    def installed(self, trace: Trace) -> Iterator[None]:
        """Stand in `generate`, with rows for `trace`; the draft model gets its own reducers."""
        from mmfast.attach import attach

        self._trace = trace
        with ExitStack() as stack:
            if self._draft is not None and self.plan.reduce:
                inner = stack.enter_context(attach(self._draft, self.plan.reduce))
                inner.calls += 1  # the handle of the model itself warns where there are none
            if self._light is not None:
                stack.enter_context(self._light.installed())
            if self._note:
                trace.notes.append(self._note)
            stack.enter_context(override(self._model, "generate", self._generate))
            watch = LoopWatch(self._model, self.plan, trace)
            stack.callback(stand_before(base_of(self._model), watch, "mmfast drafts"))
            try:
                yield
            finally:
                self._stage = None

    def _generate(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        custom, streamer = kwargs.pop("custom_generate", None), kwargs.get("streamer")
        seed = getattr(custom, SEED, None)
        if (custom is not None and seed is None) or kwargs.get("assistant_model") is not None:
            what = "assistant_model" if custom is None else "custom_generate"
            raise ModelError(
                f"{what}= and decode={self.plan.text!r} both decode; give one of them (a draft "
                "model is decode='draft:DIR')"
            )
        kwargs = _with_stop_strings(kwargs)
        inputs = dict(kwargs)
        if args:
            inputs["input_ids"] = args[0]
        elif kwargs.get("inputs") is not None:
            inputs["input_ids"] = kwargs["inputs"]

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **rest: Any,
        ) -> Any:
            tools = {"logits_processor": logits_processor, "streamer": streamer}
            tools["stopping_criteria"] = stopping_criteria
            return self._decode(model, input_ids, generation_config, tools, rest, inputs, seed)

        token = _DECODING.set(True)
        try:
            return stock(*args, custom_generate=decode, **kwargs)
        finally:
            _DECODING.reset(token)

    def _decode(
        self,
        model: Any,
        ids: Tensor,
        config: Any,
        tools: dict[str, Any],
        kwargs: dict[str, Any],
        inputs: dict[str, Any],
        seed: int | None,
    ) -> Any:
        self._check_call(config, kwargs, inputs)
        # Drawn tokens must not depend on the clock, or a seed would not repeat them.
        drawn = config.do_sample
        costs = Costs(self._costs.draft, self._costs.wide) if drawn else self._costs
        if drawn:
            costs = Costs(*_COSTS.get(self.plan.kind, (0.6, 0.05)))
        run = VerifiedDecoding(model, ids, config, tools, self.plan, costs, seed)
        states = ExitStates()

        def make(reader: SequenceReader, text: BatchText) -> Drafter | None:
            if self.early_exit is not None:
                return exit_drafter(reader, states, self.early_exit, self.plan)
            return self._drafter(reader, text, kwargs, inputs, drawn)

        with ExitStack() as stack:
            if self.early_exit is not None:
                stack.enter_context(states.watched(model, self.early_exit.layer))
            if self._learner is not None:
                stack.enter_context(self._learner.call())
            output = run.run(kwargs, make)
        row = Row("draft", run.proposed, run.accepted, run.drafting * 1e3, peak_bytes())
        row.method = f"{self.plan.text} {run.passes} passes"
        if self._share is not None and self._stage is not None:
            row.method += f" at {self._share.value:g}"
            if self._share.rises(run.proposed, run.accepted):
                self._stage.choose_by(view_plan(self.plan.score, self._share.value))
        self._trace.rows.append(row)
        return output

    def _drafter(
        self,
        reader: SequenceReader,
        text: BatchText,
        kwargs: dict[str, Any],
        inputs: dict[str, Any],
        drawn: bool,
    ) -> Drafter | None:
        plan, vocabulary = self.plan, self._model.config.get_text_config().vocab_size
        if plan.kind == RECYCLE:
            known = Recycler(plan.width) if drawn else self._recycler
            for ids in text.prompt.tolist():
                known.warm(ids)
            trees = plan.tree > 0 and len(text.said) == 1 and reader.plain
            return RecycleDrafter(known, plan, trees)
        if plan.kind == LOOKUP:
            return LookupDrafter(text.prompt, plan)
        if self._draft is not None:
            without = None if self.sees else placeholders(self._model)
            own = prompt_reader(self._draft, inputs, without)
            return self._drafting(reader, own, text, vocabulary, None)
        stage, light = self._stage, self._light
        view = CacheView(reader.cache) if stage is None else stage.view(reader.cache)
        if light is not None:
            mine = LightReader(light, self._model, kwargs, view.cache)
            return self._drafting(reader, mine, text, vocabulary, view.sync)
        if view.entries[0] == view.entries[1]:
            self._trace.warn(
                f"decode {plan.text!r} drafted nothing: the prompt has no visual keys to leave "
                "out; use decode='recycle' for text"
            )
            return None
        own = SequenceReader(self._model, kwargs, view.cache)
        return self._drafting(reader, own, text, vocabulary, view.sync)

    def _drafting(
        self,
        reader: SequenceReader,
        own: SequenceReader,
        text: BatchText,
        vocabulary: int,
        sync: Callable[[], None] | None,
    ) -> ModelDrafter:
        """Drafts of a model as a tree where both caches can read one, else one after the other."""
        if self._learner is not None:
            lessons = self._learner.lessons(own)
            return ModelDrafter(own, self.plan, vocabulary, sync, lessons)
        trees = self.plan.grows and len(text.said) == 1 and reader.plain and own.even
        return (TreeDrafter if trees else ModelDrafter)(own, self.plan, vocabulary, sync)

    def _check_call(self, config: Any, kwargs: dict[str, Any], inputs: dict[str, Any]) -> None:
        """Refuse what this loop does not decode, in one line."""
        spec, mode = f"decode={self.plan.text!r}", config.get_generation_mode()
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ModelError(
                f"{spec} takes the likeliest tokens or draws them, and this call is "
                f"{an(mode.value.replace('_', ' '))}; leave out its options, or decode="
            )
        if self.plan.kind == BILD and config.do_sample:
            raise ModelError(
                f"{spec} takes the likeliest tokens of both models; leave out do_sample, or use "
                f"decode='draft:{self.plan.model}', which draws as the model does"
            )
        if not kwargs.get("use_cache"):
            raise ModelError(f"{spec} needs a cache; leave out use_cache=False")
        for name in ("output_attentions", "output_hidden_states"):
            if config.return_dict_in_generate and getattr(config, name, False):
                raise ModelError(f"{spec} does not return what {name} asks for; leave it out")
        past = cache_of(inputs)
        if self._draft is not None:
            if inputs.get("input_ids") is None:
                raise ModelError(f"{spec} needs input_ids, which its draft model reads, too")
            if (config.num_return_sequences or 1) > 1:
                raise ModelError(f"{spec} answers once; leave out num_return_sequences")
            if past is not None and int(past.get_seq_length()):
                raise ModelError(
                    f"{spec} would have to read the earlier turns of this cache; leave out "
                    f"{CACHE}, or use decode='recycle'"
                )


class LoopWatch:
    """Before each call of a model: warns of decode steps outside `generate`, where none drafts."""

    def __init__(self, model: Any, plan: DecodePlan, trace: Trace) -> None:
        self._trace, self._steps = trace, 0
        self._names = list(inspect.signature(base_of(model).forward).parameters)
        self._note = (
            f"decode {plan.text!r} drafted nothing in a loop of single tokens: drafts are made and "
            "verified in generate(); call that, or leave out decode="
        )

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See one call; two steps in a row make a loop."""
        kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        ids = kwargs.get("input_ids")
        length = (kwargs["inputs_embeds"] if ids is None else ids).shape[1]
        past = cache_of(kwargs)
        if torch.compiler.is_compiling():  # such a step calls no Python when it is run again
            if length == 1 and past is not None:
                self._compiled()
            return
        if _DECODING.get():
            return
        # A tuple of old releases has no length; the model refuses it in its own words.
        step = length == 1 and hasattr(past, "get_seq_length") and int(past.get_seq_length()) > 0
        self._steps = self._steps + 1 if step else 0
        if self._steps == _STEPS:
            self._trace.warn(self._note)

    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def _compiled(self) -> None:
        """Run while a step is compiled, in place of code in it."""
        if not _DECODING.get():
            self._trace.warn(self._note)


class RisingShare:
    """Share of the visual keys that a draft reads, which doubles while too many drafts fall.

    No label is needed: what the whole model says to a draft tells whether the draft read enough. A
    draft that reads more than half is none, so that is the most.
    """

    def __init__(self, plan: DecodePlan) -> None:
        assert isinstance(plan.budget, float)
        self.value, self._least = plan.budget, plan.rise
        self._proposed = self._accepted = 0

    def rises(self, proposed: int, accepted: int) -> bool:
        """Note the drafts of an answer; returns True if later ones read more."""
        self._proposed, self._accepted = self._proposed + proposed, self._accepted + accepted
        enough = self._accepted >= self._least * self._proposed
        if self._proposed < _EVIDENCE or enough or self.value >= RISES_TO:
            return False
        self.value, self._proposed, self._accepted = min(2 * self.value, RISES_TO), 0, 0
        return True


def _with_stop_strings(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Stop strings as a criterion: stock code takes the tokenizer from custom loops."""
    strings, words = kwargs.get("stop_strings"), kwargs.get("tokenizer")
    if not strings or words is None:
        return kwargs
    rest = {k: v for k, v in kwargs.items() if k not in ("stop_strings", "tokenizer")}
    stop = StopStringCriteria(words, strings)
    own = kwargs.get("stopping_criteria") or ()
    return {**rest, "stopping_criteria": StoppingCriteriaList([*own, stop])}


def load_draft(where: str, model: Any, kind: torch.dtype | None = None) -> Any:
    """Load a draft model for `model`, beside it; ModelError where their tokens differ."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with loading.loading(f"draft model {where!r}"):
        config = AutoConfig.from_pretrained(where, trust_remote_code=False)
        text = loading.is_text_model(config.model_type)
        cls = AutoModelForCausalLM if text else loading.answering_class(config)
        draft = loading.from_pretrained(cls, where, model.device, kind or model.dtype)
    _check_tokens(where, draft, model)
    return draft


def _check_tokens(where: str, draft: Any, model: Any) -> None:
    """Refuse a draft model that writes other tokens."""
    mine, other = (m.config.get_text_config().vocab_size for m in (model, draft))
    if other > mine:
        raise ModelError(
            f"draft model {where!r} has {other} tokens and {type(model).__name__} {mine}; give "
            "one of the same tokenizer"
        )
    home = str(getattr(model, "name_or_path", "") or "")
    words = [_vocabulary(place) for place in (home, where)]
    if None not in words and words[0] != words[1]:
        raise ModelError(
            f"draft model {where!r} has another tokenizer than {home!r}; give one whose "
            "tokenizer.json is the same"
        )


def _vocabulary(where: str) -> dict[str, int] | None:
    """Tokens of a checkpoint by text; None where it brings no tokenizer."""
    from transformers import AutoTokenizer

    try:
        words: dict[str, int] = AutoTokenizer.from_pretrained(
            where, trust_remote_code=False, local_files_only=True
        ).get_vocab()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return words
