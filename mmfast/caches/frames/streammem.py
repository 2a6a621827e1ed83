"""StreamMem: what the end of the prompt looks at, and a prototype of every frame."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import best_of, frame_ranks, grouped_topk, marked

_TINY = 1e-12  # weight of a token that nothing attends to


@policy("streammem", paper="2508.15717", needs=("attn_window", "frame"), role="score")
def streammem(
    tokens: Tokens, budget: int, *, window: int = 4, prototypes: bool = True
) -> Reduction:
    """Keep text and the most attended visual tokens; what leaves of a frame becomes its prototype.

    Yang et al. (2025): the tokens of the chat template behind a video stand for any question. Those
    that they attend to most stay, and one entry of each frame is the mean of it and of what leaves
    of its frame, weighted by attention, so that no frame is lost.

    Args:
        tokens: Keys `x` `[..., H, N, d]`; `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head; and `frame`
            `[..., N]`, a number for each frame, -1 at text and separators.
        budget: Tokens to keep in every head; a share is of all tokens. Text comes first; where it
            alone is more than the budget, the last of it.
        window: Tokens at the end of the prompt that ask: those of the template that begins an
            answer, such as 4; more bring in the question.
        prototypes: Merge what leaves; the latest frames where the room for visual tokens is less
            than two for each frame.

    Raises:
        SpecError: A window of no query.
    """
    if window < 1:
        raise SpecError(f"knob window={window} of 'streammem' holds no query; choose 1 or more")
    score, rank = tokens.need("attn_window").double(), frame_ranks(tokens.need("frame"))
    if rank.ndim < score.ndim:
        rank = rank[..., None, :]
    text, place = rank < 0, torch.arange(tokens.n, device=rank.device)
    kept = best_of(place, text, budget)
    room = budget - kept.sum(-1, keepdim=True)
    group, merged = rank + 1, prototypes and bool((rank >= 0).any())  # group 0 is text
    stands = torch.zeros_like(score, dtype=torch.bool)
    if merged:
        stands = _standing(score, group, room)
    kept = kept | stands
    kept = kept | best_of(score, ~text & ~kept, budget - kept.sum(-1, keepdim=True))
    keep = marked(kept.expand(score.shape))
    if not merged or keep.shape[-1] == tokens.n:
        return Reduction.prune(keep, tokens.n)
    group = group.expand(score.shape)
    slots = torch.full((*score.shape[:-1], int(group.max()) + 1), -1, device=score.device)
    slots.scatter_reduce_(-1, group, torch.where(stands, place, -1), "amax")
    target = torch.where(kept, place, slots.gather(-1, group).masked_fill(text, -1))
    return Reduction.merge(keep, target, _weights(score, target))


def _standing(score: Tensor, group: Tensor, room: Tensor) -> Tensor:
    """Mark the most attended token of each frame, the latest ones where there are many."""
    last = group.amax(-1, keepdim=True)
    number = torch.minimum(last, room // 2)
    each = torch.arange(int(last.max()) + 1, device=group.device)
    counts = ((each > last - number) & (each <= last) & (each > 0)).long()
    return grouped_topk(score, group, counts)


def _weights(score: Tensor, target: Tensor) -> Tensor:
    """Share `[..., N]` of each token in the one that it joins, by attention; 0 for one dropped."""
    weight = (score + _TINY).masked_fill(target < 0, 0)
    place = target.clamp_min(0)
    return weight / torch.zeros_like(weight).scatter_add_(-1, place, weight).gather(-1, place)
