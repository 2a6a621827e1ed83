"""LiveVLM: vision sinks and, in buckets of the timeline, what other visual tokens look at."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import best_of, grouped_topk, marked


@policy("livevlm", paper="2505.15269", needs=("attn_vision", "frame"), role="score")
def livevlm(
    tokens: Tokens,
    budget: int,
    *,
    window: int = 32,
    recent: float = 0.25,
    first: float = 0.5,
    bucket: int = 1,
) -> Reduction:
    """Keep text, the latest visual tokens, vision sinks, and the best of each bucket of the rest.

    Ning et al. (DAC 2026) need no question: the latest visual tokens ask what visual tokens are
    looked at (sinks). Their highest scores alone crowd around the latest frames, so that vision
    sink bucketing lets in the best of them first, and then, in falling order, tokens whose bucket
    of the timeline has room left. As many buckets as tokens to keep, one each, are the paper's, and
    so is a short memory that stays whole; `window`, `recent` and `first` are numbers of ours.

    Args:
        tokens: `attn_vision` `[..., H, N]`, the attention of the last `window` visual tokens, mean
            over them and over the query heads of a key head; and `frame` `[..., N]`, -1 at text.
        budget: Tokens to keep in every head; a share is of all tokens. Text comes first; where it
            alone is more than the budget, the last of it.
        window: Visual tokens that ask; read where attention is.
        recent: Part of the room that text leaves which goes to the latest visual tokens.
        first: Part of the rest that goes to the highest scores, whatever their buckets.
        bucket: Tokens that a bucket has room for.

    Raises:
        SpecError: A part outside [0, 1], or a bucket without room.
    """
    if not 0 <= recent <= 1 or not 0 <= first <= 1 or bucket < 1:
        raise SpecError(
            f"knobs recent={recent}, first={first}, bucket={bucket} of 'livevlm': choose shares "
            "from 0 to 1, and a bucket of 1 or more tokens"
        )
    score, seen = tokens.need("attn_vision").double(), tokens.need("frame") >= 0
    if seen.ndim < score.ndim:
        seen = seen[..., None, :]
    place = torch.arange(tokens.n, device=score.device)
    kept = best_of(place, ~seen, budget)
    late = best_of(place, seen, _part(recent, budget - kept.sum(-1, keepdim=True)))
    kept = kept | late
    room = budget - kept.sum(-1, keepdim=True)
    kept = kept | _bucketed(score, seen & ~late, room, _part(first, room), bucket)
    return Reduction.prune(marked(kept.expand(score.shape)), tokens.n)


def _part(share: float, count: Tensor) -> Tensor:
    """The nearest whole number to a share of each count."""
    return (count.double() * share + 0.5).long()


def _bucketed(score: Tensor, among: Tensor, room: Tensor, sinks: Tensor, capacity: int) -> Tensor:
    """Mark `room` `[..., 1]` of the tokens `among`: sinks, then the best that find a free bucket.

    Where buckets hold fewer tokens than they have room for, the best of the others come last.
    """
    kept = best_of(score, among, sinks)
    number = (room // capacity).clamp_min(1)
    order = among.cumsum(-1) - 1
    group = order * number // among.sum(-1, keepdim=True).clamp_min(1) + 1
    group = group.masked_fill(~among, 0).expand(score.shape)  # group 0 takes nobody
    size = torch.arange(int(number.max()) + 1, device=score.device)
    free = torch.where((size > 0) & (size <= number), capacity, 0).expand(*score.shape[:-1], -1)
    free = (free.scatter_add(-1, group, -kept.long())).clamp_min(0)
    left = among & ~kept
    fits = left & grouped_topk(score, group.masked_fill(~left, 0), free)
    kept = kept | best_of(score, fits, room - kept.sum(-1, keepdim=True))
    return kept | best_of(score, among & ~kept, room - kept.sum(-1, keepdim=True))
