"""Linear layers of a stock model on packed weights: `weights="int8"` and its kin, on a CPU.

The decoder's layers and the output head are replaced in place; embeddings, norms, convolutions and
everything else stay as they are. Reducers, KV policies and `generate` see modules of the same
names. Two forms may stand side by side: one for steps of few rows, one for prompts.

Layers that read the same input (queries, keys and values; gate and up) are packed as one where that
pays: the first of them that is called with a tensor multiplies for all, and the others take their
columns when they are called with that very tensor.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError, unknown
from mmfast.core.sizes import format_bytes
from mmfast.models.gated import fuse, fuses, unfuse
from mmfast.models.wrappers import decoder_of, stock_model
from mmfast.ops.weight_forms import FEW, FORMS, WeightForm, pack, pack_joint

STOCK = "stock"  # the layer as it was, in the model's own dtype
FASTEST = "fastest"
SMALL = 4096  # numbers below which a layer costs its call alone, such as routers and gates
# Children of a module that its forward calls with the same tensor, in the names of transformers.
_JOINT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
# Forms whose products gain by it, measured: int8 and int4 gain less than 2 % of a step, and
# float16 loses on prompts.
JOINT_PAYS = {"bfloat16", "int8-dynamic"}
_CROSS = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "context"}


@dataclass(frozen=True)
class WeightPlan:
    """Forms by name: of steps and prompts in the decoder, and of the vision tower.

    `head` is that of the output head, which reads one row of each prompt.
    """

    few: str = STOCK
    many: str = STOCK
    tower: str = STOCK
    why: str = ""  # what was measured, for people
    joint: bool | None = None  # layers that read the same input are one product; None: if it pays

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


class _Columns(NamedTuple):
    """Columns of a product that were not asked for yet, and the input they belong to."""

    input: weakref.ref[Tensor]
    version: int
    parts: dict[int, Tensor]


class JointProduct:
    """One product of layers that read the same input, of which each takes its columns.

    They are held for the thread that made them until all are taken, or the input is gone.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.sizes = tuple(layer.out_features for layer in layers)
        self._biases = tuple(layer.bias for layer in layers)
        self._held: dict[int, _Columns] = {}

    def columns(self, place: int, x: Tensor, form: WeightForm) -> Tensor:
        """Output `[m, N]` of the layer at `place` for `x` `[.., K]`; `form` is that of all."""
        thread = get_ident()
        version = 0 if x.is_inference() else x._version  # one that was written to is another
        held = self._held.get(thread)
        if held is not None and held.input() is x and held.version == version:
            found = held.parts.pop(place, None)
            if not held.parts:
                del self._held[thread]
            if found is not None:
                return found
        whole = form.product(x.reshape(-1, x.shape[-1]), self._bias(x))
        parts: dict[int, Tensor] = dict(enumerate(whole.split(self.sizes, -1)))
        if len(whole) > 1:  # a cache may keep a small part for long, and with a view all of it
            small = [n for n, part in parts.items() if 2 * part.shape[-1] < whole.shape[-1]]
            parts |= {n: parts[n].contiguous() for n in small}
        mine = parts.pop(place)
        gone = weakref.ref(x, lambda _: self._held.pop(thread, None))
        self._held[thread] = _Columns(gone, version, parts)
        return mine

    def _bias(self, x: Tensor) -> Tensor | None:
        if not any(bias is not None for bias in self._biases):
            return None
        own = zip(self._biases, self.sizes, strict=True)
        return torch.cat([x.new_zeros(size) if bias is None else bias for bias, size in own])

    def rows(self, place: int) -> slice:
        """Rows of the joint weights that belong to a layer."""
        start = sum(self.sizes[:place])
        return slice(start, start + self.sizes[place])

    def __deepcopy__(self, memo: dict[int, Any]) -> JointProduct:
        """Hold nothing of the original."""
        twin = memo[id(self)] = JointProduct(())
        twin.sizes, twin._biases = self.sizes, self._biases
        return twin


class PackedLinear(nn.Module):
    """A linear layer on packed weights; `weight` `[N, K]` unpacks them at every call.

    It has no parameters but its bias, so it can be neither trained, saved nor moved: ModelError.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        layer: nn.Linear,
        few: WeightForm | None,
        many: WeightForm | None,
        joint: tuple[JointProduct, int] | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_parameter("bias", layer.bias)
        # A stock part keeps the layer out of sight of `parameters()`, or it would be saved twice.
        self._forms, self._joint = (few, many), joint
        self._stock: tuple[nn.Linear, ...] = (layer,) if None in (few, many) else ()
        self._dtype = layer.weight.dtype
        self._mark = layer.weight.detach().sum(-1)  # [N]

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[.., K]` to `[.., N]`."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise ModelError("packed weights cannot be trained; load the model without weights=")
        form = self._form(x)
        if form is None:
            return F.linear(x, self._stock[0].weight, self.bias)
        if self._joint is None:
            found = form.product(x.reshape(-1, self.in_features), self.bias)
        else:
            whole, place = self._joint
            found = whole.columns(place, x, form)
        return found.reshape(*x.shape[:-1], self.out_features)

    def own_form(self, x: Tensor) -> WeightForm | None:
        """The packed weights that multiply `x`; None where they are those of other layers, too."""
        return self._form(x) if self._joint is None else None

    def _form(self, x: Tensor) -> WeightForm | None:
        return self._forms[x.numel() // max(1, x.shape[-1]) > FEW]

    @property
    def weight(self) -> Tensor:
        """The weights as steps use them, in the dtype of the model."""
        form = self._forms[0]
        if form is None:
            return self._stock[0].weight
        whole, place = self._joint or (JointProduct([self]), 0)
        return form.weight()[whole.rows(place)].to(self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in all forms; of joint ones the layer's share."""
        forms = {id(form): form.nbytes for form in self._forms if form is not None}
        whole = sum(self._joint[0].sizes) if self._joint else self.out_features
        own = sum(forms.values()) * self.out_features // whole
        return own + sum(layer.weight.nbytes for layer in self._stock)

    @property
    def few(self) -> WeightForm | None:
        """The form that steps read; None where they read the layer as it was."""
        return self._forms[0]

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
        twin._mark, twin._joint = self._mark, copy.deepcopy(self._joint, memo)
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
    fuse(stock_model(model))
    return found


@contextmanager
def packed(model: Any, weights: str | WeightPlan | PackedWeights) -> Iterator[PackedWeights]:
    """Pack for as long as the `with` lasts; the float weights stay in memory beside the others.

    What an earlier `with` has given is put in place again without packing anew.
    """
    found = weights if isinstance(weights, PackedWeights) else PackedWeights(_read(weights))
    before: list[tuple[nn.Module, str, nn.Module]] = []
    units: list[nn.Module] = []
    try:
        if found.places:
            for parent, name, layer in found.places:
                before.append((parent, name, getattr(parent, name)))
                setattr(parent, name, layer)
        else:
            before.extend(_replaced(model, found))
            found.places = [(p, name, getattr(p, name)) for p, name, _ in before]
        units = fuse(stock_model(model))
        yield found
    finally:
        unfuse(units)
        for parent, name, layer in before:
            setattr(parent, name, layer)


def draft_forms(model: Any, form: str) -> dict[nn.Module, WeightForm]:
    """The layers that `weights=form` would replace, and their weights in it, for drafts.

    The model keeps its own; one that is packed already has its weights rounded once more.
    """
    stock, plan = stock_model(model), _read(form)
    _check_place(stock)
    head, layers = stock.get_output_embeddings(), linear_layers(stock)
    if not layers:
        raise ModelError(f"{type(stock).__name__} has no linear layers that weights= could pack")
    return {
        layer: pack(plan.head, layer.weight, True) if layer is head else pack(form, layer.weight)
        for layer in layers
    }


def linear_layers(model: Any) -> list[Any]:
    """The layers of a decoder, and its head, that are worth packing, packed ones included."""
    decoder, head = decoder_of(model), model.get_output_embeddings()
    return [each for each in dict.fromkeys((*decoder.modules(), head)) if _packs(each)]


def _packs(layer: Any) -> bool:
    """Tell a linear layer that is worth it from other modules."""
    plain = type(layer) in (nn.Linear, PackedLinear)
    return plain and layer.in_features * layer.out_features >= SMALL


def _read(weights: str | WeightPlan) -> WeightPlan:
    plan = plan_weights(weights)
    if plan is None:
        raise ModelError(unknown("weights", "None", FORMS))
    return plan


def _replaced(model: Any, found: PackedWeights) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Replace layer by layer, and yield where each one stood."""
    stock = stock_model(model)
    _check(model, stock)
    groups, head = _groups(stock, found.plan), id(stock.get_output_embeddings())
    places = [
        (module, name, child)
        for module in stock.modules()
        for name, child in module._modules.items()
        if child is not None and id(child) in groups
    ]
    if found.plan and not places:
        raise ModelError(f"{type(stock).__name__} has no linear layers that weights= could pack")
    kept, shared = stock.get_input_embeddings().weight, Counter(id(child) for *_, child in places)
    found_joint = _joint_layers(stock, groups, shared, found.plan.joint)
    twins = dict[int, PackedLinear]()
    while places:
        parent, name, layer = places.pop()
        if id(layer) not in twins:
            # What is let go of one by one must not be held here, either.
            together = found_joint.pop(id(layer), (layer,))
            for each in together:
                found_joint.pop(id(each), None)
                # An embedding that is tied to the head keeps the numbers: nothing is let go.
                found.before += 0 if each.weight is kept else each.weight.nbytes
            made = _packed_layers(together, *groups[id(layer)], found, id(layer) == head)
            twins |= {id(each): new for each, new in zip(together, made, strict=True)}
            del together, each
        setattr(parent, name, twins[id(layer)])
        yield parent, name, layer
        del layer


def _packed_layers(
    layers: Sequence[Any], few: str, many: str, found: PackedWeights, head: bool
) -> list[PackedLinear]:
    """Pack layers that read the same input as one if kernels allow, else each for itself."""
    weights = [layer.weight for layer in layers]

    def form(name: str) -> WeightForm | None:
        if name == STOCK:
            return None
        return pack_joint(name, weights) if len(weights) > 1 else pack(name, weights[0], head)

    one = form(few)
    other = one if many == few else form(many)
    several = len(layers) > 1
    if several and any(f is None and n != STOCK for f, n in ((one, few), (other, many))):
        parts = (_packed_layers([each], few, many, found, head) for each in layers)
        return [new for (new,) in parts]
    joint = JointProduct(layers)
    news = [
        PackedLinear(layer, one, other, (joint, place) if several else None)
        for place, layer in enumerate(layers)
    ]
    found.layers[few if few == many else f"{few} and {many}"] += len(news)
    found.after += sum(new.nbytes for new in news)
    return news


def _joint_layers(
    model: nn.Module,
    groups: Mapping[int, tuple[str, str]],
    shared: Counter[int],
    wanted: bool | None,
) -> dict[int, tuple[nn.Linear, ...]]:
    """Layers that are called with the same tensor, by the identity of each of them."""
    found: dict[int, tuple[nn.Linear, ...]] = {}
    for parent, names in product(model.modules(), _JOINT):
        if names[0] in parent._modules and _reads_one_input(parent):
            own = [parent._modules.get(name) for name in names]
            layers: Any = tuple(m for m in own if id(m) in groups and shared[id(m)] == 1)
            alike = {(each.in_features, groups[id(each)]) for each in layers}
            pays = all(JOINT_PAYS.issuperset(form) for _, form in alike) and not fuses(
                parent, *(groups[id(each)] for each in layers)
            )
            pays = wanted or (wanted is None and pays)
            if len(layers) > 1 and len(alike) == 1 and pays:
                found |= {id(each): layers for each in layers}
    return found


def _reads_one_input(parent: Any) -> bool:
    """Neither cross attention, nor a layer that takes its keys from another one."""
    given = inspect.signature(parent.forward).parameters
    return _CROSS.isdisjoint(given) and not getattr(parent, "is_kv_shared_layer", False)


def _groups(model: Any, plan: WeightPlan) -> Mapping[int, tuple[str, str]]:
    """Forms of each layer to be packed, by its identity."""
    found: dict[int, tuple[str, str]] = {}
    head = model.get_output_embeddings()

    def add(layers: Any, few: str, many: str) -> None:
        for each in layers:
            if _packs(each) and (few, many) != (STOCK, STOCK):
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
    _check_place(stock)


def _check_place(stock: Any) -> None:
    devices = {each.device.type for each in stock.parameters()}
    if devices != {"cpu"}:
        where = ", ".join(sorted(devices))
        raise ModelError(
            f"weights= packs for kernels of the CPU, and {type(stock).__name__} is on {where};"
            " use model_kwargs={'quantization_config': …} there"
        )
