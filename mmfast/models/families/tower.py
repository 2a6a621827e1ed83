"""Encoder towers of image, video and sound: their blocks, and the media they take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from mmfast.core.errors import ModelError
from mmfast.models.encoder_names import bound_arguments

# Kinds of media: the base model encodes them with `get_<kind>_features`, the config names their
# placeholder `<kind>_token_id`, and these arguments of its forward bring them.
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
KINDS = tuple(PIXELS)
# Attention function that computes all segments of a packed tower together; `flash` in the name
# makes stock towers hand it their boundaries (see mmfast/models/vision/acceleration.py).
SEGMENTS = "mmfast_flash_segments"


@dataclass(frozen=True)
class Tower:
    """The vision tower of a model: `module` with `blocks`, inside the base model.

    If `packed`, patches of all items lie in one sequence `[S, D]` (Qwen), not in a batch; with a
    `class_token`, row 0 of a frame is one. An encoder of its own is its base, too.
    """

    base: Any
    module: Any
    blocks: nn.ModuleList
    packed: bool
    class_token: bool

    @property
    def prefix(self) -> int:
        """Rows of a frame in front of its patches: class, distillation and register tokens."""
        registers = getattr(getattr(self.module, "config", None), "num_register_tokens", 0)
        return int(getattr(self.module, "num_prefix_tokens", self.class_token + registers))

    @property
    def alone(self) -> bool:
        """The model is an encoder without a language model."""
        return self.base is self.module

    @property
    def timm(self) -> bool:
        """The encoder is one of timm."""
        return hasattr(self.module, "forward_features")

    @property
    def scene(self) -> bool:
        """Blocks attend to all frames of a scene together, and others in between to each (VGGT)."""
        return hasattr(self.module, "global_blocks")

    def entries(self) -> dict[str, str]:
        """Methods of the base that encode images and videos, and the kind of each."""
        if self.alone:
            names = ["forward_features", "forward_intermediates"] if self.timm else ["forward"]
            return dict.fromkeys(names, "image")
        kinds = {"image", "video"} & set(kinds_of(self.base))
        return {f"get_{kind}_features": kind for kind in kinds}

    def bind(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call of one of the `entries` by name; of an encoder alone all of them."""
        found = bound_arguments(self.base, name, args, kwargs, defaults=self.alone)
        return {**found, "pixel_values": found["x"]} if self.timm else found

    def states(self, arguments: Mapping[str, Any]) -> set[int]:
        """Hidden states that a call asks for; 0 is the input of the first block."""
        count, extra = len(self.blocks) + 1, arguments.get("kwargs", {})
        asked = extra.get("output_hidden_states", arguments.get("output_hidden_states"))
        if asked is None and self.alone:  # or the intermediates of timm
            asked = "stop_early" in arguments or argument(self.base, {}, "output_hidden_states")
        return {*range(count)} if asked is True else numbers_of(asked, count)

    def raster(self) -> int:
        """Patches of a frame or tile, where all have the size that the config names."""
        vision = self.base.config.vision_config
        sizes = (vision.image_size, vision.patch_size)
        pairs = [list(n) if isinstance(n, Sequence) else [n, n] for n in sizes]
        return int(math.prod(image // patch for image, patch in zip(*pairs, strict=True)))

    def last_used(self, arguments: Mapping[str, Any]) -> int:
        """Index of the last block whose output reaches the language model.

        Hidden state 0 of a LLaVA-like tower is its input, so feature layer -1 is the output of
        the last block and -2 leaves that block unused. A tower without a choice uses all.
        """
        layers = argument(self.base, arguments, "vision_feature_layer")
        if self.packed or layers is None:
            return len(self.blocks) - 1
        return max(numbers_of(layers, len(self.blocks) + 1)) - 1


def numbers_of(layers: Any, count: int) -> set[int]:
    """Hidden states named by a number or several, -1 being the last of `count`; None is none."""
    if layers is None or isinstance(layers, bool):
        return set()
    return {int(n) % count for n in ([layers] if isinstance(layers, int) else layers)}


def kinds_of(base: Any) -> list[str]:
    """Kinds of media a base model encodes."""
    return [kind for kind in KINDS if hasattr(base, f"get_{kind}_features")]


def check_blocks(tower: Tower, family: str, what: str) -> None:
    """Refuse what only a tower of attention blocks has; the ModelError says what to use instead."""
    if not len(tower.blocks):
        raise ModelError(
            f"the vision tower of {family!r} has no blocks of attention that can be read, so there "
            f"is no {what}; use a method that reads tokens alone, such as divprune, or one inside "
            "the language model, such as fastv@llm2"
        )


def attention_of(block: Any) -> nn.Module:
    """The attention module of a tower block."""
    names = ("self_attn", "attn", "attention")
    module: nn.Module = next(getattr(block, name) for name in names if hasattr(block, name))
    return module


# Names of the norms of attention and MLP, in the towers of transformers and in timm.
NORMS = {
    1: ("norm1", "layer_norm1", "layernorm_before"),
    2: ("norm2", "layer_norm2", "layernorm_after"),
}


# Blocks of timm in which attention and MLP follow each other.
TIMM_BLOCKS = ("Block", "ResPostBlock", "EvaBlock", "EvaBlockPostNorm")


def part_of(block: Any, names: Sequence[str]) -> Any:
    """The part of a tower block that goes by one of these names, or None."""
    return next((p for name in names if (p := getattr(block, name, None)) is not None), None)


def has_halves(block: Any) -> bool:
    """Return True if attention and MLP of a block follow each other, each with a norm."""
    return all(part_of(block, names) is not None for names in (*NORMS.values(), ["mlp"]))


def argument(base: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """A call's argument, or what the configuration puts in place of None."""
    config = getattr(base, "config", None)
    for each in (name, f"{name}s"):  # VipLlava has its feature layers in the plural before 5.23
        value = arguments.get(each)
        value = getattr(config, each, None) if value is None else value
        if value is not None:
            return value
    return None


def find_tower(base: Any) -> Tower:
    """The tower of a base model that keeps it where most do.

    `visual.blocks` is a tower that packs the patches of all items into one sequence (Qwen);
    otherwise the first module list of the image encoder holds the blocks.
    """
    if hasattr(base, "visual"):
        return Tower(base, base.visual, base.visual.blocks, packed=True, class_token=False)
    return batch_tower(base, base.get_encoder("image"))


def batch_tower(base: Any, module: Any) -> Tower:
    """A tower of equal frames in a batch, whose first module list holds the blocks."""
    blocks = next(m for m in module.modules() if isinstance(m, nn.ModuleList))
    names = [name for name, _ in module.named_parameters()]
    has_class = any(name.endswith(("class_embedding", "cls_token")) for name in names)
    return Tower(base, module, blocks, packed=False, class_token=has_class)


def blockless(base: Any) -> Tower:
    """A tower whose attention, if any, cannot be read or merged in."""
    return Tower(base, base.get_encoder("image"), nn.ModuleList(), packed=False, class_token=False)


def grid_tables(module: Any, grid: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that a packed tower derives from its grids `[items, 3]`, under its own names.

    Those among the arguments `given` are taken out of them instead.
    """
    merge = module.spatial_merge_size
    found = {
        "position_ids": get_vision_position_ids(grid, merge, kwargs=given),
        "cu_seqlens": get_vision_cu_seqlens(grid, kwargs=given),
    }
    if hasattr(module, "window_size"):
        found["window_index"], found["cu_window_seqlens"] = get_vision_window_index(
            grid, merge, module.window_size, module.patch_size, kwargs=given
        )
    if hasattr(module, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = (
            get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=module.num_grid_per_side,
                mode=module.interpolation_mode,
                align_corners=module.interpolation_align_corners,
                spatial_merge_size=merge,
                kwargs=given,
            )
        )
    return found
