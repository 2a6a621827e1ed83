"""SmoothQuant+: activations made smooth before weights are rounded, at no cost afterwards.

What is rounded in a weight counts as much as the activation it meets, so a few channels of large
activations carry most of the error. A channel is divided by a number where it is made, in the
weights of the norm in front or in those of `up_proj`, and its columns of the weights behind are
multiplied by it: the model computes what it did, and its weights round better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError, unknown
from mmfast.models.packing import SMALL, PackedLinear
from mmfast.models.wrappers import decoder_of, layers_of, stock_model
from mmfast.ops.weight_forms import FORMS, pack

ALPHAS = tuple(n / 10 for n in range(1, 10))
_SAME = 1e-3  # relative error under which a smoothed model counts as the same; half types: 1e-1
_TINY = 1e-5  # least activation and weight of a channel


@dataclass(frozen=True)
class Smoothing:
    """Exponent that a search found.

    Attributes:
        alpha: The exponent; None where no smoothing lessens the error, and nothing was changed.
        error: Relative error of the logits on rounded weights, smoothed.
        plain: The same without smoothing.
        places: Number of norms and products that were scaled.
    """

    alpha: float | None
    error: float
    plain: float
    places: int


@dataclass(eq=False)
class _Place:
    """A module that makes activations, the layers that read them, and their largest numbers."""

    source: nn.Module
    layers: list[nn.Linear]
    tops: Tensor  # [K]

    def scale(self, alpha: float) -> Tensor:
        """Divisors `[K]` of the channels: `max |x|^alpha / max |w|^(1 - alpha)`."""
        columns = torch.stack([layer.weight.float().abs().amax(0) for layer in self.layers])
        heavy = columns.amax(0).clamp_min(_TINY)
        return self.tops.clamp_min(_TINY) ** alpha / heavy ** (1 - alpha)

    def divide(self, by: Tensor) -> None:
        """Divide what the source makes, and multiply the columns that read it."""
        source, whole = self.source, isinstance(self.source, nn.Linear)
        for name, given in source.named_parameters(recurse=False):
            shift = _shift(source) if name == "weight" else 0.0
            each = by[:, None] if whole and name == "weight" else by
            given.copy_((given.float() + shift) / each - shift)
        for layer in self.layers:
            layer.weight.mul_(by)


def smooth(
    model: Any,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    form: str = "int4",
    alphas: Sequence[float] = ALPHAS,
) -> Smoothing:
    """Smooth the decoder of a float model in place for weights of a form.

    Pan et al. (2023): one exponent for the whole model, that of the least error behind all layers.
    Every exponent is tried: weights are smoothed, rounded, and the logits compared with those of
    the float model. What follows is a model of the same class, which can be saved, and packed by
    `pack_weights` or, loaded again, by `weights=`.

    Scaled are the inputs of layers that read a norm, and that of `down_proj` in a gated MLP. Others
    (`o_proj`, experts, norms that something else reads) stay as they are.

    Args:
        model: A model of transformers, in float and on a CPU.
        inputs: Arguments of its forward, of one batch or several: prompts as it will read them.
        form: Form of the weights, a name of `weights=`.
        alphas: Exponents to try, 0 (weights alone) to 1 (activations alone).

    Raises:
        ModelError: An unknown form, a packed model, no inputs, or a model without such layers.
    """
    if form not in FORMS:
        raise ModelError(unknown("form of weights", form, FORMS))
    batches = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    stock = stock_model(model)
    text = decoder_of(stock)
    if any(isinstance(each, PackedLinear) for each in stock.modules()):
        raise ModelError(f"{type(stock).__name__} is packed already; smooth it before weights=")
    if not batches or not alphas:
        raise ModelError("smooth() needs at least one batch of inputs and one exponent")
    with torch.no_grad():
        exact, found = _places(text, stock, batches)
        if not _holds(found, stock, batches[0], exact[0]):
            found = [place for place in found if _holds([place], stock, batches[0], exact[0])]
        if not found:
            raise ModelError(f"{type(stock).__name__} has no layers that smooth() knows")
        plain = _rounded_error(text, stock, batches, exact, form)
        errors = {}
        for alpha in alphas:
            with _restored(text):
                _divide(found, alpha)
                errors[alpha] = _rounded_error(text, stock, batches, exact, form)
        best = min(errors, key=lambda alpha: errors[alpha])
        if errors[best] >= plain:
            return Smoothing(None, plain, plain, 0)
        _divide(found, best)
    return Smoothing(best, errors[best], plain, len(found))


def _divide(places: Sequence[_Place], alpha: float) -> None:
    """Scale all places, by numbers of the weights as they were."""
    scales = [place.scale(alpha) for place in places]
    for place, scale in zip(places, scales, strict=True):
        place.divide(scale)


def _shift(norm: nn.Module) -> float:
    """Number that a norm adds to its weight (Gemma: 1), read from what it makes of a row."""
    if isinstance(norm, nn.Linear):
        return 0.0
    weight: Any = norm.weight
    row = torch.linspace(1, 2, len(weight), dtype=weight.dtype)[None]
    kept = weight.clone()
    weight.zero_()
    nothing = bool((norm(row) - _bias(norm)).abs().max() < _TINY)
    weight.copy_(kept)
    return 0.0 if nothing else 1.0


def _bias(norm: nn.Module) -> Any:
    bias = getattr(norm, "bias", None)
    return 0.0 if bias is None else bias


def _places(
    text: Any, stock: Any, batches: Sequence[Mapping[str, Any]]
) -> tuple[list[Tensor], list[_Place]]:
    """Exact logits, and what is to be scaled: whose output, the very tensor, linear layers read."""
    made: dict[int, tuple[nn.Module, Tensor]] = {}  # by the tensor's identity, held against reuse
    found: dict[nn.Module, _Place] = {}

    def makes(module: nn.Module, _: Any, out: Any) -> None:
        made[id(out)] = module, out

    def reads(layer: Any, args: Any) -> None:
        source = made.get(id(args[0]), (gates.get(layer),))[0]
        if source is None:
            return
        tops = args[0].float().abs().flatten(0, -2).amax(0)
        place = found.setdefault(source, _Place(source, [], tops))
        place.tops = torch.maximum(place.tops, tops)
        if layer not in place.layers:
            place.layers.append(layer)

    gates: dict[Any, nn.Module] = {}
    exact = []
    with ExitStack() as stack:
        for module in (m for layer in layers_of(text) for m in layer.modules()):
            if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
                gates[module.down_proj] = module.up_proj
            weight = getattr(module, "weight", None)
            if isinstance(module, nn.Linear):
                stack.enter_context(module.register_forward_pre_hook(reads))
            elif isinstance(weight, nn.Parameter) and weight.ndim == 1:
                stack.enter_context(module.register_forward_hook(makes))
        for batch in batches:
            exact.append(_logits(stock, batch))
            made.clear()
    return exact, list(found.values())


def _holds(places: Sequence[_Place], stock: Any, batch: Mapping[str, Any], exact: Tensor) -> bool:
    """Return whether the model computes the same with these places scaled.

    It does not where something reads the channels that was not seen.
    """
    modules = {each for place in places for each in (place.source, *place.layers)}
    with _restored(nn.ModuleList(modules)):
        _divide(places, 0.5)
        found = _logits(stock, batch)
    return _error([found], [exact]) < (_SAME if stock.dtype == torch.float32 else 100 * _SAME)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Put the weights back afterwards."""
    kept = [(each, each.detach().clone()) for each in module.parameters()]
    try:
        yield
    finally:
        for each, was in kept:
            each.copy_(was)


def _rounded_error(
    text: Any, stock: Any, batches: Sequence[Mapping[str, Any]], exact: Sequence[Tensor], form: str
) -> float:
    """Error of the logits with the decoder's weights as a form holds them."""
    with _restored(text):
        for module in (m for layer in layers_of(text) for m in layer.modules()):
            if type(module) is nn.Linear and module.weight.numel() >= SMALL:
                module.weight.copy_(pack(form, module.weight).weight())
        return _error([_logits(stock, batch) for batch in batches], exact)


def _logits(stock: Any, batch: Mapping[str, Any]) -> Tensor:
    """Logits `[n, V]` in float32 of the tokens that are no padding."""
    logits: Tensor = stock(**batch).logits.float()
    mask = batch.get("attention_mask")
    return logits.flatten(0, 1) if mask is None else logits[mask.bool()]


def _error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Norm of the difference, as a share of the norm; infinity where it is no number."""
    wrong = sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True))
    error = float((wrong / sum(float(each.square().sum()) for each in exact)) ** 0.5)
    return math.inf if math.isnan(error) else error  # NaN is not greater than any other
