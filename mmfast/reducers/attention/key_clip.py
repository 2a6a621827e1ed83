"""Key clips: retrieve the parts of a video that the question needs, then compress them."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.max_min import max_min
from mmfast.ops.ranking import one_by_one, share_out
from mmfast.ops.similarity import relevance
from mmfast.ops.video import shots


@register("key_clip", paper="2510.07915", needs=("x", "query"), temporal=True)
def key_clip(tokens: Tokens, budget: int, *, clips: float = 0.5, tau: float = 0.9) -> Reduction:
    """Cut a video into clips, give the budget to those the question is about, and thin them out.

    Retrieve, then compress, as MARC does (Wu et al., ICLR 2026) with a trained event detector, an
    embedding model and a student taught by reinforcement learning. This project's version is free
    of training (`mmfast.compressors.train --reduce` makes students): clips end where adjacent
    frames differ, a clip is as relevant as the mean of its frames, and in each clip the tokens
    farthest apart stay.

    Args:
        tokens: `x` `[..., N, D]` and `query` `[..., T, D]`; without a `grid` it is one frame.
        budget: Tokens to keep; shared among the retrieved clips by size.
        clips: Share of the frames to retrieve at least, in (0, 1]; more where the budget needs it.
        tau: Adjacent frames whose cosine is below it are in different clips; there are at least a
            quarter as many clips as frames.
    """
    return one_by_one(lambda item: _prune(item, budget, clips, tau), tokens)


def _prune(item: Tokens, budget: int, clips: float, tau: float) -> Reduction:
    frames = 1 if item.grid is None else item.grid[0]
    n = item.n // frames
    video = item.x.unflatten(0, (frames, n))
    parts = shots(video, -(-frames // 4), tau)
    frame = relevance(video.mean(1, dtype=torch.float64), item.need("query"))  # [T]
    score = [float(frame[a : b + 1].mean()) for a, b in parts]
    order = sorted(range(len(parts)), key=lambda i: (-score[i], i))
    chosen: list[int] = []
    held = 0
    while held < max(budget, clips * item.n):
        chosen.append(order[len(chosen)])
        held += (parts[chosen[-1]][1] - parts[chosen[-1]][0] + 1) * n
    sizes = torch.tensor([(parts[i][1] - parts[i][0] + 1) * n for i in chosen])
    counts = share_out(sizes, budget, sizes).tolist()
    picks = [
        parts[i][0] * n + max_min(video[parts[i][0] : parts[i][1] + 1].flatten(0, 1), count)
        for i, count in zip(chosen, counts, strict=True)
        if count
    ]
    return Reduction.prune(torch.cat(picks), item.n)
