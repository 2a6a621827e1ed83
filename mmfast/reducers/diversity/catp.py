"""CATP: one budget for all images of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.max_min import greedy_diverse
from mmfast.ops.ranking import one_by_one, rescale, share_out
from mmfast.ops.similarity import relevance


@register("catp", paper="2508.07871", needs=("x", "query", "image"), scope="prompt")
def catp(tokens: Tokens, budget: int, *, balance: float = 0.5, surplus: float = 2.0) -> Reduction:
    """Choose diverse, aligned tokens in each image, then drop what other images already show.

    Two stages of progressive pruning for prompts that carry many images (Li et al., AAAI 2026).
    The first keeps, of every image alike, tokens that are aligned with the text and unlike each
    other; the second compares all images and drops tokens that another image already shows, given
    the question, so that images keep different numbers. The paper's second stage reads the
    attention of shallow decoder layers; working on features alone, before the language model, is a
    choice of this project, as is the greedy trade-off in both stages.

    Args:
        tokens: All images of one prompt joined: `x` `[..., N, D]`, `query` `[..., T, D]`, and
            `image` `[..., N]`, the number of the image of each token.
        budget: Tokens to keep of the whole prompt; every image keeps one at least if it is as many
            as there are images.
        balance: Weight of alignment against diversity, from 0 to 1.
        surplus: How many times the budget the first stage leaves for the second, at least 1.
    """
    if surplus < 1:
        raise SpecError(f"knob surplus={surplus} of 'catp' is below 1; 2.0 leaves twice the budget")

    def prune(item: Tokens) -> Reduction:
        return Reduction.prune(_picks(item, budget, balance, surplus), item.n)

    return one_by_one(prune, tokens)


def _picks(item: Tokens, budget: int, balance: float, surplus: float) -> Tensor:
    image = item.need("image").unique(return_inverse=True)[1]
    size = image.bincount()
    first = min(item.n, max(round(surplus * budget), len(size)))
    counts = share_out(size, first, size).clamp_min(1)
    aligned = rescale(relevance(item.x, item.need("query")))
    parts = [
        place[greedy_diverse(aligned[place], item.x[place], int(count), balance)]
        for place, count in (((image == i).nonzero()[:, 0], c) for i, c in enumerate(counts))
    ]
    left = torch.cat(parts)
    order = left.argsort()
    left = left[order]
    start = None
    if budget >= len(parts):
        start = torch.searchsorted(left, torch.stack([part[0] for part in parts]))
    return left[greedy_diverse(aligned[left], item.x[left], budget, balance, start)]
