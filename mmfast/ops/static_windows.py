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
    static = _static_counts(alike.cpu().numpy())
    frames = len(static)
    best = np.zeros(frames + 1, dtype=np.int64)  # best[i]: tokens saved in the first i frames
    width = np.ones(frames + 1, dtype=np.int64)  # frames in the segment that ends there
    for end in range(1, frames + 1):
        best[end] = best[end - 1]
        spans = np.arange(2, min(end, longest) + 1)
        if len(spans):
            gains = best[end - spans] + static[end - spans, spans - 1] * (spans - 1)
            pick = int(gains.argmax())  # the first maximum: the shortest window
            if gains[pick] > best[end]:
                best[end], width[end] = gains[pick], spans[pick]
    segments: list[Segment] = []
    end = frames
    while end:
        segments.append((int(end - width[end]), int(end - 1)))
        end -= int(width[end])
    return segments[::-1], int(best[frames])


def _static_counts(alike: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Entry (s, k): places that stay alike for at least `k` steps from frame `s`; `[T, T]`."""
    frames = len(alike) + 1
    run = np.zeros(alike.shape[1], dtype=np.int64)
    counts = np.zeros((frames, frames), dtype=np.int64)
    for start in range(frames - 2, -1, -1):
        run = (run + 1) * alike[start]
        histogram = np.bincount(run, minlength=frames)
        counts[start] = histogram[::-1].cumsum()[::-1]
    return counts


def static_places(alike: Tensor, segment: Segment) -> Tensor:
    """Places `[n]` that are static in a segment; none in a single frame."""
    first, last = segment
    if first == last:
        return torch.zeros(alike.shape[-1], dtype=torch.bool, device=alike.device)
    return alike[first:last].all(0)
