"""Change of each token since the last token kept at its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.ops.snap import ROUNDING, snap
from mmfast.ops.unit import unit_rows

_CHUNK = 1 << 19  # float64 numbers of a temporary on the host, 4 MB
Floats = NDArray[np.floating[Any]]


class SinceKept:
    """A video whose tokens are kept where they differ from the last one kept at their place.

    The first frame is kept. All pairs of frames are compared beforehand, `T * N` numbers, so that
    many thresholds can be tried.
    """

    def __init__(self, x: Tensor, frames: int) -> None:
        """`x` is `[N, D]`, frame after frame."""
        places = x.detach().unflatten(0, (frames, -1)).transpose(0, 1)  # [n, T, D]
        self._change: Floats = _changes(places).cpu().numpy()  # [n, T, T]

    def changes(self, threshold: float) -> Floats:
        """Change of every later token since the last one kept, `[T - 1, n]` float64.

        Args:
            threshold: A token whose change is above it is kept, and the next is compared with it.
        """
        n, frames, _ = self._change.shape
        place, last = np.arange(n), np.zeros(n, dtype=np.int64)
        seen = np.empty((frames - 1, n))
        for t in range(1, frames):
            seen[t - 1] = self._change[place, last, t]
            last[seen[t - 1] > threshold] = t
        return seen

    def tuned(self, count: int) -> float:
        """The threshold, by bisection, at which just `count` later tokens are kept.

        It keeps at least `count`, and the next higher multiple of 2^-30 fewer; with a threshold of
        -1 or less everything is kept.
        """
        low, high = -round(1 / ROUNDING), round(2 / ROUNDING)  # nothing is above 2
        while high - low > 1:
            middle = (low + high) // 2
            if int((self.changes(middle * ROUNDING) > middle * ROUNDING).sum()) >= count:
                low = middle
            else:
                high = middle
        return low * ROUNDING


def _changes(places: Tensor) -> Tensor:
    """One minus the cosine of every two frames, of each place of `[n, T, D]`: `[n, T, T]`."""
    n, frames, width = places.shape
    few = n if places.is_cuda else max(1, _CHUNK // max(1, frames * width))
    change = places.new_empty(n, frames, frames, dtype=torch.float64)
    for spot in range(0, n, max(1, few)):
        rows = unit_rows(places[spot : spot + few].double())
        change[spot : spot + few] = 1.0 - snap(rows @ rows.transpose(-1, -2))
    return change
