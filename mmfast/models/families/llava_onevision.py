"""LLaVA-OneVision: tiles with a newline after every row, pooled frames with one newline at the end.

Paper: arXiv 2408.03326. The stock packing and pooling code is run on markers and scores instead
of features, so the layout cannot drift away from what the model does.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from einops import rearrange
from torch import Tensor
from transformers.models.llava_onevision.modeling_llava_onevision import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
)

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tiles import mosaic_layouts, mosaic_places


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """Layouts of the images or videos of one call."""
    side = _side(base)
    if kind == "video":
        videos, frames = call["pixel_values_videos"].shape[:2]
        return [_video(frames, side)] * videos
    pack = partial(_pack, base, call=call)
    return mosaic_layouts(pack, _shapes(base, call), side)


def _shapes(base: Any, call: Call) -> list[tuple[int, int] | None]:
    """Rows and columns of the tiles of each image; None where it has the overview alone."""
    grids, tile = base.config.image_grid_pinpoints, base.config.vision_config.image_size
    return [
        get_anyres_image_grid_shape(size, grids, tile) if count > 1 else None
        for size, count in zip(call["image_sizes"], tile_counts(base, call), strict=True)
    ]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Values of the tower's patches `[P, C]` to content tokens, one `[N, C]` per item."""
    patches, width = _side(base) ** 2, values.shape[-1]
    pictures = rearrange(values, "(picture patch) c -> picture patch c", patch=patches)
    if kind == "video":
        pooled, videos = base.apply_pooling(pictures), len(call["pixel_values_videos"])
        return list(rearrange(pooled, "(video t) n c -> video (t n) c", video=videos))
    packed = _pack(
        base, list(pictures.split(tile_counts(base, call))), values.new_zeros(width), call
    )
    contents = [each.content().to(values.device) for each in layout(base, kind, call)]
    return [each[content] for each, content in zip(packed, contents, strict=True)]


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout:
    """Layout from the embeddings `[length, D]` alone: newlines are equal to the parameter."""
    side = _side(base)
    if kind == "video":
        return _video((len(embeds) - 1) // math.ceil(side / 2) ** 2, side)
    return _image((embeds == base.image_newline.to(embeds.dtype)).all(-1).cpu(), side)


def _side(base: Any) -> int:
    vision = base.config.vision_config
    return int(vision.image_size // vision.patch_size)


def _video(frames: int, side: int) -> Layout:
    pooled = math.ceil(side / 2)
    tokens = frames * pooled * pooled
    return Layout(tokens + 1, (frames, pooled, pooled), (tokens,))


def _image(newline: Tensor, side: int) -> Layout:
    separators = tuple(newline.nonzero()[:, 0].tolist())
    if len(newline) == side * side + 1:
        return Layout(len(newline), (1, side, side), separators)
    places = mosaic_places(len(newline), separators, side)  # the cut into tiles is not to be seen
    return Layout(len(newline), None, separators, places=places)


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image: several only where an image is alone in its prompt."""
    sizes, counts = call["image_sizes"], call.get("batch_num_images")
    alone = [True] * len(sizes) if counts is None else [n == 1 for n in counts for _ in range(n)]
    config = base.config
    tile, grids = config.vision_config.image_size, config.image_grid_pinpoints
    return [
        image_size_to_num_patches(size, grids, tile) if one else 1
        for size, one in zip(sizes, alone, strict=True)
    ]


def _pack(base: Any, tiles: list[Tensor], newline: Tensor, call: Call) -> list[Tensor]:
    ratio = call.get("vision_aspect_ratio") or base.config.vision_aspect_ratio
    packed, _ = base.pack_image_features(
        tiles, call["image_sizes"], image_newline=newline, vision_aspect_ratio=ratio
    )
    return list(packed)


add_adapter(
    Adapter("llava_onevision", layout, fold, recover, tile_counts=tile_counts, resizes=True)
)
