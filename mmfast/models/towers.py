"""Where the vision tower of a family keeps its blocks, and which patches an item owns."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmfast.core.errors import ModelError

FAMILIES = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


@dataclass(frozen=True)
class Tower:
    """The vision tower of a model.

    Attributes:
        base: The base model, which owns `get_image_features` and `get_video_features`.
        module: The tower itself.
        blocks: Its transformer blocks in order.
        packed: Patches of all items lie in one sequence `[S, D]` (Qwen), not in a batch.
        class_token: Row 0 of a frame is a class token.
    """

    base: Any
    module: Any
    blocks: nn.ModuleList
    packed: bool
    class_token: bool

    def last_used(self, arguments: Mapping[str, Any]) -> int:
        """Index of the last block whose output reaches the language model.

        Hidden state 0 of a LLaVA-like tower is its input, so feature layer -1 is the output of
        the last block and -2 leaves that block unused. Qwen's towers use all their blocks.
        """
        if self.packed:
            return len(self.blocks) - 1
        layers = argument(self.base, arguments, "vision_feature_layer")
        states = len(self.blocks) + 1
        used = [layers] if isinstance(layers, int) else layers
        return int(max(layer % states for layer in used)) - 1


def attention_of(block: Any) -> nn.Module:
    """The attention module of a tower block."""
    module: nn.Module = block.self_attn if hasattr(block, "self_attn") else block.attn
    return module


def argument(base: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """A call's argument, or what the configuration puts in place of None."""
    value = arguments.get(name)
    return getattr(base.config, name, None) if value is None else value


def tower_of(model: Any) -> Tower:
    """The vision tower of a model.

    Raises:
        ModelError: The family is unknown; says what it takes to add one.
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise ModelError(
            f"the vision tower of family {family!r} is unknown; choices: {', '.join(FAMILIES)}; "
            "to add one, name its blocks in mmfast/models/towers.py"
        )
    base = model.base_model
    if hasattr(base, "visual"):
        return Tower(base, base.visual, base.visual.blocks, packed=True, class_token=False)
    module = base.vision_tower
    blocks = next(m for m in module.modules() if isinstance(m, nn.ModuleList))
    names = [name for name, _ in module.named_parameters()]
    has_class = any(name.endswith(("class_embedding", "cls_token")) for name in names)
    return Tower(base, module, blocks, packed=False, class_token=has_class)


def tiles_per_image(base: Any, arguments: Mapping[str, Any]) -> list[int]:
    """How many tower inputs each image of a LLaVA-OneVision call takes: its tiles and the base.

    Several images in one sample are not cut into tiles, as in the model.
    """
    count = sys.modules[type(base).__module__].image_size_to_num_patches
    sizes = arguments["image_sizes"]
    per_sample = arguments.get("batch_num_images")
    cut = [True] * len(sizes)
    if per_sample is not None:
        cut = [int(n) == 1 for n in per_sample for _ in range(int(n))]
    config = base.config
    return [
        int(count(size, config.image_grid_pinpoints, config.vision_config.image_size)) if yes else 1
        for size, yes in zip(sizes, cut, strict=True)
    ]
