"""SimLayerKV: layers that look at both ends alone need nothing between them."""

from __future__ import annotations

import torch

from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@policy(
    "simlayerkv",
    paper="2410.13846",
    needs=("attn_window",),
    role="score",
    adaptive=True,
    uneven=True,
)
def simlayerkv(
    tokens: Tokens,
    budget: int | None,
    *,
    sink: int = 4,
    recent: int = 1024,
    threshold: float = 0.9,
    window: int = 32,
) -> Reduction:
    """Keep the first and recent tokens alone in lazy layers, and everything in the others.

    Zhang et al. (2024): a layer is lazy where nearly all attention of the last queries, mean over
    its heads, falls on the first and recent tokens.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens that a lazy layer keeps, the first ones among them; a share is of all tokens.
            None is `sink` + `recent`.
        sink: First tokens, 4 as published, at most half of the budget.
        recent: Recent tokens where there is no budget, 1024 as published.
        threshold: Part of the attention from which on a layer is lazy, 0.9 for Llama 3; at 0 all
            layers are.
        window: Last queries that are looked at, at least 1.

    Raises:
        SpecError: A knob out of range.
        MmfastError: Conversations of a batch whose layers are lazy in some of them.
    """
    if min(sink, recent) < 0 or sink + recent < 1 or window < 1 or not 0 <= threshold <= 1:
        raise SpecError(
            f"knobs sink={sink}, recent={recent}, threshold={threshold}, window={window} of "
            "'simlayerkv': choose a threshold from 0 to 1, a window of 1 or more, and tokens"
        )
    held = min(tokens.n, sink + recent) if budget is None else budget
    place = torch.arange(tokens.n, device=tokens.x.device)
    first = min(sink, held if budget is None else held // 2)
    stays = (place < first) | (place >= tokens.n - held + first)
    votes = tokens.need("attn_window").double()
    seen, whole = (votes * stays).sum(-1), votes.sum(-1)
    if tokens.x.ndim > 2:
        seen, whole = seen.mean(-1), whole.mean(-1)
    lazy = (
        seen >= threshold * whole - 2.0**-30
        if threshold
        else torch.ones_like(seen, dtype=torch.bool)
    )
    if bool((lazy != lazy.flatten()[0]).any()):
        raise MmfastError("'simlayerkv' finds a layer lazy in a part of a batch; reduce one by one")
    if not bool(lazy.any()):
        return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
    keep = stable_topk(stays.double(), held).sort().values
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)
