"""Heavy hitters: tokens that gathered attention, alone or times the size of their values."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("h2o", paper="2306.14048", needs=("attn_sum",), role="score", moment="always")
def h2o(tokens: Tokens, budget: int, *, recent: float = 0.5) -> Tensor:
    """Keep recent tokens, and of the others those that gathered most attention, at every step.

    Zhang et al. (NeurIPS 2023): a few heavy hitters get most of the attention. It is summed over
    all queries, those of the answer, too, and in each head the lightest token leaves before the
    next step.

    Args:
        tokens: `attn_sum` `[..., H, N]`, the attention received from all queries so far.
        budget: Tokens to keep in every head; a share is of the tokens of the prompt.
        recent: Share of the budget that goes to the last tokens, half as published.

    Raises:
        SpecError: `recent` outside [0, 1].
    """
    return heaviest("h2o", tokens.need("attn_sum").double(), budget, 0, recent)


@policy("vatp", paper="2406.12335", needs=("attn_sum", "values"), role="score")
def vatp(tokens: Tokens, budget: int, *, sink: int = 20, recent: float = 0.5) -> Tensor:
    """Keep first and recent tokens, and those of the greatest attention times value length.

    Guo et al. (EMNLP 2024): what a token adds to the output is its attention times its value, so
    the attention it gathered is multiplied by the sum of the magnitudes of its value. Values of the
    first tokens are short although attention leans on them, so those stay.

    Args:
        tokens: `values` `[..., H, N, d]` and `attn_sum` `[..., H, N]`, the attention received from
            all queries.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, 20 as published, at most a quarter of the budget.
        recent: Share of the budget that goes to the last tokens, half as published.

    Raises:
        SpecError: A negative sink, or `recent` outside [0, 1].
    """
    if sink < 0:
        raise SpecError(f"knob sink={sink} of 'vatp' is negative; choose 0 or more")
    weight = tokens.need("values").double().abs().sum(-1)
    score = snap(tokens.need("attn_sum").double() * weight)
    return heaviest("vatp", score, budget, min(sink, budget // 4), recent)


def heaviest(name: str, score: Tensor, budget: int, first: int, recent: float) -> Tensor:
    """Scores `[..., N]` under which the first and the last tokens stay."""
    if not 0 <= recent <= 1:
        raise SpecError(f"knob recent={recent} of {name!r} is no share; choose from 0 to 1")
    n, last = score.shape[-1], min(round(recent * budget), budget - first)
    score = score.clone()
    score[..., :first] = score[..., n - last :] = torch.inf
    return score
