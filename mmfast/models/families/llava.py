"""LLaVA-1.5, its kin and FastVLM: one raster per image, no separators.

Paper: arXiv 2310.03744. The tower is CLIP (its class token is dropped before the projector), SigLIP
(which has none; so have DeepSeek-VL and Janus, which are read, not made to draw) or Pixtral (images
of any size, their patches in one sequence). ViP-LLaVA drops the class token unasked.

FastVLM (arXiv 2412.13303) has a hybrid, mostly convolutional tower of timm, whose last feature map
is the raster. The attention of its last two stages does not pass through transformers, where
signals are read, and a feature map has no tokens to merge. Video-LLaVA (arXiv 2311.10122) has a
tower for images and one for clips, of which neither is read.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter, square
from mmfast.models.families.tower import argument, blockless, find_tower


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image; a class token the model keeps is a separator before it."""
    patch = base.config.vision_config.patch_size
    # Of a tower for images of any size; the method of 5.17 has no name for it.
    sizes = call.get("image_sizes", call.get("kwargs", {}).get("image_sizes"))
    if sizes is None:
        pixels = call["pixel_values"]
        sizes = [pixels.shape[-2:]] * len(pixels)
    extra = _class_tokens(base, call)
    return [_raster(int(h) // patch, int(w) // patch, extra) for h, w in sizes]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """A patch is a token: values `[P, C]` cut into one `[N, C]` per image."""
    layouts = layout(base, kind, call)
    if base.config.model_type == "vipllava":  # class tokens are still among the values
        return [rows[1:] for rows in values.chunk(len(layouts))]
    rows = values.split([each.length for each in layouts])
    return [each[plan.content().to(each.device)] for each, plan in zip(rows, layouts, strict=True)]


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout | None:
    """Layout of an image as large as the tower expects; other sizes cannot be recovered."""
    vision = base.config.vision_config
    side, extra = vision.image_size // vision.patch_size, _class_tokens(base, {})
    if len(embeds) != side * side + extra:
        return None
    return _raster(side, side, extra)


def _class_tokens(base: Any, call: Call) -> int:
    if base.config.model_type == "vipllava":
        return 0
    strategy = argument(base, call, "vision_feature_select_strategy")
    return int(strategy != "default" and find_tower(base).class_token)


def _raster(rows: int, columns: int, extra: int) -> Layout:
    grid = (1, rows, columns)
    return Layout(extra + math.prod(grid), grid, tuple(range(extra)))


def cells(base: Any, kind: str, call: Call) -> list[Layout]:
    """The raster of FastVLM's last feature map, once per image."""
    stride: int = base.vision_tower.timm_model.feature_info[-1]["reduction"]
    height, width = (math.ceil(n / stride) for n in call["pixel_values"].shape[-2:])
    return [_raster(height, width, 0)] * len(call["pixel_values"])


def fold_cells(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Cells of the last feature map `[P, C]`, one `[N, C]` per image."""
    return list(values.split([each.length for each in cells(base, kind, call)]))


def frames(base: Any, kind: str, call: Call) -> list[Layout]:
    """Images without a class token; every frame of a clip begins with one, which stays."""
    if kind == "image":
        return layout(base, kind, call)
    clips, count, _, height, width = call["pixel_values_videos"].shape
    patch = base.config.vision_config.patch_size
    grid = (count, height // patch, width // patch)
    one = 1 + math.prod(grid[1:])
    return [Layout(count * one, grid, tuple(range(0, count * one, one)))] * clips


def fold_frames(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """A patch is a token: values `[P, C]` cut into one `[N, C]` per image or clip."""
    return list(values.split([len(each.content()) for each in frames(base, kind, call)]))


for _name in ("llava", "vipllava", "deepseek_vl", "janus"):
    add_adapter(Adapter(_name, layout, fold, recover, media=("image",)))
add_adapter(Adapter("fast_vlm", cells, fold_cells, square, blockless, media=("image",)))
add_adapter(Adapter("video_llava", frames, fold_frames, tower=blockless))
