"""Window: the last tokens."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


@register("window", kind="cache", needs=(), sites=("kv",), role="position", moment="always")
def window(tokens: Tokens, budget: int) -> Reduction:
    """Keep the most recent tokens, of whatever kind.

    Args:
        tokens: `x` `[..., N, d]`; only N is read.
        budget: Tokens to keep; a share is of all tokens.
    """
    keep = torch.arange(tokens.n - budget, tokens.n, device=tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)
