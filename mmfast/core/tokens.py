"""Tokens: the features and signals that a reducer may read.

Shape glossary of the project: B batch, N tokens in, M tokens out, T text, D width, H heads,
L layers, Q codebooks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, an
from mmfast.core.reduction import Reduction, gather_rows


def choosing(device: torch.device) -> AbstractContextManager[Any]:
    """Choose tokens without gradients and as written: autocast of the caller rounds no product."""
    if torch.is_autocast_enabled(device.type):
        return _uncast(device)
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _uncast(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


@dataclass(frozen=True)
class Tokens:
    """Features of one item, or of several with equal shapes, and the signals around them.

    Attributes:
        x: Features or keys, floating point, `[..., N, D]`.
        attn: Attention each token received, `[..., N]`.
        query: Embedded question, `[..., T, D]`.
        grid: `(frames, rows, columns)` with `N = frames * rows * columns`, raster order.
        signals: Further tensors by name (`keys`, `pixels` …), leading dims as in `x`.

    Raises:
        MmfastError: A shape or dtype does not fit; the message names both.
    """

    x: Tensor  # [..., N, D]
    attn: Tensor | None = None  # [..., N]
    query: Tensor | None = None  # [..., T, D]
    grid: tuple[int, int, int] | None = None
    signals: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        x = self.x
        if not isinstance(x, Tensor):
            raise MmfastError(
                f"Tokens.x is {an(type(x).__name__)}; give a torch tensor [..., N, D], "
                "for example torch.as_tensor(x)"
            )
        if x.ndim < 2 or not x.is_floating_point():
            raise MmfastError(
                f"Tokens.x has shape {list(x.shape)} and dtype {x.dtype}; "
                "give a floating-point tensor [..., N, D]"
            )
        if 0 in x.shape:
            raise MmfastError(
                f"Tokens.x has shape {list(x.shape)}: no token to reduce; give N >= 1"
            )
        for name in ("attn", "query"):
            if not isinstance(each := getattr(self, name), Tensor | None):
                raise MmfastError(f"Tokens.{name} is {an(type(each).__name__)}; give a tensor")
        if self.attn is not None and self.attn.shape != x.shape[:-1]:
            raise MmfastError(
                f"Tokens.attn has shape {list(self.attn.shape)}; x asks for {list(x.shape[:-1])}"
            )
        if self.grid is not None:
            self._check_grid(self.grid)

    def _check_grid(self, grid: tuple[int, int, int]) -> None:
        whole = isinstance(grid, Sequence) and all(isinstance(n, Integral) for n in grid)
        if not whole or len(grid) != 3 or min(grid) < 1 or math.prod(grid) != self.n:
            raise MmfastError(
                f"Tokens.grid is {grid!r} but x holds {self.n} tokens; "
                "give (frames, rows, columns) with frames * rows * columns = N"
            )

    @property
    def n(self) -> int:
        """Number of tokens N."""
        return self.x.shape[-2]

    def signal(self, name: str) -> Tensor | None:
        """Return the signal called `name` (a field or an entry of `signals`), or None."""
        if name in _TENSORS:
            value = getattr(self, name)
            return value if isinstance(value, Tensor) else None
        return self.signals.get(name)

    def has(self, name: str) -> bool:
        """Return True if the signal called `name` exists (`grid` counts as one)."""
        return self.grid is not None if name == "grid" else self.signal(name) is not None

    def need(self, name: str) -> Tensor:
        """Return the signal called `name`.

        Raises:
            MmfastError: The tokens do not carry it.
        """
        value = self.signal(name)
        if value is None:
            raise MmfastError(f"Tokens carry no {name!r}; pass it (x, attn, query, or in signals)")
        return value

    def check_finite(self) -> None:
        """Refuse NaN and infinity in `x` and `attn`: every ranking would be meaningless.

        Raises:
            MmfastError: Names the first broken token.
        """
        for name, values in (("x", self.x), ("attn", self.attn)):
            if values is not None and not all_finite(values):
                where = (~torch.isfinite(values)).nonzero()[0].tolist()
                raise MmfastError(
                    f"Tokens.{name} is not finite at {where}; replace NaN and infinity first, "
                    "for example with torch.nan_to_num"
                )

    def select(self, index: int) -> Tokens:
        """Item `index` along the first leading dimension."""
        return Tokens(
            x=self.x[index],
            attn=None if self.attn is None else self.attn[index],
            query=None if self.query is None else self.query[index],
            grid=self.grid,
            signals={name: value[index] for name, value in self.signals.items()},
        )


# Fields that are signals, found once: policies ask for some in every layer.
_TENSORS = {each.name for each in fields(Tokens)} - {"signals", "grid"}


def all_finite(values: Tensor) -> bool:
    """Return True if no value is NaN or infinite, 20 times faster than `torch.isfinite`."""
    if values.dtype in (torch.float32, torch.float64) and bool(torch.isfinite(values.sum())):
        return True  # either would spoil the sum, the fastest test, which alone may overflow
    low, high = values.aminmax()  # either shows in the extremes
    return bool(torch.isfinite(low) & torch.isfinite(high))


def follow(tokens: Tokens, reduction: Reduction) -> Tokens:
    """Return the tokens that the next stage reads.

    Features and wide signals are combined; signals of one number per token, and integers such as
    tile or image numbers, follow the kept sources; signals named `text_*` belong to the question
    and stay. `grid` is dropped unless all tokens are left, since a raster with holes has none;
    `place` still holds the place of each token.
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
    """Return signals by name after a reduction; see `follow`."""
    return {name: _one(name, value, reduction) for name, value in signals.items()}


def _one(name: str, value: Tensor, reduction: Reduction) -> Tensor:
    keep = reduction.keep
    if name.startswith("text_"):
        return value
    if value.ndim == keep.ndim:  # [..., N]
        return value.gather(-1, keep)
    if not value.is_floating_point() or reduction.vectors is not None:
        return gather_rows(value, keep)  # [..., N, d] of integers; vectors are features alone
    return reduction.apply(value)
