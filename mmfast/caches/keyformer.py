"""Keyformer: tokens that gathered attention, drawn with some noise, and the recent ones."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import with_last
from mmfast.ops.ranking import stable_topk

_TINY = 1e-30  # a token that nothing attends to: logarithm -69, below any draw


@policy("keyformer", paper="2403.09054", needs=("attn_sum", "layer"), role="score")
def keyformer(
    tokens: Tokens, budget: int, *, recent: float = 0.25, noise: float = 1.0, seed: int = 0
) -> Reduction:
    """Keep recent tokens, and of the others those of greatest accumulated, regularised attention.

    Adnan et al. (MLSys 2024) add Gumbel noise to the logits before they accumulate, so that a
    few heavy tokens do not decide everything: here a token has one draw, added to the logarithm
    of its accumulated attention. The temperature of the paper does not change the order of one
    accumulated score. The choice is made once,
    behind the prompt: a new draw at every step would in the end lose every token.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, `attn_sum` `[..., H, N]`, the attention each token
            received from all queries so far, and `layer`, the number of the layer: every layer
            and head has its own draw.
        budget: Tokens to keep in every head; a share is of all tokens.
        recent: Share of the budget that goes to the last tokens, 0.2 to 0.3 as published.
        noise: Scale of the Gumbel noise; 0 keeps the heavy hitters themselves (H2O).
        seed: Seed of the draw. It is made on the CPU, so all devices agree.

    Raises:
        SpecError: `recent` outside [0, 1], or negative noise.
    """
    if not 0 <= recent <= 1 or noise < 0:
        raise SpecError(
            f"knobs recent={recent}, noise={noise} of 'keyformer': choose recent from 0 to 1 and "
            "noise 0 or more"
        )
    score = tokens.need("attn_sum").double().clamp_min(_TINY).log()
    if noise:
        draw = _gumbel(score.shape[-2:], seed, int(tokens.need("layer")))
        score = score + noise * draw.to(score.device)
    last = min(round(recent * budget), budget)
    return with_last(stable_topk(score[..., : tokens.n - last], budget - last), last, tokens.n)


def _gumbel(shape: torch.Size, seed: int, layer: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1009 + layer)
    uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
    return -(-uniform.clamp(_TINY, 1 - 2.0**-53).log()).log()
