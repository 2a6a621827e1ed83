"""Cut a video into windows of frames that share the most static places."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Segment = tuple[int, int]  # first and last frame


def static_windows(alike: Tensor, longest: int) -> tuple[list[Segment], int]:
    """Maximise the tokens saved when static places of a window are kept once.

    A place is static in frames a..b if it is alike in all steps between them. A window saves
    `static places * (b - a)` tokens. On ties no window wins, then the shortest.

    Args:
        alike: `[T - 1, n]` bool, whether the token at a place resembles the one a frame later.
        longest: Most frames in a window.

    Returns:
        Segments that cover all frames in order (single frames included), and the tokens saved.
    """
    saved = _tokens_saved(alike.cpu().numpy())
    frames = len(saved)
    best = np.zeros(frames + 1, dtype=np.int64)  # best[i]: tokens saved in the first i frames
    start = list(range(frames))  # of the segment that ends with a frame
    for last in range(1, frames):
        best[last + 1] = best[last]
        low = max(0, last + 1 - longest)
        gains = best[low:last] + saved[last, low:last]
        if low < last:
            shortest = last - 1 - int(gains[::-1].argmax())
            if gains[shortest - low] > best[last]:
                best[last + 1], start[last] = gains[shortest - low], shortest
    segments: list[Segment] = []
    last = frames - 1
    while last >= 0:
        segments.append((start[last], last))
        last = start[last] - 1
    return segments[::-1], int(best[frames])


def _tokens_saved(alike: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Entry (b, a): tokens that a window of frames a..b saves, 0 unless a < b; `[T, T]`."""
    frames, n = len(alike) + 1, alike.shape[1]
    frame = np.arange(frames)
    # Where a place changes next: it is static in every window that ends there or before.
    change = np.full((frames, n), frames - 1)
    change[:-1] = np.where(alike, frames - 1, frame[:-1, None])
    until = np.minimum.accumulate(change[::-1], axis=0)[::-1]
    spots = np.bincount((frame[:, None] * frames + until).ravel(), minlength=frames * frames)
    static = spots.reshape(frames, frames)[:, ::-1].cumsum(axis=1)[:, ::-1]  # [a, b]
    saved: NDArray[np.int64] = np.ascontiguousarray(static.T)
    saved *= np.maximum(frame[:, None] - frame, 0)
    return saved


def static_places(alike: Tensor, segment: Segment) -> Tensor:
    """Places `[n]` that are static in a segment; none in a single frame."""
    first, last = segment
    if first == last:
        return torch.zeros(alike.shape[-1], dtype=torch.bool, device=alike.device)
    return alike[first:last].all(0)
