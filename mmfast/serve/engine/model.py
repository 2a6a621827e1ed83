"""The model that an engine answers with: loaded, its weights packed, its adapters added."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.attention import with_attn
from mmfast.models.cost import attention_width
from mmfast.models.loading import load
from mmfast.planner.arithmetic import check_weights, use_weights
from mmfast.serve.engine.base import LOG

_PLAIN = str, int, float, bool, type(None)


def check_form(weights: str | None, lora: object) -> None:
    """Refuse an unknown form of weights, and adapters of layers that would be packed."""
    check_weights(weights)
    if weights is not None and lora:
        raise MmfastError(
            f"weights={weights!r} packs the layers that adapters change; leave out weights or lora"
        )


def load_packed(
    model: Any,
    device: str | None,
    dtype: str,
    weights: str | None,
    lora: Mapping[str, str] | None,
    attn: str | None = None,
) -> tuple[Any, Any]:
    """Load a model and its processor, and pack the weights if asked; adapters come later.

    `attn` names the attention back end.

    Raises:
        MmfastError: As `load` and `use_weights` do, and for packed weights with adapters.
    """
    check_form(weights, lora)
    kwargs = with_attn(None, attn, model)
    stock, processor = load(model, device, dtype, model_kwargs=kwargs)
    packing = use_weights(stock, weights, model)
    if packing is not None:
        LOG.info(packing.note)
    return stock, processor


def settled(processor: Any) -> Any:
    """Return a shallow copy of a processor that checks and merges equal arguments only once.

    transformers does so at every call, which is a fifth of the time of a small request.
    """
    merge = getattr(processor, "_merge_kwargs", None)
    if merge is None:
        return processor
    made, known = copy.copy(processor), dict[Hashable, Any]()

    def merged(*args: Any, tokenizer_init_kwargs: Any = None, **given: Any) -> Any:
        if not all(isinstance(each, _PLAIN) for each in given.values()):
            return merge(*args, tokenizer_init_kwargs=tokenizer_init_kwargs, **given)
        typed = ((name, type(value), value) for name, value in given.items())
        key = args, id(tokenizer_init_kwargs), frozenset(typed)
        if key not in known:
            known.clear()  # options of a request are few, and the last ones mostly recur
            known[key] = merge(*args, tokenizer_init_kwargs=tokenizer_init_kwargs, **given)
        return copy.deepcopy(known[key])  # a processor takes entries out

    made._merge_kwargs = merged
    return made


def chunk_work(model: Any, tokens: int) -> float:
    """Return the multiplications of the decoder on a prompt of so many tokens."""
    layers = model.get_decoder().layers
    weights = sum(each.numel() for layer in layers for each in layer.parameters())
    return float(tokens * (weights + tokens * attention_width(model) * len(layers)))


def stated_bytes(model: Any) -> int:
    """Return the bytes of keys and values of one token from the configuration."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = attention_width(model) // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)
