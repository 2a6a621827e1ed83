"""What this device was measured to take, and how that goes on between and beyond the points."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Point = tuple[float, float]  # (amount of work, milliseconds)


@dataclass(frozen=True)
class Rates:
    """Milliseconds by amount of work, for one model shape on one device.

    Attributes:
        linear: (tokens, ms) of a decoder layer without its attention.
        attention: (tokens, ms) of causal attention in a decoder layer.
        head: ms of one row of logits.
        encode: (numbers of pixels, ms) of the encoder with its projector.
        signal: (numbers of pixels, ms) of reading one attention signal in the encoder.
        select: ms of choosing, by `method:tokens`.
        overhead: ms beside all that, by kind of call, of stock calls and of reduced ones.
    """

    linear: tuple[Point, ...] = ()
    attention: tuple[Point, ...] = ()
    head: float = 0.0
    encode: tuple[Point, ...] = ()
    signal: tuple[Point, ...] = ()
    select: Mapping[str, float] = field(default_factory=dict)
    overhead: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    def gain(self, **found: Any) -> Rates:
        """A copy with more measured: points are added, tables joined."""
        changed: dict[str, Any] = {}
        for name, value in found.items():
            old = getattr(self, name)
            if isinstance(old, tuple):
                value = tuple(sorted({**dict(old), **dict(value)}.items()))
            elif isinstance(old, Mapping):
                value = {**old, **value}
            changed[name] = value
        return replace(self, **changed)


def from_dict(values: Mapping[str, Any]) -> Rates:
    """What `to_dict` made.

    Raises:
        ValueError: Something is no finite time.
        KeyError: Something is missing.
        TypeError: Something is of another type.
    """
    curves = {
        name: tuple((_time(n), _time(ms)) for n, ms in values[name])
        for name in ("linear", "attention", "encode", "signal")
    }
    select = {str(k): _time(v) for k, v in values["select"].items()}
    overhead = {str(k): (_finite(a), _finite(b)) for k, (a, b) in values["overhead"].items()}
    return Rates(**curves, head=_time(values["head"]), select=select, overhead=overhead)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is no time")
    return number


def _time(value: Any) -> float:
    number = _finite(value)
    if number < 0:
        raise ValueError(f"{value!r} is no time")
    return number


def at(points: Sequence[Point], amount: float, power: float = 1.0) -> float:
    """Milliseconds at an amount of work.

    Between two points time runs straight in `amount ** power`; beyond the last one it grows like
    `amount ** power`; below the first it is that of the first, since a call has a floor.
    """
    if not points or amount <= 0:
        return 0.0
    sizes = [size for size, _ in points]
    place = bisect_left(sizes, amount)
    if place == 0:
        return points[0][1]
    if place == len(points):
        size, ms = points[-1]
        return float(ms * (amount / size) ** power)
    (low, before), (high, after) = points[place - 1 : place + 1]
    share = (amount**power - low**power) / (high**power - low**power)
    return float(before + (after - before) * share)
