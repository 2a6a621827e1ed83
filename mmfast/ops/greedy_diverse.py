"""Greedy choice of tokens that score high and do not resemble each other."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmfast.ops.cosine_table import cosine_table


def greedy_diverse(
    score: Tensor, x: Tensor, count: int, balance: float, start: Tensor | None = None
) -> Tensor:
    """Pick `count` rows, each with the best score less its likeness to the picks before it.

    A row's worth is `balance * score - (1 - balance) * likeness`, the likeness being its largest
    cosine with a pick. The first pick has the best score; ties go to the lowest index.

    Args:
        score: `[N]`, of the order of a cosine: see `rescale`.
        x: `[N, D]`.
        count: Number of picks, at most N.
        balance: From 0, unlike tokens only, to 1, high scores only.
        start: Rows that are picked beforehand, at most `count`.

    Returns:
        `[count]` int64 in the order of picking, `start` in front.
    """
    table = cosine_table(x, x).cpu().numpy()
    own = balance * score.double().cpu().numpy()
    likeness = np.full(len(own), -1.0)
    free = np.zeros(len(own))  # -inf once picked
    picks: list[int] = [] if start is None else start.tolist()
    for pick in picks:
        np.maximum(likeness, table[pick], out=likeness)
        free[pick] = -np.inf
    while len(picks) < count:
        pick = int((own - (1 - balance) * likeness + free).argmax())
        picks.append(pick)
        np.maximum(likeness, table[pick], out=likeness)
        free[pick] = -np.inf
    return torch.tensor(picks, dtype=torch.int64, device=x.device)
