"""PaliGemma: a SigLIP square, and a prompt whose tokens all see each other, text included.

Papers: arXiv 2407.07726 and 2412.03555 (PaliGemma 2). What is answered sees backward alone.
"""

from __future__ import annotations

from torch import Tensor

from mmfast.models.cache_name import cache_of
from mmfast.models.families.adapter import Adapter, Call, add_adapter
from mmfast.models.families.llava import fold, layout, recover


def blocks(call: Call) -> Tensor | None:
    """The prompt is one block; a later call without pixels is causal, as in the stock model."""
    types, cache, mask = call.get("token_type_ids"), cache_of(call), call.get("attention_mask")
    # `generate` makes the masks of a static cache itself, which is initialized before the prompt.
    ready = isinstance(mask, dict) or (mask is not None and mask.ndim == 4)
    empty = cache is None or not (int(cache.get_seq_length()) if ready else cache.is_initialized)
    first = empty or call.get("pixel_values") is not None
    return (types != 0).long().neg() if types is not None and first else None


add_adapter(
    Adapter("paligemma", layout, fold, recover, media=("image",), blocks=blocks, apart=False)
)
