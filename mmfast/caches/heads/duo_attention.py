"""DuoAttention: heads that retrieve keep everything, the others stream."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens


@policy(
    "duo_attention",
    paper="2410.10819",
    needs=("query_reach",),
    role="heads",
    adaptive=True,
    uneven=True,
)
def duo_attention(
    tokens: Tokens,
    budget: int | None,
    *,
    retrieval: float = 0.5,
    sink: int = 16,
    recent: int = 64,
) -> Tensor:
    """Keep everything in heads that retrieve, and the first and recent tokens alone in the others.

    Xiao et al. (ICLR 2025): few heads look far back; the others need the tokens that attention
    leans on and the last ones. Which are which is found once for a model, here by
    `mmfast.calibrate_heads`.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `query_reach` `[H]`, the share of the heads of the
            model that retrieve no less than each of these.
        budget: Tokens to keep, mean over all heads of the model: it says how many heads retrieve,
            rounded down. None leaves that to `retrieval`.
        retrieval: Share of the heads of the model that retrieve where there is no budget.
        sink: First tokens that a streaming head keeps, at most a quarter of the budget.
        recent: Last tokens that it keeps; both together are at most the budget.

    Raises:
        SpecError: A knob out of range.
    """
    if min(sink, recent) < 0 or sink + recent < 1 or not 0 <= retrieval <= 1:
        raise SpecError(
            f"knobs retrieval={retrieval}, sink={sink}, recent={recent} of 'duo_attention': choose "
            "a share from 0 to 1, and tokens"
        )
    n, share = tokens.n, retrieval
    if budget is not None:
        sink = min(sink, budget // 4)
        recent = min(recent, budget - sink)
        least = min(n, sink + recent)
        share = (budget - least) / (n - least) if n > least else 1.0
    place = torch.arange(n, device=tokens.x.device)
    near = (place < sink) | (place >= n - recent)
    reach = tokens.need("query_reach").to(tokens.x.device)
    return (near | (reach <= share)[..., None]).expand(tokens.x.shape[:-1])
