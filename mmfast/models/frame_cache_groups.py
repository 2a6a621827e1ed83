"""Which of the chosen rows of a pass attend to the same keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

Group = tuple[slice, int, slice]  # chosen rows, the frame they lie in, their keys in that frame


def groups(rows: Tensor, sizes: Sequence[int], ends: Tensor) -> list[Group]:
    """Chosen rows by segment: frame, tile or window; segments without any are left out.

    Args:
        rows: `[K]` ascending among the rows of all frames.
        sizes: Rows of each frame.
        ends: `[W + 1]` int64 where segments begin and end, none of them across two frames.
    """
    begins = list(accumulate(sizes, initial=0))
    cuts = torch.searchsorted(rows.cpu(), ends).tolist()
    found: list[Group] = []
    for (start, stop), (low, high) in zip(pairwise(ends.tolist()), pairwise(cuts), strict=True):
        frame = bisect_right(begins, start) - 1
        if high > low:
            inside = slice(start - begins[frame], stop - begins[frame])
            found.append((slice(low, high), frame, inside))
    return found
