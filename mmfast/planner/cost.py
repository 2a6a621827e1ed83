"""Predicted time and memory of a request under a spec, from the model's shape and the rates.

Time to first token = encoder + selection + prefill + overhead; memory = weights, keys and values,
and the larger of what the encoder and one decoder layer hold while they work.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.core.registry import MEDIA, TEXT
from mmfast.core.spec import Budget, Spec, count, expand, parse
from mmfast.models.cost import attention_width, linear_macs
from mmfast.models.decoder.draft_stage import RISES_TO, DraftSource
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.packing import PackedLinear
from mmfast.models.reduction.decoder_signals import BEFORE, DRIFT, INNER
from mmfast.models.reduction.record import features_given
from mmfast.models.reduction.site import sites_of
from mmfast.models.reduction.tower_signals import TOWER_SIGNALS
from mmfast.models.wrappers import KEEPS_ALL, kind_of
from mmfast.ops.quantisation import Quantiser
from mmfast.planner.rates import Rates, at

# Of a config, what changes from one download or version to the next and not with the shape.
_IDLE = {"_name_or_path", "transformers_version", "architectures", "id2label", "label2id", "dtype"}


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a model that its time and memory depend on."""

    layers: tuple[int, ...]  # multiply-adds per token of each decoder layer
    width: int  # query heads x head size of the decoder
    hidden: int  # width of the decoder
    entry: int  # values of keys and values that one token leaves in one layer
    element: int  # bytes of a value
    weights: int  # bytes of all parameters and buffers
    blocks: int = 0  # blocks of the vision tower
    head: int = 0  # width of a head of keys; 0 where there is one head
    full: tuple[bool, ...] = ()  # layers on which KV policies act; () is all of them

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)


def shape_of(model: Any, blocks: int = 0) -> ModelShape:
    """Read the shape off a model."""
    config = model.config.get_text_config()
    width = attention_width(model)
    head = width // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    return ModelShape(
        layers=tuple(linear_macs(layer) for layer in model.get_decoder().layers),
        width=width,
        hidden=int(config.hidden_size),
        entry=2 * groups * head,
        element=next(model.parameters()).element_size(),
        weights=sum(t.numel() * t.element_size() for t in tensors),
        blocks=blocks,
        head=head,
        full=tuple(kind_of(config, i) in KEEPS_ALL for i in range(len(model.get_decoder().layers))),
    )


@dataclass(frozen=True)
class DraftShape:
    """Memory of what drafts beside the model that answers: weights, and a cache of its own.

    Attributes:
        shape: That of the draft; `weights` are those that the two do not share.
        media: It reads the media of a prompt.
        stages: Stages that reduce what it reads; None where it reads what is left to the model.
        share: What it copies of the visual keys and values that it reads; None is all.
        behind: An early exit stands behind so many layers and is one itself; 0 is no exit.
    """

    shape: ModelShape
    media: bool = True
    stages: tuple[Spec, ...] | None = ()
    share: Budget = None
    behind: int = 0

    def kept_bytes(self, work: Work, stages: Sequence[Spec] = ()) -> int:
        """Return the bytes of its keys and values at the end of an answer.

        `stages` reduce what the model itself reads.
        """
        shape, rows = self.shape, work.rows * work.beams
        read = expand(stages if self.stages is None else self.stages, shape.depth)
        visual = [0] * shape.depth
        for n in work.items if self.media else ():
            per_layer = lengths_of(read, n, shape.depth)
            visual = [v + more for v, more in zip(visual, per_layer, strict=True)]
        if self.share is not None and not any(visual):
            return 0  # a view drafts where it can leave something out
        if isinstance(self.share, int):
            visual = [min(self.share * work.rows, v) for v in visual]
        elif self.share is not None:
            visual = [count(self.share, v) or 0 for v in visual]
        text = work.prompt * work.rows - work.visual
        tokens = [(text + v) * work.beams for v in visual]
        if self.behind:
            shape, tokens = replace(shape, layers=shape.layers[:1], full=()), [tokens[self.behind]]
        chosen = 0  # what a view chose of a prompt stays beside the cache that it begins
        if self.share is not None:
            chosen = _kept_bytes(shape, rows, 0, tokens, None)
        return chosen + _kept_bytes(shape, rows, work.answer, tokens, None)


def draft_shape(source: DraftSource | None, model: Any) -> DraftShape | None:
    """Read the shape off what drafts for a model; None where that holds nothing of its own."""
    if source is None:
        return None
    if (adapter := source.early_exit) is not None:
        size = sum(t.numel() * t.element_size() for t in adapter.parameters())
        shape = replace(shape_of(model), weights=size, entry=2 * adapter.config["width"])
        return DraftShape(shape, stages=None, behind=adapter.layer)
    if source.plan.shares:
        share = max(source.plan.budget or 0, RISES_TO) if source.plan.rise else source.plan.budget
        shape = replace(shape_of(model), weights=source.light_bytes)
        return DraftShape(shape, stages=None, share=share)
    if (draft := source.draft) is None:
        return None
    shared = {t.untyped_storage().data_ptr() for t in model.parameters()}
    own = (t for t in draft.parameters() if t.untyped_storage().data_ptr() not in shared)
    held = sum(each.nbytes for each in draft.modules() if isinstance(each, PackedLinear))
    held += sum(t.numel() * t.element_size() for t in own)
    shape = replace(shape_of(draft), weights=held)
    return DraftShape(shape, source.sees, tuple(parse(source.plan.reduce)))


def fingerprint(model: Any) -> str:
    """The same for every copy of a model shape: what measured rates may be shared by."""
    text = json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    text += "".join(sorted({m.kinds for m in model.modules() if isinstance(m, PackedLinear)}))
    return hashlib.sha256(f"{type(model).__name__} {text}".encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _IDLE}
    return value


_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class Work:
    """The amount of work in one call."""

    prompt: int  # tokens of a row, visual ones included
    rows: int = 1  # rows of the batch
    items: tuple[int, ...] = ()  # visual tokens of each image or video that a method may touch
    pixels: int = 0  # numbers the encoder reads; 0 where it does not run
    grids: tuple[tuple[int, int, int] | None, ...] = ()  # none where there is no raster
    tiled: bool = False  # some image is cut into tiles
    attentive: bool = True  # the encoder has attention that signals can be read from
    answer: int = 0  # tokens that each row may write, whose keys and values add up
    beams: int = 1  # copies of each row inside the decoder

    @property
    def visual(self) -> int:
        """Visual tokens of the whole batch."""
        return sum(self.items)

    def lacks(self, site: str, need: str) -> str | None:
        """Reason why a method at `site` cannot have a signal; None where it can."""
        if need == "x":
            return None
        if need == "query":
            text = self.prompt * self.rows - self.visual
            return None if text > 0 else "the prompt has no text"
        if site == "llm":
            if need in INNER | {BEFORE, DRIFT}:
                return None
            return f"{need!r} does not exist inside the language model"
        if site == "pre" and need in TOWER_SIGNALS:
            if not self.attentive:
                return "the encoder has no attention to read"
            return None if self.pixels else f"{need!r} comes from the encoder, which does not run"
        if need == "grid":
            return None if all(self.grids) else "the tokens are no full raster (image tiles)"
        if need == "tile":
            return None if self.tiled else "no image is cut into tiles"
        known = {"place", "sizes"} | ({"pixels"} if site == "pixel" else set())
        return None if need in known else f"{need!r} is not known to the planner"


def work_of(model: Any, inputs: Mapping[str, Any]) -> Work:
    """Read a request off what the processor returned; ModelError if it has nothing visual."""
    adapter = adapter_for(model)
    layouts = [
        layout
        for kind in features_given(inputs)
        for layout in adapter.layout(model.base_model, kind, inputs)
    ]
    if not layouts:
        raise ModelError("inputs hold no image and no video; a plan is about visual tokens")
    rows, prompt = inputs["input_ids"].shape
    return Work(
        prompt=int(prompt),
        rows=int(rows),
        items=tuple(len(layout.content()) for layout in layouts),
        pixels=pixels_of(inputs),
        grids=tuple(layout.grid for layout in layouts),
        tiled=any(layout.tiles is not None for layout in layouts),
        attentive=tower_depth(model) > 0,
    )


def tower_depth(model: Any) -> int:
    """Blocks of the vision tower; 0 where the family's encoder is no stack of blocks."""
    try:
        return len(tower_of(model).blocks)
    except (ModelError, StopIteration, AttributeError):
        return 0


def pixels_of(inputs: Mapping[str, Any], names: Sequence[str] = _PIXELS) -> int:
    """Count the numbers that the encoder reads."""
    found = [inputs.get(name) for name in names]
    return sum(value.numel() for value in found if isinstance(value, Tensor))


# What reading attention inside the language model costs, in attention passes of one layer.
_INNER_PASSES = {"attn_visual": 2.0, "attn_text": 1.0, "attn_peak": 1.0, "attn_mutual": 2.0}
# Copies of its input that a layer holds at its widest: residual, normed, gate, up and product.
_COPIES_HIDDEN, _COPIES_WIDE = 4, 3


@dataclass(frozen=True)
class Cost:
    """A prediction."""

    encode: float  # ms of the encoder, signals included
    select: float  # ms of choosing tokens
    prefill: float  # ms of the decoder layers and one row of logits
    overhead: float  # ms of everything else
    weights: int  # bytes of the model
    kv: int  # bytes of keys and values after the prefill, or the answer where its length is known
    activations: int  # bytes held at the widest point
    kept: int  # visual tokens left after the last stage
    mean: float  # visual tokens of a prompt, mean over the prompts and the decoder layers
    noise: float = 0.0  # relative difference of two measurements of the same

    @property
    def ttft(self) -> float:
        """Ms to the first token, from the moment the inputs are ready.

        What was measured in an unsteady moment may leave less than nothing to the rest.
        """
        return max(0.0, self.encode + self.select + self.prefill + self.overhead)

    @property
    def memory(self) -> int:
        """Bytes at the widest point."""
        return self.weights + self.kv + self.activations


def lengths_of(stages: Sequence[Spec], n: int, depth: int, other: str = TEXT) -> list[int]:
    """Tokens of one item, or of the text, of `n` in each decoder layer; schedules as cuts.

    Stages that drop the `other` kind of tokens alone do not count.
    """
    lengths, entered = [n] * depth, dict[int, int]()
    for site in (site for site in sites_of(stages) if site.tokens != other):
        layer = min(site.layer, depth - 1)
        left = site.left(lengths[layer], entered)
        if left is not None:  # a method that decides itself might as well keep everything
            lengths[layer:] = [left] * (depth - layer)
    return lengths


def predict(
    shape: ModelShape,
    rates: Rates,
    work: Work,
    stages: Sequence[Spec],
    call: str = "generate",
    cache: CachePlan | None = None,
) -> Cost:
    """Predict one call; of `cache` the bytes alone, not the time of choosing."""
    stages = expand(stages, shape.depth)
    per_item = [lengths_of(stages, n, shape.depth) for n in work.items]
    visual = [sum(lengths) for lengths in zip(*per_item, strict=True)]
    text = lengths_of(stages, work.prompt * work.rows - work.visual, shape.depth, MEDIA)
    both = [(v + t) * work.beams for v, t in zip(visual, text, strict=True)]
    rows = work.rows * work.beams  # of the decoder
    stock, reduced = rates.overhead.get(call, (0.0, 0.0))
    small = (s.budget for s in stages if s.site == "pixel" and isinstance(s.budget, float))
    return Cost(
        encode=at(rates.encode, work.pixels * math.prod(small)) + _signals(rates, work, stages),
        select=_select(rates, work, stages, visual),
        prefill=_prefill(shape, rates, both, rows) + rates.head,
        overhead=reduced if stages else stock,
        weights=shape.weights,
        kv=_kept_bytes(shape, rows, work.answer, both, cache),
        activations=_activations(shape, work, max(both))
        + _whole_layer(shape, rows * work.answer, both, cache),
        kept=visual[-1],
        mean=sum(visual) / len(visual) / work.rows,
        noise=rates.noise,
    )


def _kept_bytes(
    shape: ModelShape, rows: int, answer: int, tokens: Sequence[int], cache: CachePlan | None
) -> int:
    token = shape.entry * shape.element
    whole = [(n + rows * answer) * token for n in tokens]
    if cache is None:
        return sum(whole)
    full = shape.full or (True,) * shape.depth
    each = [rows * held_bytes(shape, cache, n // rows, answer) for n in tokens]
    return sum(mine if acts else all_ for mine, all_, acts in zip(each, whole, full, strict=True))


def held_bytes(shape: ModelShape, cache: CachePlan, prompt: int, answer: int = 0) -> int:
    """Return the most bytes that one layer and row holds until an answer of so many tokens ends.

    A score policy chooses behind the prompt; a store in fewer bits keeps the latest as they are.
    """
    token, score, store = shape.entry * shape.element, cache.score, cache.quantiser()
    if score is not None and score.budget is not None:
        share = score.budget
        prompt = min(share, prompt) if isinstance(share, int) else count(share, prompt) or prompt
    if store is None:
        return (prompt + answer) * token
    recent = min(prompt, store.residual) + answer
    recent = min(recent, store.residual + max(store.group, store.residual))
    return recent * token + _packed(shape, store, prompt + answer - recent)


def _packed(shape: ModelShape, store: Quantiser, n: int) -> int:
    """Bytes of codes and of the two numbers of each group: keys by channel, values by token."""
    width = shape.head or shape.entry // 2
    heads, scale = shape.entry // (2 * width), 2 * shape.element
    codes = 2 * heads * -(-n * width * store.bits // 8)
    groups = -(-n // store.group) * width + n * -(-width // store.group)
    return codes + heads * groups * scale


def _whole_layer(
    shape: ModelShape, answers: int, tokens: Sequence[int], cache: CachePlan | None
) -> int:
    """A policy acts behind each layer, which is whole until then; packs are unpacked for a step."""
    if cache is None:
        return 0
    answers = answers if cache.store is not None else 0
    return (max(tokens) + answers) * shape.entry * shape.element


def _prefill(shape: ModelShape, rates: Rates, tokens: Sequence[int], rows: int) -> float:
    """Layers in milliseconds; runs of equal layers are computed once."""
    total, known = 0.0, dict[tuple[int, int], float]()
    for macs, n in zip(shape.layers, tokens, strict=True):
        if (macs, n) not in known:
            linear = at(rates.linear, n) * macs / shape.layers[0]
            known[macs, n] = linear + rows * at(rates.attention, n / rows, power=2)
        total += known[macs, n]
    return total


def _signals(rates: Rates, work: Work, stages: Sequence[Spec]) -> float:
    needs = {need for s in stages if s.site == "pre" for need in s.method.needs}
    read = {"attn" if n == "attn_visual" else n for n in needs & set(TOWER_SIGNALS) - {"keys"}}
    return len(read) * at(rates.signal, work.pixels)


def _select(rates: Rates, work: Work, stages: Sequence[Spec], visual: Sequence[int]) -> float:
    """Choosing itself, and the attention that is read for it inside the language model."""
    total = 0.0
    for stage in stages:
        layer = stage.layer or 0
        total += rates.select.get(select_key(stage, work), 0.0)
        if stage.site == "llm":
            passes = sum(_INNER_PASSES.get(need, 0.0) for need in stage.method.needs)
            n = work.prompt - work.visual / work.rows + visual[max(0, layer - 1)] / work.rows
            total += passes * work.rows * at(rates.attention, n, power=2)
    return total


def select_key(stage: Spec, work: Work) -> str:
    """Key of the time of choosing from these items."""
    return f"{stage.method.name}:{'+'.join(map(str, work.items))}"


def _activations(shape: ModelShape, work: Work, tokens: int) -> int:
    """Bytes of the widest moment; the wide part of a layer is its share beyond the attention."""
    wide = max(0, shape.layers[0] - 4 * shape.hidden * shape.width) // (3 * shape.hidden)
    layer = tokens * (_COPIES_HIDDEN * shape.hidden + _COPIES_WIDE * wide)
    return max(layer, 2 * work.pixels) * shape.element
