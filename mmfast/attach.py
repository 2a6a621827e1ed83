"""`attach(model, …)`: token reduction for a stock model, installed at once and exactly undone."""

from __future__ import annotations

import importlib
import reprlib
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from mmfast.caches.plan import CachePlan, call_plan
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.locks import WholeLock
from mmfast.core.spec import AUTO, Spec, is_auto, parse, self_check
from mmfast.core.trace import Trace
from mmfast.decoding.speculation import DecodePlan, plan_decode
from mmfast.prefill.plan import PrefillPlan, plan_prefill

if TYPE_CHECKING:
    from mmfast.models.decoder.draft_stage import DraftSource

PLANNER = "mmfast.planner.auto"  # a layer above, imported on first use
_LOCK = WholeLock()
_TURNS: weakref.WeakKeyDictionary[Any, WholeLock] = weakref.WeakKeyDictionary()
_BASES: weakref.WeakSet[Any] = weakref.WeakSet()  # base models with something attached
Stage = AbstractContextManager[None]
# Of the base model while something is attached: the handle, and everything to be undone.
_HANDLE, _UNDO = "_mmfast_handle", "_mmfast_undo"
# Protocols of copying, which torch looks up on the object: a copy would share hooks and state.
_COPIES = ("__deepcopy__", "__reduce_ex__")
# Continuous batching of transformers begins there: one row of many requests, in a paged cache.
_BATCHES = "init_continuous_batching"


class Handle(AbstractContextManager[Trace]):
    """Reductions that act on one model, until `detach()` or the end of a `with`.

    Attributes:
        trace: Rows and Reductions of every call, and notes on what could not act.
        inside: Something acts in calls of the language model, and not in the vision tower alone.
    """

    def __init__(self, model: Any, what: str) -> None:
        self.trace = Trace()
        self.what = what
        self.inside = False
        self._name = type(model).__name__
        self._undo: ExitStack | None = None
        self._turn: AbstractContextManager[Any] = nullcontext()
        self._quiet = not what  # nothing to warn of
        self._over = False

    @property
    def attached(self) -> bool:
        """The reductions are in place."""
        return self._undo is not None

    def install(self, model: Any, stages: Iterator[Stage]) -> None:
        """Enter the stages, all or none. The model keeps them, also when the handle is gone.

        A call of a pipeline that another thread is in ends first, and so it does before `detach`.
        """
        quiet, self._quiet = self._quiet, True  # an error says it all
        base = _base_of(model)
        self._turn = turn_of(base)
        with self._turn, ExitStack() as stack:
            stack.enter_context(_held(model, base, self))
            for stage in stages:
                stack.enter_context(stage)
            base.__dict__[_UNDO] = self._undo = stack.pop_all()
            self._undo.callback(base.__dict__.pop, _UNDO, None)
        self._quiet = quiet

    def detach(self) -> None:
        """Make the model stock again; nothing happens the second time."""
        self._over = True
        with self._turn:
            undo, self._undo = self._undo, None
            if undo is not None:
                undo.close()

    def __enter__(self) -> Trace:
        if self._over:
            raise ModelError(f"{self!r} was detached; call attach() again")
        return self.trace

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._quiet = self._quiet or kind is not None
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        calls = f"{self.trace.calls} call{'s' * (self.trace.calls != 1)}"
        return f"<mmfast.attach {self.what or 'nothing'} on {self._name}: {state}, {calls} seen>"

    def __del__(self) -> None:
        if self._quiet or self.trace.calls or self.trace.rows or sys.is_finalizing():
            return
        kept = "; the model stays attached: keep the handle to detach and to read its trace"
        warnings.warn(
            f"{self.what!r} on {self._name} has seen no prompt: the model was not called while it "
            f"was attached{kept if self.attached else ''}",
            stacklevel=2,
        )


def attach(
    model: Any,
    reduce: str | Sequence[Spec] | None = None,
    cache: str | CachePlan | None = None,
    encoder: str | None = None,
    decode: str | DecodePlan | DraftSource | None = None,
    prefill: str | PrefillPlan | None = None,
    attn: str | None = None,
) -> Handle:
    """Reduce the visual tokens and the KV cache of a model, from now until it is detached.

    Checked and installed at once: `with attach(…) as trace:` detaches at its end; `handle =
    attach(…)` has `handle.trace` and `handle.detach()`. The model may also be a transformers
    pipeline, a Trainer, a PEFT, compiled, DDP or FSDP model, and cannot be copied or pickled. A
    prompt on which a stage cannot act (no media, merged features) is warned of once and noted.
    Everything else stays stock: `generate` with beams, chunked prefill, static or dynamic caches,
    batches, threads, later turns with further images. Tokens keep positions, and separators stay. A
    share refers to the tokens that enter its stage, a whole number is per image or video, and a
    share of 1.0 leaves the model bit-identical. Removing tokens at
    `pre` gives what the stock model computes on the prompt without them, sliding windows,
    convolutions and images that see forward included; at `llm<K>` this holds from layer K on, and
    `tokens=text` or `all` drops text. Hidden states and logits of a prompt have its reduced length,
    rows left-padded. At `llm<K>` the last query and the text of media stages are those of the call:
    a chunk, or with a draft at its end; a cache made uneven there is to be continued attached.
    `cache` decides which keys and values stay, in which precision, and which are read: by KV head,
    layer and row, in layers of full attention; entries keep their positions. Policies act at the
    end of every prompt on the tokens present, `sink`, `window` and `streamingvlm` at every step,
    too; `quant`, `zipvl` and `zipcache` pack once, `retrieve` chooses what is read, `quest` at
    every step. In an encoder-decoder (T5, Whisper) `cache` alone acts, on what its encoder read.

    Args:
        model: A stock transformers model, or a vision encoder alone (timm, CLIP, SigLIP, VGGT).
        reduce: Spec string, `name[@site][:budget]` joined by `+`, or its parsed stages; sites
            `pixel` (before the vision tower), `vit` (inside it), `pre` (before the decoder) and
            `llm<K>` (before its layer K; `llm` for a schedule). "auto" plans at the first call.
        cache: Spec string of KV policies joined by `+`, such as `"snapkv:1024"`,
            `"lookm:0.3+quant:8"` or `"retrieve:8"`; an integer counts tokens (frames for
            `retrieve`, bits for `quant`). For a DynamicCache.
        encoder: `"fast"`, `"compile"` or `"graph"` (CUDA): a vision tower faster up to rounding;
            `"riformer:2"`: with learned weights, and no attention in two of its blocks.
        decode: Draft and verify, as `"self:0.1"` (`decoding.speculation`); a `DraftSource` is kept.
        prefill: What long prompts read, such as `"flexprefill:0.95"`.
        attn: Attention back end, such as `"sdpa"` or `"flash_attention_2"`.

    Returns:
        The handle. Its trace has a row per stage and call, and every Reduction; `kv` has entries of
        a layer and head before and after a prompt, and bytes; `draft` drafts and accepted ones.

    Raises:
        SpecError: Wrong name, site, knob, budget, encoder or decode, or a K the model lacks.
        ModelError: Unknown family, or attached already; a static or quantised cache under `cache`.

    Example:
        >>> with attach(model, "evs:0.25+fastv@llm3:0.5") as trace: model.generate(**inputs)
    """
    specs: Any = _specs(reduce)
    drafts: Any = decode if hasattr(decode, "plan") else plan_decode(decode)  # or a source
    more: dict[str, Any] = {"cache": call_plan(cache), "encoder": encoder, "decode": drafts}
    more |= {"prefill": plan_prefill(prefill), "attn": attn}
    return _attached(_stock(model, "" if drafts is None else "decode="), reduce, specs, more)


def _specs(reduce: Any) -> Any:
    """Parse a spec; "auto" stays, and what only a pipeline does beside it is refused."""
    if not is_auto(reduce):
        return parse(reduce)
    if self_check(reduce):
        raise SpecError(
            f"reduce={reduce!r} checks the answers of a pipeline, and attach() plans once; write "
            "'auto', or use mmfast.pipeline"
        )
    return AUTO


def _stock(held: Any, past: str) -> Any:
    """The model that is held, or an error for what holds none."""
    from mmfast.models.wrappers import stock_model

    model = stock_model(held, past)
    if not hasattr(model, "named_modules") or isinstance(model, type):
        raise ModelError(
            f"attach() got {reprlib.repr(held)}, which is no model; give a loaded one, such as "
            "AutoModelForImageTextToText.from_pretrained(…), or a pipeline or Trainer around one"
        )
    return model


def _attached(model: Any, reduce: Any, specs: Any, more: Mapping[str, Any]) -> Handle:
    """Install the stages of a spec, and what acts beside them by option."""
    plan, encoder, drafts, sparse, attn = more.values()
    source = _source(model, specs, plan, drafts)
    handle = Handle(model, _written(reduce, specs, more))
    handle.inside = specs == AUTO or any(spec.site not in ("vit", "pixel") for spec in specs)
    handle.inside |= any(part is not None for part in (plan, drafts, sparse))
    if specs or any(stage is not None for stage in more.values()):
        rest = _drafting(model, specs, plan, encoder, handle.trace, source)
        handle.install(model, chain(_attention(model, sparse, attn, handle.trace), rest))
    return handle


def _attention(
    model: Any, sparse: PrefillPlan | None, attn: str | None, trace: Trace
) -> Iterator[Stage]:
    """Stages that change how attention is computed; everything else stands around them."""
    if attn is not None:
        from mmfast.models.attention import attention_by

        yield attention_by(model, attn)
    if sparse is not None:
        from mmfast.models.decoder.sparse_prefill import SparsePrefill, check_prefill

        check_prefill(sparse, model)
        yield SparsePrefill(model, sparse, trace).installed()


def _source(
    model: Any, specs: Any, plan: CachePlan | None, drafts: DecodePlan | DraftSource | None
) -> DraftSource | None:
    """Make what drafts before anything is attached, as it may be a twin of the model."""
    if drafts is None:
        return None
    from mmfast.models.decoder.draft_stage import DraftSource, check_decode

    if isinstance(drafts, DraftSource):
        check_decode(drafts.plan, model, specs, plan)
        return drafts
    check_decode(drafts, model, specs, plan)
    return DraftSource(model, drafts)


def _written(reduce: Any, specs: Sequence[Spec], more: Mapping[str, Any]) -> str:
    """Name what is attached, as the caller wrote it."""
    stages = reduce if isinstance(reduce, str) else "+".join(map(str, specs))
    parts = (stages, *(f"{name} {value}" for name, value in more.items() if value))
    return ", ".join(part for part in parts if part)


def _nobody() -> None:
    return None


def _base_of(model: Any) -> Any:
    from mmfast.models.families.adapter import adapter_for
    from mmfast.models.kv.encoded import cross_attention
    from mmfast.models.wrappers import base_of

    if not cross_attention(model):
        adapter_for(model)  # an error of its own for what is no model
    return base_of(model)


def _drafting(
    model: Any, specs: Any, plan: CachePlan | None, encoder: str | None, trace: Trace, source: Any
) -> Iterator[Stage]:
    """All stages; draft and verify stands around the others, from the first call on."""
    if source is not None:
        yield source.installed(trace)
    yield from _stages(model, specs, plan, encoder, trace, source)


def _stages(
    model: Any, specs: Any, plan: CachePlan | None, encoder: str | None, trace: Trace, source: Any
) -> Iterator[Stage]:
    """Check, then everything that enters the model, in order; "auto" waits for the first call."""
    from mmfast.models.kv.encoded import EncodedStage, check_encoded, cross_attention

    if cross_attention(model):
        check_encoded(model, specs, plan, {"encoder": encoder})
        if plan is not None:
            yield EncodedStage(model, plan, trace).installed()
        return
    if specs == AUTO:
        planned = importlib.import_module(PLANNER).planned
        rest = (plan, encoder, trace, source)
        yield planned(model, lambda spec: _stages(model, parse(spec), *rest), trace)
        return
    from mmfast.models.families.adapter import adapter_for
    from mmfast.models.kv.policy import KVStage
    from mmfast.models.patching import compiled_again
    from mmfast.models.reduction.attendance import Attendance
    from mmfast.models.reduction.beams import media_of_generate
    from mmfast.models.reduction.call import PassState
    from mmfast.models.reduction.check import check
    from mmfast.models.reduction.hooks import Hooks
    from mmfast.models.reduction.site import sites_of
    from mmfast.models.vision.acceleration import fast_encoder
    from mmfast.models.vision.folding import folded_tower
    from mmfast.models.vision.merge import vit_stage
    from mmfast.models.vision.pixel import pixel_stage
    from mmfast.models.vision.scene import scene_stage

    specs = check(specs, model, plan, encoder)
    adapter, sites, state = adapter_for(model), sites_of(specs), PassState()
    yield compiled_again(model)
    yield media_of_generate(model, adapter)
    attendance = Attendance(model, specs, trace).installed()
    if not adapter.alone:
        yield attendance
    if encoder is not None:
        yield folded_tower(model, encoder, trace)
        yield fast_encoder(model, encoder)
    for spec in specs:
        if spec.site == "vit" and not spec.whole:
            scene = adapter.alone and adapter.tower(model).scene
            yield (scene_stage if scene else vit_stage)(model, adapter, spec, trace)
    early = [spec for spec in specs if spec.site == "pixel"]
    if early:
        yield pixel_stage(model, adapter, early)
    view = None if source is None else source.views(state)
    if view is not None:  # before a policy evicts what it may choose
        yield view.installed()
    if plan is not None:  # before the hooks: what it evicts is gone for the call that begins
        yield KVStage(model, plan, trace, state).installed()
    whole = plan is not None or view is not None
    if sites or whole:
        repeats = plan is not None and plan.repeats > 0
        yield Hooks(model, sites, trace, state, whole, repeats).installed()
    if adapter.alone:  # around all others, so that it sees calls that they refuse
        yield attendance


def turn_of(model: Any) -> WholeLock:
    """Lock of a model for calls that attach and detach, of all threads; one may take it again."""
    from mmfast.models.wrappers import base_of

    with _LOCK:
        return _TURNS.setdefault(base_of(model), WholeLock())


def handle_of(model: Any) -> Handle | None:
    """Return the handle of what is attached to a model."""
    from mmfast.models.wrappers import base_of

    found: Handle | None = base_of(model).__dict__.get(_HANDLE, _nobody)()
    return found


def check_detached(model: Any, wait: bool = True) -> None:
    """Refuse what a caller has attached to the model of a stream, where it would not act.

    A pipeline's call in another thread detaches what is its own: it is waited for, or let pass.
    """
    if not wait and handle_of(model) is None:  # as for nearly every frame
        return
    turn = turn_of(model)
    if turn.acquire(wait):
        try:
            other = handle_of(model)
        finally:
            turn.release()
        if other is not None and other.inside:
            raise ModelError(
                f"video-stream: {other.what!r} is attached to the model and would not act in a "
                "stream; detach it, and give reduce= to the pipeline and memory= to open()"
            )


@contextmanager
def recorded(model: Any, trace: Trace) -> Iterator[None]:
    """Record in the trace of a call what its caller has attached to the model, too."""
    other = handle_of(model)
    if other is None or other.trace is trace:
        yield
        return
    mark = other.trace.mark()
    yield
    trace.take(other.trace, mark)


def _shares(one: Any, other: Any) -> bool:
    """One of two modules is the other, or is inside it."""
    return any(each is other for each in one.modules()) or any(
        each is one for each in other.modules()
    )


@contextmanager
def _held(model: Any, base: Any, handle: Handle) -> Iterator[None]:
    """Let a model have one handle and no copies; one that was collected is detached first."""
    with _LOCK:
        for near in [each for each in _BASES if _shares(each, base)]:
            other = near.__dict__.get(_HANDLE, _nobody)()
            if other is not None:
                within = "" if near is base else "a model around or inside "
                raise ModelError(
                    f"{within}this {type(model).__name__} is attached already, with "
                    f"{other.what!r}; detach() that, leave its `with`, or join both specs with '+'"
                )
            lost = near.__dict__.get(_UNDO)
            if lost is not None:
                lost.close()  # forgets its handle: before the new one is known
        _BASES.add(base)
        base.__dict__[_HANDLE] = weakref.ref(handle)

    name, what = type(model).__name__, handle.what
    del handle  # what is installed must not keep it alive

    def refuse(*_: Any) -> NoReturn:
        raise ModelError(
            f"{name} has {what!r} attached, which a copy would share; detach first, then copy or "
            "pickle it"
        )

    def refuse_batches(*_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            f"{name} has {what!r} attached, which does not act in generate_batch (continuous "
            "batching, a paged cache); call generate, serve it with `mmfast serve`, or detach first"
        )

    refused = {**dict.fromkeys(_COPIES, refuse), _BATCHES: refuse_batches}
    refusing = {id(each): each for each in (model, base)}.values()
    for module in refusing:
        module.__dict__.update(refused)
    try:
        yield
    finally:
        for module in refusing:
            for each in refused:
                module.__dict__.pop(each, None)
        base.__dict__.pop(_HANDLE, None)
        _BASES.discard(base)
