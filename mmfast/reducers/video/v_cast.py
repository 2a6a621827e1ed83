"""V-CAST: more tokens for the frames at which a video turns, the unusual ones of each frame."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, rescale, share_out, snap
from mmfast.ops.similarity import paired_cosine, unit_rows


@register("v_cast", paper="2603.27650", temporal=True)
def v_cast(tokens: Tokens, budget: int, *, temperature: float = 0.7) -> Reduction:
    """Share the budget by the curvature of the video, and keep the unusual tokens of each frame.

    Lin et al., 2026: the mean features of the frames are a path, whose curvature at a frame is one
    minus the cosine of the steps to it and from it, and 1 at both ends. A frame gets one token and
    a part of the rest by the softmax of curvature; in a frame those tokens stay that differ most
    from its mean and are longest, both in equal parts. The reference gives all tokens that its
    rounding leaves over to one frame.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame.
        budget: Tokens to keep; ties go to the lowest index.
        temperature: Temperature of the softmax, above 0: low ones prefer the turns more.
    """
    if temperature <= 0:
        raise SpecError(
            f"knob temperature={temperature} of 'v_cast' is not above 0; the paper has 0.7"
        )
    frames = 1 if tokens.grid is None else tokens.grid[0]
    video = tokens.x.unflatten(-2, (frames, -1)).double()  # [..., T, n, D]
    n, mean = video.shape[-2], unit_rows(video.mean(-2))  # [..., T, D]
    least = torch.full((frames,), int(budget >= frames), device=mean.device)
    weight = (_curvature(mean) / temperature).softmax(-1)
    counts = least + share_out(weight, budget - int(least.sum()), n - least)
    apart = 1 - paired_cosine(video, mean[..., None, :].expand_as(video))
    score = snap(apart + rescale(torch.linalg.vector_norm(video, dim=-1)))
    frame = torch.arange(tokens.n, device=mean.device) // n
    return Reduction.prune(marked(grouped_topk(score.flatten(-2), frame, counts)), tokens.n)


def _curvature(path: Tensor) -> Tensor:
    """Curvature `[..., T]` of a path of unit vectors `[..., T, D]`."""
    if path.shape[-2] < 3:
        return torch.ones_like(path[..., 0])
    step = path.diff(dim=-2)
    turn = 1 - paired_cosine(step[..., :-1, :], step[..., 1:, :])
    return F.pad(snap(turn), (1, 1), value=1.0)
