"""DyCoke: of every four frames one is whole, the others keep what changed."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, share_out, snap
from mmfast.ops.similarity import paired_cosine
from mmfast.ops.video import spatial_novelty


@register("dycoke", paper="2411.15024", adaptive=True, temporal=True)
def dycoke(
    tokens: Tokens, budget: int | None, *, ratio: float = 0.7, parity: bool = False
) -> Reduction:
    """Keep every fourth frame whole and of the others the tokens that changed most.

    Second and fourth of each four frames are compared with the frame before, the third with the
    first, token by token (Tao et al., CVPR 2025). A budget is shared out in the paper's proportion
    of 1 to `1 - ratio`; a frame that would get more than it has leaves the rest to the others.
    Where whole frames do not fit, they keep tokens that differ from the whole frame before, and the
    first one those that differ from the token on their left and above.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame.
        budget: Tokens to keep; None keeps the paper's own counts.
        ratio: Share of a compared frame that is dropped, 0 to 1.
        parity: As the reference: no budget, an odd last frame disappears, the third frame of the
            last four stays whole, compared frames are emitted by change. More than 4 frames.
    """
    frames, rows, columns = tokens.grid or (1, 1, tokens.n)
    if not 0.0 <= ratio <= 1.0:
        raise SpecError(f"knob ratio={ratio} of 'dycoke' is no share; choose one from 0 to 1")
    if parity and (budget is not None or frames <= 4):
        raise SpecError(
            f"'dycoke' with parity=true got budget {budget} and {frames} frames; "
            "it takes no budget (write 'dycoke?parity=true') and more than 4 frames"
        )
    change = snap(_changes(tokens.x, frames, rows, columns))  # [..., T, n]
    frame = torch.arange(frames)
    whole = (frame % 4 == 0) | (parity & (frame % 4 == 2) & (frame >= frames - 2))  # not compared
    counts = _counts(whole, rows * columns, budget, ratio).to(change.device)
    if parity and frames % 2:
        counts[-1] = 0
    frame = torch.arange(tokens.n, device=change.device) // (rows * columns)
    keep = marked(grouped_topk(change.flatten(-2), frame, counts))
    pruned = Reduction.prune(keep, tokens.n)
    return replace(pruned, order=_emission(keep, change, whole)) if parity else pruned


def _changes(x: Tensor, frames: int, rows: int, columns: int) -> Tensor:
    """One minus the cosine of every token with the one it is compared to, `[..., T, n]`."""
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    change = torch.empty(video.shape[:-1], dtype=torch.float64, device=x.device)
    change[..., 0, :] = spatial_novelty(video[..., 0, :, :], rows, columns)
    # Every second frame with the one before, every fourth from the third on with the one two
    # before, and whole ones with the whole one before.
    for start, step, back in ((1, 2, 1), (2, 4, 2), (4, 4, 4)):
        now = video[..., start::step, :, :]
        before = video[..., start - back : frames - back : step, :, :]
        change[..., start::step, :] = 1.0 - paired_cosine(now, before)
    return change


def _counts(whole: Tensor, n: int, budget: int | None, ratio: float) -> Tensor:
    """Tokens that each frame keeps, `[T]`."""
    if budget is not None:
        weights = 1.0 - ratio * (~whole).double()
        return share_out(weights, budget, torch.full(whole.shape, n))
    return torch.where(whole, n, int((1 - ratio) * n))  # cut in double precision


def _emission(keep: Tensor, change: Tensor, whole: Tensor) -> Tensor:
    """Slots frame by frame: whole frames in place order, the others from most changed to least."""
    n = change.shape[-1]
    placed = whole.to(keep.device)[keep // n]
    moved = change.flatten(-2).gather(-1, keep).masked_fill(placed, torch.inf)
    best = moved.sort(dim=-1, descending=True, stable=True).indices
    by_frame = (keep // n).gather(-1, best).sort(dim=-1, stable=True).indices
    return best.gather(-1, by_frame)
