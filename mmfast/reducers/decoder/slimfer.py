"""SlimInfer: whole blocks of the prompt are dropped, layer after layer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register(
    "slimfer",
    paper="2508.06447",
    needs=("attn_window",),
    sites=("llm",),
    stages=(0.25, 0.375, 0.5, 0.625, 0.75),
    text=True,
)
def slimfer(tokens: Tokens, budget: int, *, block: int = 16) -> Reduction:
    """Keep the contiguous blocks of tokens that the last few queries attend to most.

    After SlimInfer (2025), which drops blocks of hidden states at one layer after the other.
    Blocks are ranked by their mean score and kept whole; of the last one that fits only in part,
    the best tokens stay, so the budget is met exactly. What the paper does with the cache, blocks
    that come from host memory a layer ahead, is the cache policy of the same name.

    Args:
        tokens: `attn_window` `[..., N]`, attention from the last 8 queries, mean over heads.
        budget: Tokens to keep; ties go to the lowest index, of blocks and of tokens.
        block: Tokens per block, counted among the tokens that are left.
    """
    if block < 1:
        raise SpecError(f"knob block={block} of 'slimfer' is no size; choose 1 or more")
    n, score = tokens.n, tokens.need("attn_window").float()
    padded = F.pad(score, (0, -n % block)).unflatten(-1, (-1, block))  # [..., blocks, block]
    sizes = torch.full(padded.shape[-2:-1], block, device=score.device)
    sizes[-1] = n - block * (len(sizes) - 1)
    order = stable_topk(padded.sum(-1) / sizes, len(sizes))
    rank = order.argsort(dim=-1)  # [..., blocks], of each block
    best = stable_topk(score, n)  # tokens by score, then, stably, by the rank of their block
    place = rank.gather(-1, best // block).argsort(dim=-1, stable=True)
    return Reduction.prune(best.gather(-1, place[..., :budget]), n)
