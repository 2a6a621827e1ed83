"""What is left of `Tokens` after a Reduction, for the stage that follows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mmfast.core.gather_rows import gather_rows
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens


def follow(tokens: Tokens, reduction: Reduction) -> Tokens:
    """The tokens that the next stage sees.

    Features and wide signals are combined; signals of one number per token, and integers such as
    tile or image numbers, follow the kept sources; signals named `text_*` belong to the question
    and stay. A raster with holes is none, so `grid` goes (`place` still says where tokens lie).

    Args:
        tokens: `x` `[..., N, D]` and its signals.
        reduction: From those N to M tokens.
    """
    attn = tokens.attn
    return Tokens(
        x=reduction.apply(tokens.x),
        attn=None if attn is None else attn.gather(-1, reduction.keep),
        query=tokens.query,
        grid=tokens.grid if reduction.m == tokens.n else None,
        signals=follow_signals(tokens.signals, reduction),
    )


def follow_signals(signals: Mapping[str, Tensor], reduction: Reduction) -> dict[str, Tensor]:
    """Signals by name after a reduction; see `follow`."""
    return {name: _one(name, value, reduction) for name, value in signals.items()}


def _one(name: str, value: Tensor, reduction: Reduction) -> Tensor:
    keep = reduction.keep
    if name.startswith("text_"):
        return value
    if value.ndim == keep.ndim:  # [..., N]
        return value.gather(-1, keep)
    if not value.is_floating_point():  # [..., N, d] of integers
        return gather_rows(value, keep)
    return reduction.apply(value)
