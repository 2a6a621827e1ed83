"""Differential token drop: keep what changed since the last token kept at its place."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.first_frame import first_frame
from mmfast.ops.one_by_one import one_by_one
from mmfast.ops.ranking import stable_topk
from mmfast.ops.since_kept import SinceKept


@register("dtd", paper="2504.17343", adaptive=True)
def dtd(tokens: Tokens, budget: int | None, *, threshold: float = 0.1) -> Reduction:
    """Keep the first frame, and later tokens that differ from the last one kept at their place.

    A slow change is kept once it has added up, where a comparison with the previous frame never
    sees it, and nothing but the last kept tokens has to be remembered of a stream. Dropping by
    difference is Yao et al. (TimeChat-Online, 2025), made for a stream of frames; the last kept
    token as the reference, and an exact budget, are choices of this project.

    With a budget the threshold is the one at which the rule keeps just as many, found by bisection;
    what is then too much goes where the change is smallest. A budget below one frame is shared
    between first and later frames as in `evs`; later frames still compare with all of the first.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame of one row.
        budget: Tokens to keep; None keeps the first frame and every change above `threshold`.
        threshold: Smallest change that counts, one minus cosine, 0 to 2, without a budget.
    """
    return one_by_one(lambda item: _drop(item, budget, threshold), tokens)


def _drop(item: Tokens, budget: int | None, threshold: float) -> Reduction:
    grid = item.grid or (1, 1, item.n)
    n = grid[1] * grid[2]
    video = SinceKept(item.x, grid[0])
    first = first_frame(item.x, grid, item.n if budget is None else budget)
    later = None if budget is None else budget - len(first)
    if later is not None:
        threshold = video.tuned(later)
    change = torch.from_numpy(video.changes(threshold)).flatten()
    change[change <= threshold] = -torch.inf
    count = int((change > threshold).sum()) if later is None else later
    kept = n + stable_topk(change, count).to(first.device)
    return Reduction.prune(torch.cat([first, kept]), item.n)
