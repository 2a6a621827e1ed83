"""Attention whose log-sum-exp is not thrown away where the kernel behind it knows that."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`scaled_dot_product_attention`, bit for bit, and the log-sum-exp its kernel leaves.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`, H a multiple of Hkv.
        value: As `key`.
        mask: Bool (True = visible) or addend to the logits, broadcast to `[B, H, L, S]`.
        causal: Query i sees the keys up to i.
        scale: Factor of the logits; None means `D ** -0.5`.

    Returns:
        `[B, H, L, D]`, and `[B, H, L]` float32 or None where another kernel than flash attention
        is the choice, as it is for odd shapes and for some generations of GPUs.
    """
    grouped = query.shape[1] != key.shape[1]
    if query.device.type in ("cpu", "cuda"):
        choice = torch._fused_sdp_choice(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        if choice == SDPBackend.FLASH_ATTENTION.value:
            if not query.is_cuda:
                return _on_host(query, key, value, mask, causal, scale)
            if query.shape[-1] % 8 == 0:  # else sdpa pads
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
                return out, lse[..., : query.shape[2]]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return out, None


def _on_host(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return out, lse
