"""Attention of packed towers: all windows or frames in one call instead of one call each.

Stock towers that pack the patches of all items into one sequence loop over its segments, except
under flash attention, which gets their boundaries. This is an attention function of that kind
that needs no further package: it goes by a name that asks the tower for the boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

from mmfast.models.towers import SEGMENTS, Tower, attention_of
from mmfast.ops.segment_attention import segment_attention


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float | None = None,
    max_length_q: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface: `[1, H, S, d]` each to `[1, S, H, d]`."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    bias = None if attention_mask is None else attention_mask.reshape(-1)  # [1, 1, 1, S]
    out = segment_attention(q, k, v, cu_seq_lens_q, scale=scale, bias=bias, longest=max_length_q)
    return out[None], None


@contextmanager
def fused_attention(tower: Tower) -> Iterator[None]:
    """SDPA everywhere, and segments of a packed tower together; flash and flex stay as they are."""
    config: Any = getattr(attention_of(tower.blocks[0]), "config", None) if tower.blocks else None
    before = getattr(config, "_attn_implementation", None)
    if before not in ("sdpa", "eager") or not getattr(tower.module, "_supports_sdpa", False):
        yield
        return
    if tower.packed:
        AttentionInterface.register(SEGMENTS, attend)
    config._attn_implementation = SEGMENTS if tower.packed else "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = before
