"""LFM2-VL: tiles of any aspect ratio, squares of patches joined into tokens, images only.

Model card: huggingface.co/LiquidAI/LFM2-VL-1.6B. The tower gets a tile per row, padded to the
longest. The processor cuts a large image into tiles and an overview, each between special tokens
of its own, and does not tell the model which belong together: a tile counts as an image here.
Decoder layers that are convolutions run over the tokens that are left.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.adapter import Adapter, Call, Layout, add_adapter


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per tile."""
    factor = base.config.downsample_factor
    grids = [(1, h // factor, w // factor) for h, w in call["spatial_shapes"].tolist()]
    return [Layout(h * w, (t, h, w)) for t, h, w in grids]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a token: `[P, C]`, tiles padded, to one `[N, C]` per tile."""
    factor = base.config.downsample_factor
    tiles = values.reshape(len(call["pixel_values"]), -1, values.shape[-1])
    folded = []
    for tile, (h, w) in zip(tiles, call["spatial_shapes"].tolist(), strict=True):
        squares = tile[: h * w].reshape(h // factor, factor, w // factor, factor, -1)
        folded.append(squares.mean((1, 3)).flatten(0, 1))
    return folded


add_adapter(Adapter("lfm2_vl", layout, fold, media=("image",)))
