"""Mistral 3 and LightOnOCR: a Pixtral tower for pictures of any size, squares of patches merged.

The tower gets the patches of all pictures in one sequence. Mistral 3 (Mistral Small 3.1, Ministral)
ends every row of tokens in the prompt with a token of its own, which is text and stays.
"""

from __future__ import annotations

from typing import Any

from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per picture."""
    side = base.config.vision_config.patch_size * base.config.spatial_merge_size
    rasters = [(int(h) // side, int(w) // side) for h, w in call["image_sizes"]]
    return [Layout(h * w, (1, h, w)) for h, w in rasters]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches `[P, C]` that are merged into a token, one `[N, C]` per picture."""
    patch, merge = base.config.vision_config.patch_size, base.config.spatial_merge_size
    rasters = [(int(h) // patch, int(w) // patch) for h, w in call["image_sizes"]]
    folded = []
    for rows, (h, _) in zip(values.split([h * w for h, w in rasters]), rasters, strict=True):
        pooled = F.avg_pool2d(rearrange(rows, "(h w) c -> c h w", h=h), merge)
        folded.append(rearrange(pooled, "c h w -> (h w) c"))
    return folded


for _name in ("mistral3", "lighton_ocr"):
    add_adapter(Adapter(_name, layout, fold, media=("image",)))
