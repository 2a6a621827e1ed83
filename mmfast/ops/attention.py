"""Attention that also returns its log-sum-exp, and attention within segments of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`scaled_dot_product_attention`, bit for bit, and the log-sum-exp of its kernel.

    Queries `[B, H, L, D]`, keys and values `[B, Hkv, S, D]`; the mask is bool (True = visible) or
    an addend to the logits. Returns `[B, H, L, D]`, and `[B, H, L]` float32 or None where another
    kernel than flash attention is chosen, as for odd shapes and for some generations of GPUs.
    """
    grouped = query.shape[1] != key.shape[1]
    if query.device.type in ("cpu", "cuda"):
        choice = torch._fused_sdp_choice(
            query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
        )
        if choice == SDPBackend.FLASH_ATTENTION.value:
            if not query.is_cuda:
                if mask is not None and mask.dtype == torch.bool:
                    hidden = ~mask
                    mask = torch.zeros_like(mask, dtype=query.dtype)
                    mask.masked_fill_(hidden, -torch.inf)
                flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
                out, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
                return out, lse
            if query.shape[-1] % 8 == 0:  # else sdpa pads
                flash = torch.ops.aten._scaled_dot_product_flash_attention
                out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
                return out, lse[..., : query.shape[2]]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=grouped
    )
    return out, None


_WIDEN = 8  # channels that carry a bias through flash kernels, which take no mask


def segment_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Attention of each token to all tokens of its own segment, all of them `[S, H, d]`.

    Segments of one length, between the `[G + 1]` boundaries `ends`, go through one call of SDPA: on
    the CPU, bit for bit as one by one, if they are neighbours. Half precision on CUDA is one call
    of torch's variable-length flash attention. `bias` `[S]` is added to the logits of each key;
    `longest` is the length of the longest segment, where known.
    """
    flash = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if flash and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 - _WIDEN:
        from torch.nn.attention.varlen import varlen_attn

        width, ends = v.shape[-1], ends.to(torch.int32)
        longest = max(lengths_of(ends)) if longest is None else longest
        if bias is not None:  # carried by extra channels of q and k
            q, k = widened(q, k, bias, scale)
            v = F.pad(v, (0, _WIDEN))
        whole = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale)
        assert isinstance(whole, Tensor)
        return whole[..., :width]
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for length, rows in _parts(ends, q.device):
        # [G, H, n, d]; a slice is a view, a list of rows is a gather
        hq, hk, hv = (_rows(x, rows).unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        mask = None
        if bias is not None:
            mask = _rows(bias, rows).to(q.dtype).view(-1, 1, 1, length)
        found = F.scaled_dot_product_attention(hq, hk, hv, attn_mask=mask, scale=scale)
        found = found.transpose(1, 2)  # [G, n, H, d]
        if isinstance(rows, slice):
            out[rows].unflatten(0, (-1, length)).copy_(found)
        else:
            out[rows] = found.flatten(0, 1)
    return out


def lengths_of(ends: Tensor) -> tuple[int, ...]:
    """Lengths between boundaries, cached on the tensor, since every block asks for them."""
    known: tuple[int, ...] | None = getattr(ends, "_mmfast_lengths", None)
    if known is None:
        known = tuple(ends.diff().tolist())
        ends._mmfast_lengths = known  # type: ignore[attr-defined]
    return known


def _parts(ends: Tensor, device: torch.device) -> Sequence[tuple[int, Tensor | slice]]:
    """Segments of equal length; cached on the tensor, since a CUDA graph cannot copy a list."""
    known: Any = getattr(ends, "_mmfast_parts", None)
    if known is None or known[0] != device:
        on_cpu = device.type == "cpu"
        parts = runs_of(lengths_of(ends)) if on_cpu else groups_of(lengths_of(ends), device)
        known = (device, parts)
        ends._mmfast_parts = known  # type: ignore[attr-defined]
    found: Sequence[tuple[int, Tensor | slice]] = known[1]
    return found


def runs_of(lengths: Sequence[int]) -> list[tuple[int, slice]]:
    """Join neighbouring segments of equal length: `(length, slice of the sequence)` each."""
    runs: list[tuple[int, slice]] = []
    start = 0
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, slice(runs[-1][1].start, start + length))
        elif length:
            runs.append((length, slice(start, start + length)))
        start += length
    return runs


def groups_of(
    lengths: Sequence[int], device: torch.device | None = None
) -> list[tuple[int, Tensor | slice]]:
    """Join all segments of equal length: `(length, rows of the sequence)` each."""
    runs = runs_of(lengths)
    if len({length for length, _ in runs}) == len(runs):
        return [*runs]
    rows: dict[int, list[Tensor]] = {}
    for length, part in runs:
        rows.setdefault(length, []).append(torch.arange(part.start, part.stop, device=device))
    return [(length, torch.cat(found)) for length, found in rows.items()]


def _rows(x: Tensor, rows: Tensor | slice) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def widened(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Extend `q` and `k` by eight channels whose scaled product is `bias`, also in bfloat16."""
    lift = 2.0 ** torch.tensor(1 / scale).log2().ceil().item()
    value = bias.double() / (scale * lift)
    high = value.to(k.dtype)
    low = (value - high.double()).to(k.dtype)
    extra_k = k.new_zeros(*k.shape[:-1], _WIDEN)
    extra_k[..., 0], extra_k[..., 1] = high[:, None], low[:, None]
    extra_q = q.new_zeros(*q.shape[:-1], _WIDEN)
    extra_q[..., :2] = lift
    return torch.cat([q, extra_q], -1), torch.cat([k, extra_k], -1)


def group_queries(query: Tensor, heads: int) -> Tensor:
    """Split `[Hq, T, d]` into `[H, Hq / H, T, d]`: neighbouring query heads share a key head."""
    groups: Tensor = query.unflatten(0, (heads, query.shape[0] // heads))
    return groups


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: `[..., n, d]` by cosines and sines `[..., n, d]`; halves of a row are coordinates."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def rotate_at(x: Tensor, place: Tensor) -> Tensor:
    """RoPE of base 10,000: heads `[..., H, n, d]` at the places `[..., n]`."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
    angle = place[..., None, :, None] * rate
    sin, cos = angle.sin().to(x.dtype), angle.cos().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
