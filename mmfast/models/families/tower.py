"""Encoder towers of image, video and sound: their blocks, and the media they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmfast.core.errors import ModelError

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
    `class_token`, row 0 of a frame is one.
    """

    base: Any
    module: Any
    blocks: nn.ModuleList
    packed: bool
    class_token: bool

    def last_used(self, arguments: Mapping[str, Any]) -> int:
        """Index of the last block whose output reaches the language model.

        Hidden state 0 of a LLaVA-like tower is its input, so feature layer -1 is the output of
        the last block and -2 leaves that block unused. A tower without a choice uses all.
        """
        layers = argument(self.base, arguments, "vision_feature_layer")
        if self.packed or layers is None:
            return len(self.blocks) - 1
        states = len(self.blocks) + 1
        used = [layers] if isinstance(layers, int) else layers
        return int(max(layer % states for layer in used)) - 1


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


def argument(base: Any, arguments: Mapping[str, Any], name: str) -> Any:
    """A call's argument, or what the configuration puts in place of None."""
    value = arguments.get(name)
    return getattr(base.config, name, None) if value is None else value


def find_tower(base: Any) -> Tower:
    """The tower of a base model that keeps it where most do.

    `visual.blocks` is a tower that packs the patches of all items into one sequence (Qwen);
    otherwise the first module list of the image encoder holds the blocks.
    """
    if hasattr(base, "visual"):
        return Tower(base, base.visual, base.visual.blocks, packed=True, class_token=False)
    module = base.get_encoder("image")
    blocks = next(m for m in module.modules() if isinstance(m, nn.ModuleList))
    names = [name for name, _ in module.named_parameters()]
    has_class = any(name.endswith(("class_embedding", "cls_token")) for name in names)
    return Tower(base, module, blocks, packed=False, class_token=has_class)
