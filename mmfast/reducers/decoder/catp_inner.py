"""CATP inside the decoder: examples by what the question turns to, its own picture by them."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import one_by_one, share_out, snap, stable_topk
from mmfast.ops.similarity import cosine_table


@register(
    "catp_inner",
    paper="2508.07871",
    needs=("x", "attn", "attn_before", "query", "image"),
    sites=("llm",),
    scope="prompt",
)
def catp_inner(tokens: Tokens, budget: int, *, relevance: float = 0.6) -> Reduction:
    """Prune examples by growing attention and relevance, then the last image by what they keep.

    The second stage of CATP (Li et al., AAAI 2026), for prompts of several images of which the last
    is the one asked about. Tokens of all other images rank together, by how much more attention the
    end of the prompt pays them than one layer before, plus `relevance` times their likeness to the
    question, so an image that does not help may lose all; those of the last image rank by their
    likeness to the mean of what stays. Both groups keep the same share. Alone, an image is ranked
    as an example. After the first stage: `catp:0.6+catp_inner@llm6:0.4`; layer 6 of 32 and
    10 of 40 are the paper's.

    Args:
        tokens: All images of one prompt joined: `x` `[..., N, D]`, `attn` and `attn_before`
            `[..., N]`, `query` `[..., T, D]`, and `image` `[..., N]`, the image of each token.
        budget: Tokens to keep of the whole prompt.
        relevance: Weight of the likeness to the question beside the growth of attention.
    """

    def prune(item: Tokens) -> Reduction:
        return Reduction.prune(_picks(item, budget, relevance), item.n)

    return one_by_one(prune, tokens)


def _picks(item: Tokens, budget: int, relevance: float) -> Tensor:
    x, image = item.x.double(), item.need("image")
    last = image == image.max()
    examples = last if bool(last.all()) else ~last
    sizes = torch.stack([examples.sum(), (~examples).sum()])
    counts = share_out(sizes, budget, sizes).tolist()
    asking = torch.cat([item.need("query").double(), x[last]]).mean(0)
    growth = (item.need("attn").double() - item.need("attn_before").double()).clamp_min(0)
    score = growth[examples] + relevance * _likeness(x[examples], asking)
    kept = examples.nonzero()[:, 0][stable_topk(snap(score), counts[0])]
    if not counts[1]:
        return kept
    context = x[kept] if counts[0] else x[examples]
    near = _likeness(x[~examples], context.mean(0))
    return torch.cat([kept, (~examples).nonzero()[:, 0][stable_topk(near, counts[1])]])


def _likeness(x: Tensor, to: Tensor) -> Tensor:
    """Cosine of each row of `x` `[n, D]` with `to` `[D]`, `[n]`."""
    return cosine_table(x, to[None])[:, 0]
