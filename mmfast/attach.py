"""`with attach(model, …)`: token reduction for a stock model, hooks in and hooks out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from mmfast.caches.plan import CachePlan, call_plan
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.spec import Spec, expand, parse
from mmfast.core.trace import Trace

_LOCK = threading.Lock()
_attached: weakref.WeakSet[Any] = weakref.WeakSet()


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
    last query and the text are those of the call at hand: a chunk under chunked prefill, with a
    draft token at its end under assisted decoding. Inside the `with`, a model serves any number of
    threads and conversations; a cache that `llm<K>` made uneven is to be continued inside one too.

    `cache` decides what keys and values stay, in which precision, and what of them is read: by
    KV head, layer and row, in layers of full attention (a sliding window is bounded by itself, a
    convolution has none). Entries keep their positions; the cache goes on reporting the whole
    length. Policies act at the end of a prompt, however many chunks it came in, on the tokens
    that are present, and again at the end of later prompts; `sink`, `window` and `streamingvlm`
    act at every step, too, so the cache stays bounded. A budget above what there is, or a share
    of 1.0, changes no bit. `quant` and `zipvl` pack entries once and unpack them when they are
    read. Under `retrieve` nothing leaves: answers read text, what position policies keep, and the
    frames that the question has chosen; a later question chooses anew. The cache is the default
    DynamicCache.

    Args:
        model: A stock transformers model, for example Qwen2_5_VLForConditionalGeneration.
        reduce: Spec string, `name[@site][:budget]` joined by `+`; sites `pixel` (before the
            vision tower), `vit` (inside it), `pre` (before the language model) and `llm<K>`
            (before decoder layer K), or `llm` for a method with a schedule, which cuts at several
            layers and ends at its budget. None reduces nothing.
        cache: Spec string of KV policies joined by `+`, such as `"snapkv:1024"`,
            `"lookm:0.3+quant:8"`, `"sink:4+window:512"` or `"retrieve:8"`; an integer counts
            tokens (frames for `retrieve`, bits for `quant`). None keeps every key and value.
        encoder: `"fast"`, `"compile"` or `"graph"` (CUDA): a faster vision tower that gives the
            same features up to rounding; see `mmfast.models.vision.fast`. None is stock.

    Yields:
        The trace: a row per stage and call, and every Reduction. The row `kv` of a prompt counts
        the entries of a layer and head (the mean over layers) before and after, or those that are
        read, and under `peak_bytes` the bytes of keys and values that the cache holds behind it.

    Raises:
        SpecError: Wrong name, site, knob, budget or encoder, or a K the model does not have.
        ModelError: Unknown family, or the model is attached already; inside, a static or already
            quantised cache under `cache`.

    Example:
        >>> with attach(model, "evs:0.25+fastv@llm3:0.5") as trace:
        ...     model.generate(**inputs)
    """
    with _stages(model, parse(reduce), call_plan(cache), encoder) as trace:
        yield trace


@contextmanager
def _stages(
    model: Any, specs: tuple[Spec, ...], plan: CachePlan | None, encoder: str | None
) -> Iterator[Trace]:
    """All stages in, all stages out."""
    trace = Trace()
    if not specs and plan is None and encoder is None:
        yield trace
        return
    from mmfast.models.families.adapter import adapter_for

    adapter = adapter_for(model)
    layers = model.get_decoder().layers
    behind_attention = [i + 1 for i, layer in enumerate(layers[:-1]) if hasattr(layer, "self_attn")]
    specs = expand(specs, len(layers), behind_attention)
    check_sites(specs, model)
    coming_back = [str(spec) for spec in specs if spec.method.revives]
    if coming_back and plan is not None:
        raise SpecError(
            f"{coming_back[0]!r} puts tokens back into the cache, which {str(plan)!r} does not "
            "expect; drop one of them, or reduce with fastv"
        )
    with ExitStack() as stack:
        stack.enter_context(_only_once(model))
        if encoder is not None:
            from mmfast.models.vision.fast import check_alone, fast_encoder

            check_alone(encoder, specs)
            stack.enter_context(fast_encoder(model, encoder))
        for stage in _tower_stages(model, adapter, specs, trace):
            stack.enter_context(stage)
        from mmfast.models.hooks import Hooks
        from mmfast.models.kv.policy import KVStage
        from mmfast.models.reduction.site import sites_of

        sites = sites_of(specs)
        kv = None if plan is None else KVStage(model, plan, trace)
        if sites or kv is not None:
            stack.enter_context(Hooks(model, adapter, sites, trace, kv).installed())
        yield trace


def _tower_stages(
    model: Any, adapter: Any, specs: tuple[Spec, ...], trace: Trace
) -> Iterator[AbstractContextManager[None]]:
    """What stands before and inside the vision tower."""
    early = [spec for spec in specs if spec.site == "pixel"]
    for spec in specs:
        if spec.site == "vit" and not spec.whole:
            from mmfast.models.vision.merge import vit_stage

            if early:
                raise SpecError(
                    f"{str(early[0])!r} and {str(spec)!r} cannot share a vision tower: merging "
                    "needs whole frames; use site 'pre' for one of them"
                )
            yield vit_stage(model, adapter, spec, trace)
    if early:
        from mmfast.models.vision.pixel import pixel_stage

        yield pixel_stage(model, adapter, early)


def check_sites(specs: tuple[Spec, ...], model: Any) -> None:
    """Refuse sites and layers that the model does not have."""
    layers = len(model.get_decoder().layers)
    for spec in specs:
        if spec.site not in ("pixel", "vit", "pre", "llm"):
            raise SpecError(
                f"site {spec.where!r} of {str(spec)!r} is not one of pixel, vit, pre, llm<K>"
            )
        if spec.layer is not None and spec.layer >= layers:
            raise SpecError(
                f"{str(spec)!r} asks for decoder layer {spec.layer}, but {type(model).__name__} "
                f"has {layers} layers; choose llm0 to llm{layers - 1}"
            )
    _check_layers([spec for spec in specs if spec.site != "vit"], model)


def _check_layers(specs: list[Spec], model: Any) -> None:
    """Every decoder layer from the first cut on must be able to hold fewer tokens."""
    from mmfast.models.reduction.decoder_signals import INNER
    from mmfast.models.reduction.masks import CONV, LAYER_KINDS

    kinds = list(getattr(model.get_decoder().config, "layer_types", None) or ())
    first = min((spec.layer or 0 for spec in specs), default=len(kinds))
    for index, kind in enumerate(kinds):
        if index >= first and kind not in LAYER_KINDS:
            raise ModelError(
                f"decoder layer {index} of {type(model).__name__} is of type {kind!r} and cannot "
                "hold reduced tokens; reduce after the last such layer, at llm<K>"
            )
    for spec in specs:
        if spec.layer and CONV in kinds[spec.layer - 1 : spec.layer] and not spec.whole:
            reads = [need for need in spec.method.needs if need in INNER]
            if reads:
                after = [f"llm{i + 1}" for i, kind in enumerate(kinds[:-1]) if kind != CONV]
                raise ModelError(
                    f"{str(spec)!r} reads the attention of decoder layer {spec.layer - 1} of "
                    f"{type(model).__name__}, which is a convolution; choose {' or '.join(after)}"
                )


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
