"""LLaVA-NeXT, -NeXT-Video and -OneVision: an overview, then tiles as one mosaic, a newline a row.

The mosaic is cut to the image's own shape, without the borders that padding added. OneVision (arXiv
2408.03326) also takes videos: pooled frames, one newline at the end; NeXT-Video has none there.
The stock packing and pooling code is run on marks and scores instead of features, so the layout
cannot drift away from what the model does. The base model of LLaVA-NeXT gets token ids by position,
not by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
)

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tiles import mosaic_layouts, mosaic_places
from mmfast.models.families.tower import argument


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """Layouts of the images or videos of one call."""
    side = _side(base)
    if kind == "video":
        videos, frames = call["pixel_values_videos"].shape[:2]
        return [_video(base, frames)] * videos
    sizes = torch.as_tensor(call["image_sizes"])
    cuts = list(zip(map(tuple, sizes.tolist()), tile_counts(base, call), strict=True))
    places = {cut: number for number, cut in enumerate(cuts)}  # images alike are laid out once
    pack = partial(_pack, base, call={**call, "image_sizes": sizes[list(places.values())]})
    found = mosaic_layouts(pack, [_shape(base, *cut) for cut in places], side)
    known = dict(zip(places, found, strict=True))
    return [known[cut] for cut in cuts]


def _shape(base: Any, size: tuple[int, int], count: int) -> tuple[int, int] | None:
    """Rows and columns of the tiles of an image; None where it has the overview alone."""
    grids, tile = base.config.image_grid_pinpoints, base.config.vision_config.image_size
    if count == 1:
        return None
    rows, columns = get_anyres_image_grid_shape(size, grids, tile)
    return rows, columns


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Values of the tower's patches `[P, C]` to content tokens, one `[N, C]` per item."""
    patches, width = _side(base) ** 2, values.shape[-1]
    pictures = rearrange(values, "(picture patch) c -> picture patch c", patch=patches)
    if kind == "video":
        pooled, videos = _pooling(base)(pictures), len(call["pixel_values_videos"])
        return list(rearrange(pooled, "(video t) n c -> video (t n) c", video=videos))
    tiles = list(pictures.split(tile_counts(base, call)))
    packed = _pack(base, tiles, values.new_zeros(width), call)
    contents = [each.content().to(values.device) for each in layout(base, kind, call)]
    return [each[content] for each, content in zip(packed, contents, strict=True)]


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout:
    """Layout from the embeddings `[length, D]` alone: newlines are equal to the parameter."""
    side, length = _side(base), len(embeds)
    if kind == "video":
        return _video(base, length // math.prod(_video(base, 1).grid or ()))
    newline = (embeds == base.image_newline.to(embeds.dtype)).all(-1).cpu()
    separators = tuple(newline.nonzero()[:, 0].tolist())
    if length == side * side + 1:
        return Layout(length, (1, side, side), separators)
    places = mosaic_places(length, separators, side)  # the cut into tiles is not to be seen
    return Layout(length, None, separators, places=places)


def _side(base: Any) -> int:
    vision = base.config.vision_config
    return int(vision.image_size // vision.patch_size)


def _video(base: Any, frames: int) -> Layout:
    if base.config.model_type == "llava_next_video":
        side = _side(base) // base.config.spatial_pool_stride
        return Layout(frames * side * side, (frames, side, side))
    pooled = math.ceil(_side(base) / 2)
    tokens = frames * pooled * pooled
    return Layout(tokens + 1, (frames, pooled, pooled), (tokens,))


def _pooling(base: Any) -> Callable[[Tensor], Tensor]:
    """The stock pooling of frames; one that convolves features cannot be run on scores."""
    if base.config.model_type != "llava_next_video":
        found: Callable[[Tensor], Tensor] = base.apply_pooling
    elif base.config.spatial_pool_mode == "conv":
        raise ModelError(
            "this LLaVA-NeXT-Video pools frames by a convolution (spatial_pool_mode 'conv'), which "
            "scores of the tower do not pass; use a method that reads tokens alone, as divprune"
        )
    else:
        found = base.vision_resampler
    return found


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image, the overview included; OneVision cuts images alone in their prompt only."""
    sizes, counts = call["image_sizes"], call.get("batch_num_images")
    alone = [True] * len(sizes) if counts is None else [n == 1 for n in counts for _ in range(n)]
    grids, tile = base.config.image_grid_pinpoints, base.config.vision_config.image_size
    return [
        image_size_to_num_patches(size, grids, tile) if one else 1
        for size, one in zip(sizes, alone, strict=True)
    ]


def _pack(base: Any, tiles: list[Tensor], newline: Tensor, call: Call) -> list[Tensor]:
    if base.config.model_type != "llava_onevision":
        name = "vision_feature_select_strategy"
        how = argument(base, call, name)
    else:
        name = "vision_aspect_ratio"
        how = call.get(name) or base.config.vision_aspect_ratio
    sizes = call["image_sizes"]
    packed, _ = base.pack_image_features(tiles, sizes, image_newline=newline, **{name: how})
    return list(packed)


_anyres = partial(Adapter, tile_counts=tile_counts, resizes=True)
add_adapter(_anyres("llava_next", layout, fold, recover, media=("image",)))
for _name in ("llava_onevision", "llava_next_video"):
    add_adapter(_anyres(_name, layout, fold, recover))
