"""Gated units on weights that oneDNN has laid out: activation and gate inside the products.

Stock code writes both products of a gated unit out, reads one back for its activation, and all
three for the gate: a fifth of a long prompt's time. oneDNN does either with numbers that it has
just summed up, and so rounds them to bfloat16 once where stock code does three times.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from mmfast.models.patching import is_hooked
from mmfast.ops.weight_forms import FEW, HalfWeights, has_onednn

PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Activations that oneDNN has: its name, and that of a variant.
_FUNCTIONS = {SiLUActivation: ("swish", ""), nn.SiLU: ("swish", ""), GELUTanh: ("gelu", "tanh")}


def fuse(model: nn.Module) -> list[nn.Module]:
    """Let the gated units of a model whose layers were packed run so, and return them."""
    found = [each for each in model.modules() if _fits(each)]
    for unit in found:
        stock: Any = type(unit)
        unit.__class__ = _fused(stock)
    return found


def unfuse(units: Iterable[nn.Module]) -> None:
    """Let units run as they did before `fuse`."""
    for unit in units:
        if type(unit).forward is gated:
            unit.__class__ = type(unit).__mro__[1]


def fuses(unit: Any, *forms: tuple[str, str]) -> bool:
    """Return whether `fuse` will find a unit whose layers are to be packed in these forms."""
    half = all(each.dtype is torch.bfloat16 for each in unit.parameters())
    return has_onednn() and half and _has_parts(unit) and {*sum(forms, ())} == {"bfloat16"}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def gated(unit: Any, x: Tensor) -> Tensor:
    """Output of a unit with these parts for `x` `[.., D]`, as `x`."""
    gate, up, act = unit.gate_proj, unit.up_proj, unit.act_fn
    first, second = _form(gate, x), _form(up, x)
    if first is None or second is None or is_hooked(act) or type(act) not in _FUNCTIONS:
        return _written_out(unit, x)
    rows = x.reshape(-1, x.shape[-1])
    inner = first.activated(rows, gate.bias, *_FUNCTIONS[type(act)])
    inner = second.times(rows, inner, up.bias)
    found: Tensor = unit.down_proj(inner.view(*x.shape[:-1], -1))
    return found


def _form(layer: Any, x: Tensor) -> HalfWeights | None:
    """Weights with which oneDNN multiplies `x`, where nobody looks at what the layer gives."""
    form = layer.own_form(x) if hasattr(layer, "own_form") else None
    fits = isinstance(form, HalfWeights) and form.fuses and x.dtype is torch.bfloat16
    return form if fits and not is_hooked(layer) and not torch.is_grad_enabled() else None


@torch.no_grad()
def _fits(unit: Any) -> bool:
    """Return whether a module is a gated unit, some rows of which oneDNN multiplies."""
    if not _has_parts(unit) or not hasattr(unit.gate_proj, "own_form"):
        return False
    width = unit.gate_proj.in_features
    some, many = (torch.arange(n * width).sin().view(n, width).bfloat16() for n in (2, 2 * FEW))
    if not any(_form(unit.gate_proj, x) and _form(unit.up_proj, x) for x in (some, many)):
        return False
    try:
        return torch.equal(unit.forward(some), _written_out(unit, some))
    except Exception:  # parts of these names whose forward asks for more
        return False


def _has_parts(unit: Any) -> bool:
    return set(unit._modules) == PARTS and type(unit.act_fn) in _FUNCTIONS


def _written_out(unit: Any, x: Tensor) -> Tensor:
    found: Tensor = unit.down_proj(unit.act_fn(unit.gate_proj(x)) * unit.up_proj(x))
    return found


@cache
def _fused(stock: Any) -> Any:
    """The class of units, with another forward: copies of a model have it, too."""
    return type(stock.__name__, (stock,), {"forward": gated, "__module__": stock.__module__})
