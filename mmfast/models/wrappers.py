"""The stock model inside what callers hold: pipelines, Trainers, PEFT, compiled models, DDP.

And the kinds of its decoder layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from mmfast.core.errors import ModelError

# Where a wrapper keeps what it wraps: torch.compile, FSDP, activation checkpointing, DDP and kin.
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def stock_model(held: Any) -> Any:
    """Return the model that does the work, itself where it is not wrapped.

    Takes a transformers pipeline or Trainer (its `.model`), a PEFT model (whose adapters stay in
    the layers), what `torch.compile` returned, and DDP, FSDP or checkpoint wrappers, in any depth.

    Raises:
        ModelError: `nn.DataParallel` over several devices, whose copies would share one state.
    """
    inner = _inside(held)
    while inner is not None:
        held, inner = inner, _inside(inner)
    return held


def base_of(model: Any) -> Any:
    """The base model of a stock model, without a wrapper of its own."""
    return stock_model(getattr(model, "base_model", model))


def decoder_of(model: Any) -> Any:
    """The text model of a stock model, without a wrapper of its own."""
    return stock_model(model.get_decoder())


def _inside(held: Any) -> Any:
    if not isinstance(held, nn.Module):
        model = getattr(held, "model", None)
        return model if isinstance(model, nn.Module) else None
    if isinstance(held, nn.DataParallel) and len(held.device_ids) > 1:
        raise ModelError(
            f"nn.DataParallel copies a model to {len(held.device_ids)} devices at every call; "
            "use DistributedDataParallel, one process per device"
        )
    for name in _INNER:
        if name in held._modules:
            return held._modules[name]
    if any(cls.__module__.split(".")[0] == "peft" for cls in type(held).__mro__):
        whole: Any = held
        return whole.get_base_model() if hasattr(whole, "get_base_model") else whole.model
    return None


# Decoder layers that can hold reduced tokens. A sliding window counts the tokens that are left,
# a convolution runs over them; both as the stock model does on the shortened prompt.
FULL, SLIDING, CONV = LAYER_KINDS = ("full_attention", "sliding_attention", "conv")


def kind_of(config: Any, layer: int) -> str:
    """Kind of a decoder layer, `full_attention` where the config of the text model says nothing."""
    kinds = getattr(config, "layer_types", None)
    return str(kinds[layer]) if kinds else FULL
