"""Linear layers of a stock model on packed weights: `weights="int8"` and its kin, on a CPU.

The decoder's layers and the output head are replaced in place; embeddings, norms, convolutions and
everything else stay as they are. Reducers, KV policies and `generate` see modules of the same
names. Two forms may stand side by side: one for steps of few rows, one for prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError, unknown
from mmfast.core.trace import format_bytes
from mmfast.models.wrappers import decoder_of, stock_model
from mmfast.ops.weight_forms import FEW, FORMS, WeightForm, pack

STOCK = "stock"  # the layer as it was, in the model's own dtype
FASTEST = "fastest"
_SMALL = 4096  # numbers below which a layer costs its call alone, such as routers and gates


@dataclass(frozen=True)
class WeightPlan:
    """Forms by name: of steps and prompts in the decoder, and of the vision tower.

    `head` is that of the output head, which reads one row of each prompt.
    """

    few: str = STOCK
    many: str = STOCK
    tower: str = STOCK
    why: str = ""  # what was measured, for people

    @property
    def head(self) -> str:
        """Four bits are too few where they decide between tokens."""
        return "int8" if self.few == "int4" else self.few

    def __bool__(self) -> bool:
        return {self.few, self.many, self.tower} != {STOCK}


def plan_weights(weights: str | WeightPlan | None) -> WeightPlan | None:
    """Read one form for all of the decoder; None for None. `fastest` is for the planner."""
    if weights is None or isinstance(weights, WeightPlan):
        return weights
    if weights not in FORMS:
        raise ModelError(unknown("weights", str(weights), (*FORMS, FASTEST)))
    return WeightPlan(weights, weights)


class PackedLinear(nn.Module):
    """A linear layer on packed weights; `weight` `[N, K]` unpacks them at every call.

    It has no parameters but its bias, so it can be neither trained, saved nor moved: ModelError.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear, few: WeightForm | None, many: WeightForm | None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        # A stock part keeps the layer out of sight of `parameters()`, or it would be saved twice.
        self._forms = (few, many)
        self._stock: tuple[nn.Linear, ...] = (layer,) if None in (few, many) else ()
        self._dtype = layer.weight.dtype
        self._mark = layer.weight.detach().sum(-1)  # [N]

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[.., K]` to `[.., N]`."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ModelError("packed weights cannot be trained; load the model without weights=")
        form = self._forms[x.numel() // max(1, x.shape[-1]) > FEW]
        if form is None:
            return F.linear(x, self._stock[0].weight, self.bias)
        found = form.product(x.reshape(-1, self.in_features))
        if self.bias is not None:
            found = found.add_(self.bias)
        return found.reshape(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """The weights as steps use them, in the dtype of the model."""
        form = self._forms[0]
        return self._stock[0].weight if form is None else form.weight().to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in all forms."""
        forms = {id(form): form.nbytes for form in self._forms if form is not None}
        return sum(forms.values()) + sum(layer.weight.nbytes for layer in self._stock)

    @property
    def kinds(self) -> str:
        """Forms for few rows and for many."""
        return ", ".join(STOCK if each is None else type(each).__name__ for each in self._forms)

    def extra_repr(self) -> str:
        """Name shapes and forms."""
        return f"{self.in_features}, {self.out_features}, {self.kinds}"

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        if fn(torch.empty(0)).device.type != "cpu":
            raise ModelError("packed weights stay on the CPU; load the model without weights=")
        apply: Any = super()._apply
        apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not keep_vars:
            raise ModelError("packed weights cannot be saved; save the model it was loaded from")
        # What asks for the tensors themselves tells models apart by them: checksums of weights.
        destination[f"{prefix}weight packed as {self.kinds}"] = self._mark
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        """Share the weights, which never change; hooks are not copied."""
        with suppress(KeyError):
            found: PackedLinear = memo[id(self)]
            return found
        twin = PackedLinear.__new__(PackedLinear)
        nn.Module.__init__(twin)
        twin.in_features, twin.out_features = self.in_features, self.out_features
        twin.register_parameter("bias", self.bias)
        twin._forms, twin._stock, twin._dtype = self._forms, self._stock, self._dtype
        twin._mark = self._mark
        memo[id(self)] = twin
        return twin


@dataclass
class PackedWeights:
    """Layers that were packed, by form, and bytes of their weights before and after.

    A head that is tied to the embeddings has none before, as they stay.
    """

    plan: WeightPlan
    layers: Counter[str] = field(default_factory=Counter)
    before: int = 0
    after: int = 0
    # parent, name and packed layer, of `packed` alone: to be put in place again
    places: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list, repr=False)

    @property
    def note(self) -> str:
        """One line for a trace."""
        if not self.layers:
            return f"weights: as loaded{self._why}"
        what = ", ".join(f"{count} layers {name}" for name, count in self.layers.items())
        sizes = f"{format_bytes(self.before)} to {format_bytes(self.after)}"
        return f"weights: {what}; {sizes}{self._why}"

    @property
    def _why(self) -> str:
        return f" ({self.plan.why})" if self.plan.why else ""


def pack_weights(model: Any, weights: str | WeightPlan) -> PackedWeights:
    """Replace the linear layers of a loaded model in place, and let go of their weights.

    `weights` is a form (`int8`, `int4`, `float16`, `bfloat16`, `int8-dynamic`) or a plan. The head
    is packed for itself: embeddings, also those it is tied to, keep their numbers. Float layers go
    one by one, so that no second model is ever in memory.

    Raises:
        ModelError: Unknown form; a model on another device, quantised, packed or of PEFT layers.
    """
    found = PackedWeights(_read(weights))
    for _ in _replaced(model, found):
        pass
    return found


@contextmanager
def packed(model: Any, weights: str | WeightPlan | PackedWeights) -> Iterator[PackedWeights]:
    """Pack for as long as the `with` lasts; the float weights stay in memory beside the others.

    What an earlier `with` has given is put in place again without packing anew.
    """
    found = weights if isinstance(weights, PackedWeights) else PackedWeights(_read(weights))
    before: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        if found.places:
            for parent, name, layer in found.places:
                before.append((parent, name, getattr(parent, name)))
                setattr(parent, name, layer)
        else:
            before.extend(_replaced(model, found))
            found.places = [(p, name, getattr(p, name)) for p, name, _ in before]
        yield found
    finally:
        for parent, name, layer in before:
            setattr(parent, name, layer)


def _read(weights: str | WeightPlan) -> WeightPlan:
    plan = plan_weights(weights)
    if plan is None:
        raise ModelError(unknown("weights", "None", FORMS))
    return plan


def _replaced(model: Any, found: PackedWeights) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Replace layer by layer, and yield where each one stood."""
    stock = stock_model(model)
    _check(model, stock)
    groups = _groups(stock, found.plan)
    places = [
        (module, name, child)
        for module in stock.modules()
        for name, child in module._modules.items()
        if child is not None and id(child) in groups
    ]
    if found.plan and not places:
        raise ModelError(f"{type(stock).__name__} has no linear layers that weights= could pack")
    twins, kept = dict[int, PackedLinear](), stock.get_input_embeddings().weight
    while places:
        parent, name, layer = places.pop()
        if id(layer) not in twins:
            twins[id(layer)] = _packed_layer(layer, *groups[id(layer)], found)
            # An embedding that is tied to the head keeps the numbers: nothing is let go.
            found.before += 0 if layer.weight is kept else layer.weight.nbytes
        setattr(parent, name, twins[id(layer)])
        yield parent, name, layer
        del layer


def _packed_layer(layer: Any, few: str, many: str, found: PackedWeights) -> PackedLinear:
    weight = layer.weight
    one = None if few == STOCK else pack(few, weight)
    other = one if many == few else None if many == STOCK else pack(many, weight)
    new = PackedLinear(layer, one, other)
    found.layers[few if few == many else f"{few} and {many}"] += 1
    found.after += new.nbytes
    return new


def _groups(model: Any, plan: WeightPlan) -> Mapping[int, tuple[str, str]]:
    """Forms of each layer to be packed, by its identity."""
    found: dict[int, tuple[str, str]] = {}
    head = model.get_output_embeddings()

    def add(layers: Any, few: str, many: str) -> None:
        for each in layers:
            plain = type(each) is nn.Linear and each.weight.numel() >= _SMALL
            if plain and (few, many) != (STOCK, STOCK):
                found[id(each)] = few, many

    add(_tower(model), plan.tower, plan.tower)
    add(decoder_of(model).modules(), plan.few, plan.many)
    add([head], plan.head, plan.head)
    return found


def _tower(model: Any) -> Iterator[nn.Module]:
    if hasattr(model.config, "vision_config"):
        yield from model.get_encoder("image").modules()


def _check(model: Any, stock: Any) -> None:
    name = type(stock).__name__
    if not isinstance(stock, nn.Module) or not hasattr(stock, "get_output_embeddings"):
        raise ModelError(f"weights= packs a model of transformers, not a {name}")
    kinds = {cls.__module__.split(".")[0] for m in (model, *stock.modules()) for cls in [type(m)]}
    if "peft" in kinds:
        raise ModelError(f"{name} has PEFT layers; merge_and_unload() them before weights=")
    if getattr(stock, "hf_quantizer", None) is not None:
        raise ModelError(f"{name} is quantised already; leave weights= out")
    if any(isinstance(each, PackedLinear) for each in stock.modules()):
        raise ModelError(f"{name} is packed already; load it anew for other weights=")
    devices = {each.device.type for each in stock.parameters()}
    if devices != {"cpu"}:
        raise ModelError(
            f"weights= packs for kernels of the CPU, and {name} is on {', '.join(sorted(devices))};"
            " use model_kwargs={'quantization_config': …} there"
        )
