"""Gemma 4: pictures of any shape, every 3 x 3 patches averaged to a token; clips frame by frame.

Model card: huggingface.co/google/gemma-4-31B-it. The tower gets a picture per row, padded to the
longest. Where the model has it so, tokens of an image see each other in both directions, in the
layers that see a window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import get_block_sequence_ids_for_mask

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image; the frames of a clip are one item."""
    if kind == "audio":
        raise ModelError("sounds of Gemma 4 are not read while mmfast is attached; leave them out")
    merge = base.config.vision_config.pooling_kernel_size
    columns, rows = ((_places(kind, call).amax(1) + 1) // merge).unbind(-1)
    frames, found = list(zip(rows.tolist(), columns.tolist(), strict=True)), []
    for count in _counts(kind, call):
        mine, frames = frames[:count], frames[count:]
        found.append(Layout(count * mine[0][0] * mine[0][1], (count, *mine[0])))
    return found


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Average over the patches `[P, C]` of a token, by the stock pooling: one `[N, C]` per item."""
    places, merge = _places(kind, call), base.config.vision_config.pooling_kernel_size
    places = places.to(values.device)
    rows, padding = torch.stack(values.chunk(len(places))), (places == -1).all(-1)
    rows, length = rows.masked_fill(padding[..., None], 0.0), places.shape[1] // merge**2
    pooled, there = base.vision_tower.pooler._avg_pool_by_positions(rows, places, length)
    return list(pooled[there].split([each.length for each in layout(base, kind, call)]))


def blocks(call: Call) -> Tensor | None:
    """Image or frame of each token; a call without token types is causal."""
    types = call.get("mm_token_type_ids")
    return None if types is None else get_block_sequence_ids_for_mask(types, types.device)


def _places(kind: str, call: Call) -> Tensor:
    """`(x, y)` of every patch, -1 at padding, `[pictures, patches, 2]`."""
    places: Tensor = call[f"{kind}_position_ids"]
    return places.flatten(0, -3)  # by clip where their frames have no counts


def _counts(kind: str, call: Call) -> list[int]:
    """Pictures of each item."""
    if kind == "video" and call.get("num_frames_per_video") is None:  # 5.17
        clips, frames = call["video_position_ids"].shape[:2]
        return [frames] * clips
    if kind == "video":
        counts: list[int] = call["num_frames_per_video"].tolist()
        return counts
    return [1] * len(call["image_position_ids"])


add_adapter(Adapter("gemma4", layout, fold, blocks=blocks, apart=False))
