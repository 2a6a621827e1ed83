"""Differential token drop: keep tokens that changed since the last one kept at their place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, one_by_one, share_out, snap, stable_topk
from mmfast.ops.similarity import paired_cosine
from mmfast.ops.video import SinceKept, first_frame, temporal_cosine


def stream_dtd(
    tokens: Tokens,
    budget: int | None,
    state: Mapping[str, Tensor] | None,
    *,
    threshold: float = 0.1,
    parity: bool = False,
) -> tuple[Reduction, dict[str, Tensor]]:
    """One frame of a stream; the state is the last token kept at every place.

    A place of which nothing was kept yet has a change of 1. What a small budget leaves out of the
    first frame, or of a new scene, therefore comes with the frames that follow. Without a budget a
    frame keeps every change above `threshold`; another raster starts anew. With `parity` the state
    is the frame before.
    """
    grid = tokens.grid or (1, 1, tokens.n)
    rows, columns = grid[1:]
    raster = tokens.x.detach().reshape(rows, columns, -1)  # [r, c, D]
    kept = None if state is None else state["kept"]
    if kept is None or kept.shape != raster.shape:
        kept = torch.zeros_like(raster)
        count = tokens.n if budget is None else budget
        keep = first_frame(tokens.x, grid, count)
    else:
        kept = kept.to(raster)
        change = snap(1.0 - paired_cosine(kept, raster)).flatten()  # [n]
        count = int((change > threshold).sum()) if budget is None else budget
        keep = stable_topk(change, count)
    flat = raster.flatten(0, 1)
    if not parity:
        flat = kept.flatten(0, 1).index_copy(0, keep, flat[keep])
    return Reduction.prune(keep, tokens.n), {"kept": flat.reshape(raster.shape)}


@register("dtd", paper="2504.17343", adaptive=True, temporal=True, stream=stream_dtd)
def dtd(
    tokens: Tokens, budget: int | None, *, threshold: float = 0.1, parity: bool = False
) -> Reduction:
    """Keep the first frame, and later tokens that differ from the last one kept at their place.

    A slow change is kept once it has added up, where a comparison with the previous frame never
    sees it, and nothing but the last kept tokens has to be remembered of a stream. Dropping by
    difference is Yao et al. (TimeChat-Online, 2025), made for a stream of frames; the last kept
    token as the reference, and an exact budget, are choices of this project.

    With a budget the threshold is the one at which the rule keeps just as many, found by bisection;
    the surplus is dropped where the change is smallest. A budget below one frame is shared
    between first and later frames as in `evs`; later frames still compare with all of the first.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame of one row.
        budget: Tokens to keep; None keeps the first frame and every change above `threshold`.
        threshold: Smallest change that counts, one minus cosine, 0 to 2, without a budget.
        parity: Compare with the frame before, as the authors' code does; with a budget every later
            frame then keeps equally many.
    """
    return one_by_one(lambda item: _drop(item, budget, threshold, parity), tokens)


def _drop(item: Tokens, budget: int | None, threshold: float, parity: bool) -> Reduction:
    grid = item.grid or (1, 1, item.n)
    n = grid[1] * grid[2]
    first = first_frame(item.x, grid, item.n if budget is None else budget)
    later = None if budget is None else budget - len(first)
    if parity:
        changed = n + _since_before(item.x, grid[0], later, threshold)
        return Reduction.prune(torch.cat([first, changed]), item.n)
    video = SinceKept(item.x, grid[0])
    if later is not None:
        threshold = video.tuned(later)
    change = torch.from_numpy(video.changes(threshold)).flatten()
    change[change <= threshold] = -torch.inf
    count = int((change > threshold).sum()) if later is None else later
    kept = n + stable_topk(change, count).to(first.device)
    return Reduction.prune(torch.cat([first, kept]), item.n)


def _since_before(x: Tensor, frames: int, count: int | None, threshold: float) -> Tensor:
    """Places of tokens `[N, D]` behind the first frame that differ from the frame before."""
    change = snap(1.0 - temporal_cosine(x.detach(), frames).double())  # [T - 1, n]
    if count is None:
        return marked(change.flatten() > threshold)
    rest, n = change.shape
    number = torch.arange(rest, device=x.device)
    caps = torch.full((rest,), n, device=x.device)
    shares = share_out(torch.ones_like(caps), count, caps)
    return marked(grouped_topk(change.flatten(), number.repeat_interleave(n), shares))
