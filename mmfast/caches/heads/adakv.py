"""AdaKV: the heads of a layer share one budget."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@policy("adakv", paper="2407.11550", needs=("score",), role="heads", adaptive=True)
def adakv(tokens: Tokens, budget: int, *, alpha: float = 0.2, score: str = "snapkv") -> Tensor:
    """Share the budget of any score policy out over the heads of a layer, by its scores.

    Feng et al. (NeurIPS 2025): heads that attend to few tokens need few, so the highest scores of
    all heads of a layer stay, whichever head they are of. A part of the budget is safe in every
    head. Write it behind a score policy, as in `expected_attention:0.25+adakv`; alone it shares out
    `snapkv`.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `score` `[..., H, N]`, what the score policy says.
        budget: Tokens to keep, mean over the heads, as the score policy has it.
        alpha: Part of the budget that every head keeps of its own, 0.2 as published, one token at
            least; at 0 a head may be left with nothing, at 1 all heads keep equally many.
        score: Score policy where none stands beside it.

    Raises:
        SpecError: An `alpha` outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise SpecError(f"knob alpha={alpha} of 'adakv' is no share; choose from 0 to 1")
    scores = tokens.need("score").double()
    safe = stable_topk(scores, max(int(alpha * budget), int(alpha > 0)))
    flat = scores.scatter(-1, safe, torch.inf).flatten(-2)  # [..., H * N]
    kept = stable_topk(flat, budget * scores.shape[-2])
    marks = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, kept, True)
    found: Tensor = marks.unflatten(-1, scores.shape[-2:])
    return found
