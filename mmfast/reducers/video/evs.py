"""EVS, efficient video sampling: drop the tokens that repeat the previous frame."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import one_by_one, stable_topk
from mmfast.ops.similarity import paired_cosine
from mmfast.ops.video import (
    ABOVE,
    BEFORE,
    LEFT,
    first_frame,
    likeness,
    raster_links,
    temporal_cosine,
)


def stream_evs(
    tokens: Tokens,
    budget: int | None,
    state: Mapping[str, Tensor] | None,
    *,
    threshold: float = 0.1,
    parity: bool = False,
    q: float | None = None,
) -> tuple[Reduction, dict[str, Tensor]]:
    """One frame of a stream; the state is the frame before, and another raster starts anew.

    The budget counts for this frame, the first one included; without one a frame keeps every change
    above `threshold`, and the first frame is whole. `parity` and `q` are refused in a stream.
    """
    if parity or q is not None:
        raise SpecError(
            "knobs parity and q of 'evs' count over a whole video; a stream takes a share of "
            "every frame, such as 'evs:0.25'"
        )
    grid = tokens.grid or (1, 1, tokens.n)
    rows, columns = grid[1:]
    raster = tokens.x.detach().reshape(rows, columns, -1)  # [r, c, D]
    before = None if state is None else state["before"]
    if before is None or before.shape != raster.shape:
        keep = first_frame(tokens.x, grid, tokens.n if budget is None else budget)
    else:
        change = 1.0 - paired_cosine(before.to(raster), raster).flatten()  # [n]
        count = int((change > threshold).sum()) if budget is None else budget
        keep = stable_topk(change, count)
    return Reduction.prune(keep, tokens.n), {"before": raster.clone()}


@register("evs", paper="2510.14624", adaptive=True, temporal=True, stream=stream_evs)
def evs(
    tokens: Tokens,
    budget: int | None,
    *,
    threshold: float = 0.1,
    parity: bool = False,
    q: float | None = None,
) -> Reduction:
    """Keep the first frame and the tokens that changed most since the previous frame.

    Change is one minus the cosine with the token at the same place in the previous frame
    (Bagrov et al., 2025). A budget below one frame cannot hold the first frame: then a quarter of
    it (rounded up) goes to the first frame, to the tokens least like both the token on their left
    and the one above, and the rest to the changes of the later frames.

    Args:
        tokens: `x` of shape `[..., N, D]`. Without a `grid`, `place` tells where tokens lie in a
            raster with holes: change is measured where the previous frame has a token at that
            place, and a token without one is new; without either it is one frame of one row.
        budget: Tokens to keep; None keeps the first frame and every change above `threshold`.
        threshold: Smallest change that counts, 0 to 2, without a budget.
        parity: Count as the reference does: the first frame is always whole, and with `q` the
            budget is `int(N * (1 - q))` in double precision.
        q: Pruning rate of the reference; needs `parity=true` and no budget.
    """
    if tokens.grid is None and tokens.has("place") and not parity and q is None:
        return one_by_one(lambda item: _with_holes(item, budget, threshold), tokens)
    frames, rows, columns = tokens.grid or (1, 1, tokens.n)
    n = rows * columns
    change = 1.0 - temporal_cosine(tokens.x, frames).flatten(-2)  # [..., (T - 1) * n]
    if parity:
        budget = max(n, _literal_count(tokens.n, budget, q))
    elif q is not None:
        raise SpecError(f"knob q={q} of 'evs' is the reference's count; add parity=true")
    if budget is None:
        budget = n + int((change > threshold).sum())  # run() hands over one item at a time
    first = first_frame(tokens.x, (frames, rows, columns), budget)
    later = n + stable_topk(change, budget - first.shape[-1])
    return Reduction.prune(torch.cat([first, later], dim=-1), tokens.n)


def _with_holes(tokens: Tokens, budget: int | None, threshold: float) -> Reduction:
    """Choose where some places have no token."""
    change = 1.0 - likeness(tokens.x, raster_links(tokens, BEFORE))  # [N], infinite if new
    time = tokens.need("place")[:, 0]
    first = (time == time.min()).nonzero()[:, 0]
    later = (time > time.min()).nonzero()[:, 0]
    if budget is None:
        budget = len(first) + int((change[later] > threshold).sum())
    if budget < len(first):
        share = budget if not len(later) else max((budget + 3) // 4, budget - len(later))
        left, above = (likeness(tokens.x, raster_links(tokens, step)) for step in (LEFT, ABOVE))
        novelty = 1.0 - torch.maximum(left, above)[first]
        first = first[stable_topk(novelty, share)]
    later = later[stable_topk(change[later], budget - len(first))]
    return Reduction.prune(torch.cat([first, later]), tokens.n)


def _literal_count(total: int, budget: int | None, q: float | None) -> int:
    """The reference's count; the product is cut in double precision, so 0.9 of 20 leaves 1."""
    if budget is not None and q is None:
        return budget
    if budget is None and q is not None and 0.0 <= q <= 1.0:
        return int(total * (1 - q))
    raise SpecError(f"'evs' with parity=true got q={q}; give either a budget or a q in [0, 1]")
