"""Keynorm: tokens with short keys, group by group."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, share_out


@policy("keynorm", paper="2505.16175", needs=("x", "kind"), role="score")
def keynorm(tokens: Tokens, budget: int, *, group: int = 1024) -> Reduction:
    """Keep text, and of every group of visual tokens those with the shortest keys.

    QuickPrefill of Zheng et al. (2025): a key's length over all heads tells, without any attention,
    what later queries look at. A video is thinned group by group in equal shares, so that no part
    of it is lost; all heads keep the same tokens.

    Args:
        tokens: Keys `x` `[..., H, N, d]` (`[N, d]` is one head) and `kind` `[..., N]`.
        budget: Tokens to keep; a share is of all tokens. Text comes first; where it alone is more
            than the budget, the text with the shortest keys.
        group: Visual tokens of a group, at least 1; 16 frames in the paper.
    """
    if group < 1:
        raise SpecError(f"knob group={group} of 'keynorm' holds no token; choose 1 or more")
    square = tokens.x.float().square().sum(-1).double()  # [..., H, N]
    heads = square.shape[-2:-1]
    # float32 again: equal keys have equal length, whatever the order of the sum.
    length = (square.sum(-2) if heads else square).float()
    chosen = marked(_choose(-length, tokens.need("kind"), budget, group))
    wide = chosen[..., None, :].expand(*chosen.shape[:-1], *heads, -1) if heads else chosen
    return Reduction.prune(wide, tokens.n)


def _choose(score: Tensor, kind: Tensor, budget: int, group: int) -> Tensor:
    """Mark `budget` tokens `[..., N]`: text, then equal shares of the groups of visual tokens."""
    visual = (kind != 0).expand(score.shape)
    part = ((visual.cumsum(-1) - 1) // group + 1).masked_fill(~visual, 0)  # 0 is text
    sizes = part.new_zeros(*part.shape[:-1], part.shape[-1] // group + 2)
    sizes.scatter_add_(-1, part, torch.ones_like(part))
    weights = sizes.double()
    weights[..., 0] *= 1e30  # takes its fill before any group does
    return grouped_topk(score, part, share_out(weights, budget, sizes))
