"""FastVLM: a hybrid, mostly convolutional tower of timm whose last feature map is the token raster.

Paper: arXiv 2412.13303. The attention of its last two stages does not pass through transformers,
where signals are read, and a feature map has no tokens to merge.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter, square
from mmfast.models.families.tower import Tower


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """The raster of the last feature map, once per image."""
    height, width = (_cells(base, n) for n in call["pixel_values"].shape[-2:])
    return [Layout(height * width, (1, height, width))] * len(call["pixel_values"])


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Cells of the last feature map `[P, C]`, one `[N, C]` per image."""
    return list(values.split([each.length for each in layout(base, kind, call)]))


def tower(base: Any) -> Tower:
    """The tower, without blocks that could be read or merged in."""
    return Tower(base, base.vision_tower, nn.ModuleList(), packed=False, class_token=False)


def _cells(base: Any, pixels: int) -> int:
    stride: int = base.vision_tower.timm_model.feature_info[-1]["reduction"]
    return math.ceil(pixels / stride)


add_adapter(Adapter("fast_vlm", layout, fold, square, tower, media=("image",)))
