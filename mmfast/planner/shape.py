"""What a model must compute and hold per token, read off the model itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from mmfast.models.flops import attention_width, linear_macs

# Of a config, what changes from one download or version to the next and not with the shape.
_IDLE = {"_name_or_path", "transformers_version", "architectures", "id2label", "label2id", "dtype"}


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that its time and memory depend on.

    Attributes:
        layers: Multiply-adds per token of each decoder layer.
        width: Query heads x head size of the decoder.
        hidden: Width of the decoder.
        entry: Values of keys and values that one token leaves in one layer.
        element: Bytes of a value.
        weights: Bytes of all parameters and buffers.
        blocks: Blocks of the vision tower.
    """

    layers: tuple[int, ...]
    width: int
    hidden: int
    entry: int
    element: int
    weights: int
    blocks: int = 0

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)


def shape_of(model: Any, blocks: int = 0) -> Shape:
    """Read the shape off a model.

    Args:
        model: A transformers vision-language model, on any device.
        blocks: Blocks of its vision tower.
    """
    config = model.config.get_text_config()
    width = attention_width(model)
    head = width // config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    return Shape(
        layers=tuple(linear_macs(layer) for layer in model.get_decoder().layers),
        width=width,
        hidden=int(config.hidden_size),
        entry=2 * groups * head,
        element=next(model.parameters()).element_size(),
        weights=sum(t.numel() * t.element_size() for t in tensors),
        blocks=blocks,
    )


def fingerprint(model: Any) -> str:
    """The same for every copy of a model shape: what measured rates may be shared by."""
    text = json.dumps(_plain(model.config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(f"{type(model).__name__} {text}".encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if k not in _IDLE}
    return value
