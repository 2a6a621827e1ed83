"""Predicting time and memory of a request under a spec, from the model's shape and the rates.

Time to first token = encoder + selection + prefill + overhead. Prefill adds up the layers with
the tokens that each of them really gets; memory adds weights, keys and values, and the larger of
what the encoder and one decoder layer hold while they work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmfast.core.schedule import expand
from mmfast.core.spec import Spec
from mmfast.models.signals import TOWER_SIGNALS
from mmfast.models.stages import sites_of
from mmfast.planner.rates import Rates, at
from mmfast.planner.shape import Shape
from mmfast.planner.work import Work

# What reading attention inside the language model costs, in attention passes of one layer.
_INNER_PASSES = {"attn_visual": 2.0, "attn_text": 1.0, "text_attn": 1.0}
# Copies of its input that a layer holds at its widest: residual, normed, gate, up and product.
_COPIES_HIDDEN, _COPIES_WIDE = 4, 3


@dataclass(frozen=True)
class Cost:
    """A prediction.

    Attributes:
        encode: ms of the encoder, signals included.
        select: ms of choosing tokens.
        prefill: ms of the decoder layers and one row of logits.
        overhead: ms of everything else.
        weights: Bytes of the model.
        kv: Bytes of keys and values after the prefill.
        activations: Bytes held at the widest point.
        kept: Visual tokens left after the last stage.
        mean: Visual tokens of the prompt, mean over the decoder layers.
    """

    encode: float
    select: float
    prefill: float
    overhead: float
    weights: int
    kv: int
    activations: int
    kept: int
    mean: float

    @property
    def ttft(self) -> float:
        """Ms to the first token, from the moment the inputs are ready."""
        return self.encode + self.select + self.prefill + self.overhead

    @property
    def memory(self) -> int:
        """Bytes at the widest point."""
        return self.weights + self.kv + self.activations


def visual_lengths(stages: Sequence[Spec], n: int, depth: int) -> list[int]:
    """Visual tokens of one item of `n` in each decoder layer; stages of schedules as cuts."""
    lengths, entered = [n] * depth, dict[int, int]()
    for site in sites_of(stages):
        layer = min(site.layer, depth - 1)
        left = site.left(lengths[layer], entered)
        if left is not None:  # a method that decides itself might as well keep everything
            lengths[layer:] = [left] * (depth - layer)
    return lengths


def predict(
    shape: Shape, rates: Rates, work: Work, stages: Sequence[Spec], call: str = "generate"
) -> Cost:
    """Predict one call.

    Args:
        shape: The model.
        rates: The device.
        work: The request.
        stages: Parsed spec; none is the stock model.
        call: Key of `rates.overhead`: what is called, `generate` or `forward`.
    """
    stages = expand(stages, shape.depth)
    per_item = [visual_lengths(stages, n, shape.depth) for n in work.items]
    visual = [sum(lengths) for lengths in zip(*per_item, strict=True)]
    text = work.prompt * work.rows - work.visual
    stock, reduced = rates.overhead.get(call, (0.0, 0.0))
    return Cost(
        encode=at(rates.encode, work.pixels) + _signals(rates, work, stages),
        select=_select(rates, work, stages, visual),
        prefill=_prefill(shape, rates, [text + v for v in visual], work.rows) + rates.head,
        overhead=reduced if stages else stock,
        weights=shape.weights,
        kv=sum(text + v for v in visual) * shape.entry * shape.element,
        activations=_activations(shape, work, text + max(visual)),
        kept=visual[-1],
        mean=sum(visual) / len(visual),
    )


def _prefill(shape: Shape, rates: Rates, tokens: Sequence[int], rows: int) -> float:
    """Layers in milliseconds; runs of equal layers are computed once."""
    total, known = 0.0, dict[tuple[int, int], float]()
    for macs, n in zip(shape.layers, tokens, strict=True):
        if (macs, n) not in known:
            linear = at(rates.linear, n) * macs / shape.layers[0]
            known[macs, n] = linear + rows * at(rates.attention, n / rows, power=2)
        total += known[macs, n]
    return total


def _signals(rates: Rates, work: Work, stages: Sequence[Spec]) -> float:
    """Reading attention in the tower, once per place."""
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
    """Where the time of choosing from these items is kept."""
    return f"{stage.method.name}:{'+'.join(map(str, work.items))}"


def _activations(shape: Shape, work: Work, tokens: int) -> int:
    """Bytes of the widest moment; the wide part of a layer is its share beyond the attention."""
    wide = max(0, shape.layers[0] - 4 * shape.hidden * shape.width) // (3 * shape.hidden)
    layer = tokens * (_COPIES_HIDDEN * shape.hidden + _COPIES_WIDE * wide)
    return max(layer, 2 * work.pixels) * shape.element
