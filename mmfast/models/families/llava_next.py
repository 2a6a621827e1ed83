"""LLaVA-NeXT (AnyRes): an overview, then the tiles as one mosaic with a newline after every row.

The mosaic is cut to the image's own shape, without the borders that padding added. The stock
packing code is run on marks and scores instead of features, so the layout cannot drift away from
what the model does. Its base model gets token ids by position, not by name.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from einops import rearrange
from torch import Tensor
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    image_size_to_num_patches,
)

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tiles import mosaic_layouts, mosaic_places
from mmfast.models.families.tower import argument


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """Layouts of the images of one call."""
    grids, tile = base.config.image_grid_pinpoints, base.config.vision_config.image_size
    shapes = [get_anyres_image_grid_shape(size, grids, tile) for size in call["image_sizes"]]
    return mosaic_layouts(partial(_pack, base, call=call), shapes, _side(base))


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Values of the tower's patches `[P, C]` to content tokens, one `[N, C]` per image."""
    patches, width = _side(base) ** 2, values.shape[-1]
    tiles = rearrange(values, "(tile patch) c -> tile patch c", patch=patches)
    packed = _pack(base, list(tiles.split(tile_counts(base, call))), values.new_zeros(width), call)
    contents = [each.content().to(values.device) for each in layout(base, kind, call)]
    return [each[content] for each, content in zip(packed, contents, strict=True)]


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout:
    """Layout from the embeddings `[length, D]` alone: newlines are equal to the parameter."""
    newline = (embeds == base.image_newline.to(embeds.dtype)).all(-1).cpu()
    separators = tuple(newline.nonzero()[:, 0].tolist())
    places = mosaic_places(len(embeds), separators, _side(base))
    return Layout(len(embeds), None, separators, places=places)


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image, the overview included."""
    grids, tile = base.config.image_grid_pinpoints, base.config.vision_config.image_size
    return [image_size_to_num_patches(size, grids, tile) for size in call["image_sizes"]]


def _side(base: Any) -> int:
    vision = base.config.vision_config
    return int(vision.image_size // vision.patch_size)


def _pack(base: Any, tiles: list[Tensor], newline: Tensor, call: Call) -> list[Tensor]:
    strategy = argument(base, call, "vision_feature_select_strategy")
    packed, _ = base.pack_image_features(tiles, call["image_sizes"], strategy, newline)
    return list(packed)


add_adapter(
    Adapter(
        "llava_next", layout, fold, recover, tile_counts=tile_counts, media=("image",), resizes=True
    )
)
