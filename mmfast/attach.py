"""`with attach(model, …)`: token reduction for a stock model, hooks in and hooks out."""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from mmfast.caches.plan import CachePlan, call_plan
from mmfast.core.errors import ModelError
from mmfast.core.spec import Spec, parse
from mmfast.core.trace import Trace

AUTO, PLANNER = "auto", "mmfast.planner.auto"  # a layer above, imported on first use
_LOCK = threading.Lock()
_attached: weakref.WeakSet[Any] = weakref.WeakSet()
Stage = AbstractContextManager[None]


@contextmanager
def attach(
    model: Any,
    reduce: str | Sequence[Spec] | None = None,
    cache: str | CachePlan | None = None,
    encoder: str | None = None,
) -> Iterator[Trace]:
    """Reduce the visual tokens and the KV cache of a model for as long as the `with` lasts.

    Everything else stays stock: `generate` with beams, chunked prefill, static or dynamic caches,
    batches, later turns with further images. Tokens keep their original positions; separators are
    never dropped. A share refers to the tokens that enter its stage, a whole number is per image
    or video, and a share of 1.0 leaves the model bit-identical. The result of removing tokens at
    `pre` is what the stock model computes on the prompt without them: a sliding window counts the
    tokens that are left, a convolution runs over them, and an image whose tokens see each other in
    both directions stays such a block. The same holds at `llm<K>` for the layers from K on.

    Hidden states and logits of a prompt have its reduced length, rows left-padded. At `llm<K>` the
    last query and the text are those of the call: a chunk under chunked prefill, with a draft token
    at its end under assisted decoding. Inside the `with`, a model serves any number of threads and
    conversations; a cache that `llm<K>` made uneven is to be continued inside one too.

    `cache` decides which keys and values stay, in which precision, and which are read: by KV head,
    layer and row, in layers of full attention (a sliding window is bounded by itself). Entries keep
    their positions; the cache goes on reporting the whole length. Policies act at the end of a
    prompt, however many chunks it came in, on the tokens that are present, and again at the end of
    later prompts; `sink`, `window` and `streamingvlm` act at every step, too, so the cache stays
    bounded. A budget above what there is, or a share of 1.0, changes no bit. `quant` and `zipvl`
    pack entries once and unpack them when they are read. Under `retrieve` nothing leaves: answers
    read text, tokens that position policies keep, and the frames chosen for the question.

    Args:
        model: A stock transformers model, for example Qwen2_5_VLForConditionalGeneration.
        reduce: Spec string, `name[@site][:budget]` joined by `+`, or its parsed stages; sites
            `pixel` (before the vision tower), `vit` (inside it), `pre` (before the language model)
            and `llm<K>` (before decoder layer K), or `llm` for a method with a schedule, which
            cuts at several layers and ends at its budget. None reduces nothing, "auto" plans.
        cache: Spec string of KV policies joined by `+`, such as `"snapkv:1024"`,
            `"lookm:0.3+quant:8"`, `"sink:4+window:512"` or `"retrieve:8"`; an integer counts
            tokens (frames for `retrieve`, bits for `quant`). For the default DynamicCache.
        encoder: `"fast"`, `"compile"` or `"graph"` (CUDA): a faster vision tower that gives the
            same features up to rounding; see `mmfast.models.vision.acceleration`. None is stock.

    Yields:
        The trace: a row per stage and call, and every Reduction. Its row `kv` counts the entries
        of a layer and head before and after a prompt (or those read), and the bytes behind it.

    Raises:
        SpecError: Wrong name, site, knob, budget or encoder, or a K the model does not have.
        ModelError: Unknown family, or attached already; a static or quantised cache under `cache`.

    Example:
        >>> with attach(model, "evs:0.25+fastv@llm3:0.5") as trace:
        ...     model.generate(**inputs)
    """
    specs, plan, trace = AUTO if reduce == AUTO else parse(reduce), call_plan(cache), Trace()
    with ExitStack() as stack:
        wanted = specs or plan is not None or encoder is not None
        for stage in _stages(model, specs, plan, encoder, trace) if wanted else ():
            stack.enter_context(stage)
        yield trace


def _stages(
    model: Any, specs: Any, plan: CachePlan | None, encoder: str | None, trace: Trace
) -> Iterator[Stage]:
    """Check, then everything that enters the model, in order; "auto" waits for the first call."""
    if specs == AUTO:
        planned = importlib.import_module(PLANNER).planned
        rest = (plan, encoder, trace)
        yield planned(model, lambda spec: _stages(model, parse(spec), *rest), trace)
        return
    from mmfast.models.families.adapter import adapter_for
    from mmfast.models.kv.policy import KVStage
    from mmfast.models.reduction.call import PassState
    from mmfast.models.reduction.check import check
    from mmfast.models.reduction.hooks import Hooks
    from mmfast.models.reduction.site import sites_of
    from mmfast.models.vision.acceleration import fast_encoder
    from mmfast.models.vision.merge import vit_stage
    from mmfast.models.vision.pixel import pixel_stage

    specs = check(specs, model, plan, encoder)
    yield _only_once(model)
    adapter, sites, state = adapter_for(model), sites_of(specs), PassState()
    if encoder is not None:
        yield fast_encoder(model, encoder)
    for spec in specs:
        if spec.site == "vit" and not spec.whole:
            yield vit_stage(model, adapter, spec, trace)
    early = [spec for spec in specs if spec.site == "pixel"]
    if early:
        yield pixel_stage(model, adapter, early)
    if plan is not None:  # before the hooks: what it evicts is gone for the call that begins
        yield KVStage(model, plan, trace, state).installed()
    if sites or plan is not None:
        yield Hooks(model, sites, trace, state, whole=plan is not None).installed()


@contextmanager
def _only_once(model: Any) -> Iterator[None]:
    base = model.base_model
    with _LOCK:
        if base in _attached:
            raise ModelError(
                f"this {type(model).__name__} is attached already; leave the outer attach() first, "
                "or join both specs with '+'"
            )
        _attached.add(base)
    try:
        yield
    finally:
        with _LOCK:
            _attached.discard(base)
