"""Gemma 3: a SigLIP tower, its patches averaged to a fixed number of tokens, images only.

Paper: arXiv 2503.19786. The tokens of an image see each other in both directions, and most
decoder layers see a window of the last tokens only. What is left of an image stays such a block,
and a window counts the tokens that are left: exactly what the stock model computes on the
shortened prompt. Crops of pan-and-scan are images of their own.
"""

from __future__ import annotations

import math
from typing import Any

from einops import rearrange
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One square of tokens per image."""
    return [_square(base)] * len(call["pixel_values"])


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Averages values as the projector does features: `[P, C]` to one `[N, C]` per image."""
    side = base.multi_modal_projector.patches_per_image
    images = rearrange(values, "(image h w) c -> image c h w", h=side, w=side)
    pooled = base.multi_modal_projector.avg_pool(images)
    return list(rearrange(pooled, "image c h w -> image (h w) c"))


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> Layout:
    """Every image has the same layout."""
    return _square(base)


def blocks(call: Call) -> Tensor | None:
    """Image of each token; a call without token types is causal, as in the stock model."""
    types = call.get("token_type_ids")
    return None if types is None else get_block_sequence_ids_for_mask(types)


def _square(base: Any) -> Layout:
    side = math.isqrt(base.config.mm_tokens_per_image)
    return Layout(side * side, (1, side, side))


add_adapter(Adapter("gemma3", layout, fold, recover, media=("image",), blocks=blocks))
