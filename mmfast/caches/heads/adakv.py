"""AdaKV: the heads of a layer share one budget."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError, unknown
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import share_out, stable_topk


@policy("adakv", paper="2407.11550", needs=("score",), role="heads", adaptive=True)
def adakv(
    tokens: Tokens,
    budget: int,
    *,
    alpha: float = 0.2,
    guard: str = "blend",
    score: str = "snapkv",
) -> Tensor:
    """Share the budget of any score policy out over the heads of a layer, by its scores.

    Feng et al. (NeurIPS 2025): heads that attend to few tokens need few, so the highest scores of
    all heads of a layer stay, whichever head they are of. A part of the budget is the same in every
    head. Write it behind a score policy, as in `expected_attention:0.25+adakv`; alone it shares out
    `snapkv`.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `score` `[..., H, N]`, what the score policy says.
        budget: Tokens to keep, mean over the heads, as the score policy has it.
        alpha: Part of the budget that all heads have alike, 0.2 as published, one token at least;
            at 0 a head may be left with nothing, at 1 all heads keep equally many.
        guard: `blend`, what the scores give a head and the equal part are mixed, as published; or
            `least`, a head keeps its equal part at least and the scores share out the rest, as in
            kvpress.
        score: Score policy where none stands beside it.

    Raises:
        SpecError: An `alpha` outside [0, 1], or another guard.
    """
    if not 0 <= alpha <= 1:
        raise SpecError(f"knob alpha={alpha} of 'adakv' is no share; choose from 0 to 1")
    if guard not in ("blend", "least"):
        raise SpecError(unknown("guard of 'adakv'", guard, ("blend", "least")))
    scores = tokens.need("score").double()
    least = int(alpha > 0)
    if guard == "least":
        safe = stable_topk(scores, max(int(alpha * budget), least))
        return _best_of_all(scores.scatter(-1, safe, torch.inf), budget)
    there = (scores > -torch.inf).sum(-1)  # heads may hold unlike numbers
    given = (1 - alpha) * _best_of_all(scores, budget).sum(-1).double() + alpha * budget
    wanted = (given - least).clamp_min(0)
    counts = least + share_out(wanted, (budget - least) * scores.shape[-2], there - least)
    ranks = scores.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    return ranks < counts[..., None]


def _best_of_all(scores: Tensor, mean: int) -> Tensor:
    """Mark the highest of the scores `[..., H, N]` of all heads, `mean` a head."""
    flat = scores.flatten(-2)
    kept = stable_topk(flat, mean * scores.shape[-2])
    marks = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, kept, True)
    found: Tensor = marks.unflatten(-1, scores.shape[-2:])
    return found
