"""Qwen2.5-VL: M-RoPE, and a vision tower that works in window order.

Paper: arXiv 2502.13923.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from mmfast.models.families.adapter import Adapter, Call, add_adapter
from mmfast.models.families.qwen import layout, recover, units


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over merge units, brought back from window order to raster order."""
    vision = base.config.vision_config
    window, _ = get_vision_window_index(
        call[f"{kind}_grid_thw"], vision.spatial_merge_size, vision.window_size, vision.patch_size
    )
    raster = units(base, values)[window.argsort().to(values.device)]
    return list(raster.split([each.length for each in layout(base, kind, call)]))


add_adapter(Adapter("qwen2_5_vl", layout, fold, recover, mrope=True))
