"""The stock model inside what callers hold: pipelines, Trainers, PEFT, compiled models, DDP.

And the kinds of its decoder layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import nn

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE

# Where a wrapper keeps what it wraps: torch.compile, FSDP, activation checkpointing, DDP and kin.
_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def stock_model(held: Any, past: str = "") -> Any:
    """Return the model that does the work, itself where it is not wrapped.

    Takes a transformers pipeline or Trainer (its `.model`), a PEFT model (whose adapters stay in
    the layers), what `torch.compile` returned, and DDP, FSDP or checkpoint wrappers, in any depth.
    `past` names what calls the model found itself, past what wraps it.

    Raises:
        ModelError: `nn.DataParallel` over several devices, whose copies would share one state; or,
            with `past`, PEFT of which something stands in no layer, such as virtual tokens.
    """
    inner = _inside(held, past)
    while inner is not None:
        held, inner = inner, _inside(inner, past)
    return held


def base_of(model: Any) -> Any:
    """The base model of a stock model, without a wrapper of its own.

    Of a model of text alone it is the text model, which some (OPT) call past their base model.
    """
    model = stock_model(model)  # an adapter of PEFT calls itself the base model
    # Every step asks: most models have a tower, which is seen without a call.
    if not hasattr(getattr(model, "config", None), "vision_config") and reads_text_alone(model):
        return decoder_of(model)
    return stock_model(getattr(model, "base_model", model))


def reads_text_alone(model: Any) -> bool:
    """Return True for a causal language model of decoder layers, which has words to read."""
    config: Any = getattr(model, "config", None)
    nested = [name for name in ("vision_config", "audio_config") if hasattr(config, name)]
    own = hasattr(model, "get_decoder") and hasattr(config, "get_text_config") and not nested
    own = own and hasattr(config, "vocab_size")  # encoders of pictures have layers, too
    if not own or getattr(config, "is_encoder_decoder", False):
        return False
    return config.get_text_config() is config and len(layers_of(decoder_of(model))) > 0


def decoder_of(model: Any) -> Any:
    """The text model of a stock model, without a wrapper of its own."""
    return stock_model(model.get_decoder())


@cache
def _of_peft(kind: type) -> bool:
    return any(cls.__module__.split(".")[0] == "peft" for cls in kind.__mro__)


def _outside_layers(config: Any) -> str:
    """Return what of an adapter of PEFT acts in calls of its wrapper alone, not in the layers."""
    kind = getattr(getattr(config, "peft_type", None), "value", "")
    if getattr(config, "is_prompt_learning", False):
        return f"virtual tokens ({kind})"
    if getattr(config, "alora_invocation_tokens", None):
        return "tokens that activate the adapter (aLoRA)"
    return {"XLORA": "weights of the experts (X-LoRA)", "POLY": "tasks (Poly)"}.get(kind, "")


def _inside(held: Any, past: str) -> Any:
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
    kind: Any = type(held)
    if _of_peft(kind):
        whole: Any = held
        config: Any = getattr(whole, "active_peft_config", None)
        if past and (outside := _outside_layers(config)):
            raise ModelError(
                f"{past} goes past the {outside} of this {type(whole).__name__}; give a model with "
                "adapters in its layers, such as LoRA, or `.get_base_model()` to do without them"
            )
        return whole.get_base_model() if hasattr(whole, "get_base_model") else whole.model
    return None


# Decoder layers that can hold reduced tokens. A sliding window counts the tokens that are left, a
# convolution and a recurrence run over them; all as the stock model does on the shortened prompt.
# A hybrid layer has full attention beside a recurrence.
FULL, SLIDING, CONV, LINEAR, HYBRID = LAYER_KINDS = (
    "full_attention",
    "sliding_attention",
    "conv",
    "linear_attention",
    "hybrid",
)
RECURRENT = (CONV, LINEAR)  # layers without keys and values
KEEPS_ALL = (FULL, HYBRID)  # layers whose cache grows with the prompt


def kind_of(config: Any, layer: int) -> str:
    """Kind of a decoder layer as the cache of the stock model has it.

    Where the config of the text model lists no kinds, a window that it has is that of all layers.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return str(kinds[layer])
    return FULL if getattr(config, "sliding_window", None) is None else SLIDING


def lender_of(config: Any, layer: int) -> int:
    """Return the layer whose keys and values a decoder layer reads, itself but in a few models."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None and (shared := getattr(config, "num_kv_shared_layers", 0)):  # before 5.23
        own = range(config.num_hidden_layers - shared)
        kinds = (i for i in own if kind_of(config, i) == kind_of(config, layer))
        return layer if layer in own else max(kinds)
    if not modes or modes[layer] != "reuse":
        return layer
    lenders = (i for i, mode in enumerate(modes) if mode == "store")
    return next(i for i in lenders if kind_of(config, i) == kind_of(config, layer))


def keeps_all(config: Any, layer: int) -> bool:
    """Return True for a decoder layer that has a cache of its own, which grows with the prompt."""
    return kind_of(config, layer) in KEEPS_ALL and lender_of(config, layer) == layer


_LAYERS = ("layers", "h")
_FEED_FORWARD = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
_ATTENTION = ("self_attn", "attention", "attn", "self_attention")


def layers_of(text: Any) -> Sequence[Any]:
    """Return the decoder layers of a text model; none where it keeps them otherwise."""
    lists: list[Any] = [getattr(text, name, None) for name in _LAYERS]
    return next((list(each) for each in lists if isinstance(each, nn.ModuleList)), [])


def attention_at(text: Any, index: int) -> Any:
    """Return the attention module of decoder layer `index`; None where it has no attention."""
    if kind_of(text.config, index) in RECURRENT:
        return None
    layer = layers_of(text)[index]
    found = (getattr(layer, name, None) for name in _ATTENTION)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def feed_forward_at(text: Any, index: int) -> Any:
    """Return the feed-forward module of decoder layer `index`; None where it has none by name."""
    found = (getattr(layers_of(text)[index], name, None) for name in _FEED_FORWARD)
    return next((each for each in found if isinstance(each, nn.Module)), None)


def position_axes(text: Any) -> int:
    """Axes of a text model's rotary positions: three under M-RoPE, four in HunYuan-VL, else one."""
    sections = getattr(getattr(text, "rotary_emb", None), "mrope_section", None)
    return len(sections or (0,))


def turns_once(text: Any, mrope: bool) -> bool:
    """Return True if a text model has rotary positions, along one axis unless `mrope`."""
    return hasattr(getattr(text, "rotary_emb", None), "rope_type") and not mrope


class LayerCall:
    """Arguments of a decoder layer under the names that most models give them.

    GPT-2 hands them over in order, and GPT-NeoX calls the cache by another name.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._names = list(inspect.signature(type(layer).forward).parameters)[1:]
        self._cache = next((n for n in ("layer_past", CACHE) if n in self._names), CACHE)

    @property
    def plain(self) -> bool:
        """The layer is called with these names by keyword."""
        return self._cache == CACHE and self._names[1:2] != [CACHE]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return all arguments but the first by name."""
        named = {**dict(zip(self._names[1:], args[1:], strict=False)), **kwargs}
        if self._cache in named:
            named[CACHE] = named.pop(self._cache)
        return named

    def around(self, before: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook before the layer, which is given these names and may return them."""
        if self.plain:
            return before

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changed = before(module, args[:1], self.read(args, kwargs))
            if changed is None:
                return None
            first, named = changed
            named = dict(named)
            named[self._cache] = named.pop(CACHE, None)
            return first, named

        return hook

    def behind(self, after: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook behind the layer, which is given these names."""
        if self.plain:
            return after

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            return after(module, args[:1], self.read(args, kwargs), output)

        return hook
