"""Cut a video where adjacent frames differ."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.paired_cosine import paired_cosine
from mmfast.ops.ranking import stable_topk
from mmfast.ops.snap import snap


def shots(video: Tensor, least: int, tau: float) -> list[tuple[int, int]]:
    """Segments between the least similar adjacent frames and wherever they fall below `tau`.

    Args:
        video: `[T, n, D]`; a frame is compared by its mean token.
        least: Number of segments to cut at least, at most T count.
        tau: Adjacent frames below this cosine are always cut.

    Returns:
        First and last frame of each segment, in order.
    """
    frames = _mean_tokens(video)  # [T, D]
    alike = snap(paired_cosine(frames[:-1], frames[1:]))  # [T - 1]
    cut = alike < tau
    cut[stable_topk(-alike, min(max(least, 1), len(frames)) - 1)] = True
    last = [*torch.nonzero(cut)[:, 0].tolist(), len(frames) - 1]
    return list(zip([0, *(end + 1 for end in last[:-1])], last, strict=True))


def _mean_tokens(video: Tensor) -> Tensor:
    """Mean token of each frame, `[T, D]` float64."""
    if video.device.type != "cpu":
        return video.double().mean(1)
    return torch.stack([frame.double().mean(0) for frame in video])
