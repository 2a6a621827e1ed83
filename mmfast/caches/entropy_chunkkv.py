"""ChunkKV with a gate: of chunks whose attention falls on few tokens, these alone stay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import with_last
from mmfast.ops.ranking import snap, stable_topk

_TINY = 1e-30  # a chunk that nothing attends to


@policy("entropy_chunkkv", needs=("attn_window",), role="score")
def entropy_chunkkv(
    tokens: Tokens, budget: int, *, window: int = 32, chunk: int = 10, few: int = 4
) -> Reduction:
    """Keep as `chunkkv` does, but of important chunks with one-sided attention the best tokens.

    Known from the press EntropyGatedChunkKV of kvpress, which has no paper: a chunk may owe its
    score to one token, and would spend room on all others. A chunk is important from the median
    score on, and one-sided below the median entropy of the attention within chunks; `few` of its
    tokens stay, and what that saves goes to further chunks, and then to the best tokens left.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens to keep; a share is of all tokens. The window is among them, with at most
            half of the budget.
        window: Queries of the observation window, at least 1.
        chunk: Tokens of a chunk, at least 1.
        few: Tokens that stay of an important chunk with one-sided attention, at least 1.

    Raises:
        SpecError: A knob below 1.
    """
    if min(window, chunk, few) < 1:
        raise SpecError(
            f"knobs window={window}, chunk={chunk}, few={few} of 'entropy_chunkkv': choose 1 or "
            "more"
        )
    last = min(window, max(budget // 2, 1))
    votes = tokens.need("attn_window")[..., : tokens.n - last].double()
    score = snap(votes.mean(-2, keepdim=True) if votes.ndim > 1 else votes)
    whole = _from_chunks(score, budget - last, chunk, few)
    chosen = stable_topk(score.masked_fill(whole, torch.inf), budget - last)
    return with_last(chosen.expand(*tokens.x.shape[:-2], -1), last, tokens.n)


def _from_chunks(score: Tensor, budget: int, size: int, few: int) -> Tensor:
    """Mark `[..., N]` what chunks keep, in the order of their mean score, up to the budget."""
    n = score.shape[-1]
    rows = F.pad(score, (0, -n % size), value=-torch.inf).unflatten(-1, (-1, size))
    there = rows > -torch.inf
    held, counts = rows.masked_fill(~there, 0), there.sum(-1)
    sums = held.sum(-1)
    mean = snap(sums / counts)
    entropy = torch.special.entr(held / sums.clamp_min(_TINY)[..., None]).sum(-1)
    entropy = snap(entropy / counts.clamp_min(2).log())  # a lone token has none
    gated = (mean >= _median(mean)) & (entropy < _median(entropy))
    quota = torch.where(gated, counts.clamp_max(few), counts)
    order = mean.sort(dim=-1, descending=True, stable=True).indices
    sorted_quota = quota.gather(-1, order)
    room = (budget - (sorted_quota.cumsum(-1) - sorted_quota)).clamp_min(0)
    taken = torch.zeros_like(quota).scatter(-1, order, torch.minimum(sorted_quota, room))
    ranks = rows.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    kept: Tensor = (ranks < taken[..., None]).flatten(-2)[..., :n]
    return kept


def _median(x: Tensor) -> Tensor:
    """The lower median `[..., 1]`."""
    found: Tensor = x.median(-1, keepdim=True).values
    return found
