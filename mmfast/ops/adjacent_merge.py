"""Merge neighbours of a sequence into runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.ops.paired_cosine import paired_cosine
from mmfast.ops.snap import snap

Integers = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def adjacent_merge(metric: Tensor, budget: int | None, threshold: float) -> Reduction:
    """Merge similar neighbours, round after round, until `budget` runs are left.

    In a round runs at even places join the more similar of their two neighbours (the one before
    them on ties), the most similar pairs first, ties to the lowest place.

    Args:
        metric: `[N, d]` features to compare; a run has the mean of its tokens.
        budget: Runs to leave; None merges whatever is above `threshold`.
        threshold: Cosine above which neighbours merge, without a budget.

    Returns:
        A Reduction onto means of whole runs, each at the place of its middle token.
    """
    wide = metric.double()
    total = torch.cat([wide.new_zeros(1, wide.shape[1]), wide.cumsum(0)])  # sums before each token
    starts = np.arange(len(wide))  # first token of each run
    while len(starts) > (budget or 1):
        ends = torch.from_numpy(np.append(starts, len(wide))).to(total.device)
        sums = total[ends].diff(dim=0)
        alike = snap(paired_cosine(sums[:-1], sums[1:])).cpu().numpy()  # run i with run i + 1
        gone = _joined(alike, None if budget is None else len(starts) - budget, threshold)
        if not len(gone):
            break
        starts = np.delete(starts, gone)
    return _runs(starts, len(wide), metric.device)


def _joined(alike: Floats, most: int | None, threshold: float) -> Integers:
    """Runs that start no more: those of `alike` `[R - 1]` on the right of a merged border."""
    padded = np.concatenate([[-np.inf], alike, [-np.inf]])
    before, after = padded[:-1:2], padded[1::2]  # cosine of even runs with their two neighbours
    best = np.maximum(before, after)
    order = np.argsort(-best, kind="stable")
    even = order[: int((best > threshold).sum()) if most is None else most]
    return np.where(before[even] >= after[even], 2 * even, 2 * even + 1)


def _runs(starts: Integers, n: int, device: torch.device) -> Reduction:
    """Runs of tokens `[start, next start)` as means."""
    ends = np.append(starts[1:], n)
    middle = torch.from_numpy((starts + ends - 1) // 2).to(device)
    lengths = torch.from_numpy(ends - starts).to(device)
    return Reduction.merge(middle, middle.repeat_interleave(lengths))
