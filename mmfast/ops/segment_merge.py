"""Segment merge: weighted means and sums of tokens, the same bits at every run."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.segments import Segments, add_rows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def segment_merge(x: Tensor, segments: Segments) -> Tensor:
    """Output m is the sum (or mean) of `weight * x[source]` over the entries of m.

    A sum is taken in float32 at least and rounded once. On CUDA one program adds up one output,
    in a fixed order and without atomics; float64 and gradients go the way of plain torch.

    Args:
        x: `[..., N, D]`; leading dims as those of `segments.output`.
        segments: Which rows make up which outputs.

    Returns:
        `[..., M, D]` in the dtype of `x`; an output without entries is 0.
    """
    learning = x.requires_grad and torch.is_grad_enabled()
    if not x.is_cuda or x.dtype not in _DTYPES or learning:
        return add_rows(x, segments)
    return _on_device(x, segments)


def _on_device(x: Tensor, segments: Segments) -> Tensor:
    from mmfast.kernels.segment_merge import segment_merge as kernel

    lead, ordered = x.shape[:-2], segments.ordered
    rows = x if x.stride(-1) == 1 else x.contiguous()

    def flat(entries: Tensor) -> Tensor:
        return entries.reshape(lead.numel(), -1)

    with torch.cuda.device_of(x):  # Triton launches where the thread is, not where the data is
        out: Tensor = kernel(
            rows.reshape(lead.numel(), *x.shape[-2:]),
            flat(ordered.offsets),
            flat(ordered.source),
            None if ordered.weight is None else flat(ordered.weight),
            mean=segments.mean,
        )
    return out.view(*lead, segments.m, x.shape[-1])


def segment_merge_reference(x: Tensor, segments: Segments) -> Tensor:
    """The same from the matrix of weights `[..., M, K]`, in float64: `[..., M, D]`."""
    outputs = torch.arange(segments.m, device=x.device)[:, None]
    share = (segments.output[..., None, :] == outputs).double()  # [..., M, K]
    if segments.mean:
        share = share / share.sum(-1, keepdim=True).clamp_min(1)
    if segments.weight is not None:
        share = share * segments.weight.double()[..., None, :]
    rows = x.double()
    if segments.source is not None:
        index = segments.source[..., None].expand(*segments.source.shape, x.shape[-1])
        rows = rows.gather(-2, index)
    return share @ rows
