"""Sinks: the first tokens, which attention leans on whatever they say."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


@register(
    "sink",
    kind="cache",
    paper="2309.17453",
    needs=(),
    sites=("kv",),
    role="position",
    moment="always",
)
def sink(tokens: Tokens, budget: int) -> Reduction:
    """Keep the first tokens of the conversation.

    StreamingLLM (Xiao et al., ICLR 2024) is `sink:4+window:4096`: a model puts the attention it
    has no use for on the first tokens, and breaks when they leave.

    Args:
        tokens: `x` `[..., N, d]`; only N is read.
        budget: Tokens to keep, the published number is 4; a share is of all tokens.
    """
    keep = torch.arange(budget, device=tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)
