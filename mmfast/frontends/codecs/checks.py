"""What may go into a codec; one line where it may not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError


def check_pcm(pcm: Any, batch: int | None = None) -> Tensor:
    """Sound `[B, n]` of finite floating-point samples; n may be 0.

    Raises:
        MediaError: It is something else.
    """
    if not isinstance(pcm, Tensor) or not pcm.is_floating_point():
        kind = pcm.dtype if isinstance(pcm, Tensor) else type(pcm).__name__
        raise MediaError(f"sound is {kind}; give a float32 tensor [B, n] of samples in -1..1")
    if pcm.dim() != 2 or pcm.shape[0] < 1:
        raise MediaError(f"sound has shape {list(pcm.shape)}; give [B, n], one mono stream a row")
    _check_batch("sound", pcm, batch)
    if not torch.isfinite(pcm).all():
        bad = int((~torch.isfinite(pcm)).sum())
        raise MediaError(
            f"sound holds {bad} NaN or infinite samples; give finite ones (0 = silent)"
        )
    return pcm


def check_codes(codes: Any, books: int, size: int, batch: int | None = None) -> Tensor:
    """Codes `[B, Q, t]`, whole numbers in `[0, size)`, 1 to `books` books; t may be 0.

    Raises:
        MediaError: They are something else.
    """
    whole = isinstance(codes, Tensor) and codes.dtype in (torch.int64, torch.int32, torch.int16)
    if not whole:
        kind = codes.dtype if isinstance(codes, Tensor) else type(codes).__name__
        raise MediaError(f"codes are {kind}; give an int64 tensor [B, Q, t]")
    if codes.dim() != 3 or codes.shape[0] < 1 or not 1 <= codes.shape[1] <= books:
        raise MediaError(
            f"codes have shape {list(codes.shape)}; give [B, Q, t] with 1 to {books} codebooks"
        )
    _check_batch("codes", codes, batch)
    if codes.numel():
        low, high = (int(each) for each in codes.aminmax())
        if low < 0 or high >= size:
            worst = low if low < 0 else high
            raise MediaError(f"code {worst} is not in a codebook; give codes of 0 to {size - 1}")
    whole_numbers: Tensor = codes.long()
    return whole_numbers


def _check_batch(what: str, x: Tensor, batch: int | None) -> None:
    if batch is not None and x.shape[0] != batch:
        raise MediaError(
            f"{what} of {x.shape[0]} streams for a state of {batch}; give as many rows as start()"
        )
