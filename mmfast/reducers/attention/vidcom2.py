"""VidCom2: more tokens for unusual frames, and in each frame its unusual tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, share_out, snap
from mmfast.ops.similarity import sum_of, unit_rows
from mmfast.ops.video import closeness, parts, steady_channels, take_channels

_TEMPERATURE = 0.01


@register("vidcom2", paper="2505.14454", adaptive=True, temporal=True)
def vidcom2(tokens: Tokens, budget: int | None, *, ratio: float = 0.25) -> Reduction:
    """Keep the tokens least like their video and frame, more of them in frames that stand out.

    Closeness is a sum of Gaussian kernels over the half of the channels that vary least (Liu et
    al., EMNLP 2025). The paper rounds every frame's share by itself, so its total drifts; with a
    budget the shares are rounded together and the total is exact.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame.
        budget: Tokens to keep; None takes the paper's own counts for `ratio`.
        ratio: Share to keep without a budget.
    """
    frames = 1 if tokens.grid is None else tokens.grid[0]
    n = tokens.n // frames
    score, unusual = video_scores(tokens.x, frames)
    if budget is None:
        counts = (frame_shares(unusual, ratio) * n).round().clamp_min(1).long()
    else:
        caps = torch.full((frames,), n, device=unusual.device)
        counts = share_out(frame_shares(unusual, budget / tokens.n), budget, caps)
    frame = torch.arange(tokens.n, device=score.device) // n
    return Reduction.prune(marked(grouped_topk(-score.flatten(-2), frame, counts)), tokens.n)


def video_scores(x: Tensor, frames: int) -> tuple[Tensor, Tensor]:
    """Closeness of tokens to video and frame `[..., T, n]`, and distance of frames `[..., T]`."""
    slim = take_channels(x, steady_channels(x, max(1, x.shape[-1] // 2)))
    n = slim.shape[-2] // frames
    sums = (unit_rows(part.double()).sum(-2, keepdim=True) for part in parts(slim))
    mean = (sum_of(sums) / slim.shape[-2])[..., None, :, :]  # [..., 1, 1, C]
    near_video, near_frame = [], []
    for part in parts(slim, n):
        video = unit_rows(part.double()).unflatten(-2, (-1, n))  # [..., some frames, n, C]
        near_video.append(closeness(video, mean))
        near_frame.append(closeness(video, video.mean(-2, keepdim=True)))
    to_video = torch.cat(near_video, -2)
    return snap(to_video + torch.cat(near_frame, -2)), snap(-to_video.mean(-1))


def frame_shares(unusual: Tensor, ratio: float) -> Tensor:
    """Share of its tokens that each frame keeps, `[..., T]`: `ratio` on average, at most 1."""
    weight = (unusual / _TEMPERATURE).softmax(-1)
    return (ratio * (1 + weight - weight.mean(-1, keepdim=True))).clamp(max=1)
