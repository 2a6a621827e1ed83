"""LLaVA-1.5 and its kin: one raster per image, no separators.

Paper: arXiv 2310.03744. The tower is CLIP (its class token is dropped before the projector), SigLIP
(which has none) or Pixtral (images of any size, their patches in one sequence).
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tower import argument, find_tower


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image; a class token the model keeps is a separator before it."""
    patch = base.config.vision_config.patch_size
    sizes = call.get("image_sizes")  # of a tower for images of any size
    if sizes is None:
        pixels = call["pixel_values"]
        sizes = [pixels.shape[-2:]] * len(pixels)
    extra = _class_tokens(base, call)
    return [_raster(int(h) // patch, int(w) // patch, extra) for h, w in sizes]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """A patch is a token: values `[P, C]` cut into one `[N, C]` per image."""
    layouts = layout(base, kind, call)
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
    strategy = argument(base, call, "vision_feature_select_strategy")
    return int(strategy != "default" and find_tower(base).class_token)


def _raster(rows: int, columns: int, extra: int) -> Layout:
    grid = (1, rows, columns)
    return Layout(extra + math.prod(grid), grid, tuple(range(extra)))


add_adapter(Adapter("llava", layout, fold, recover, media=("image",)))
