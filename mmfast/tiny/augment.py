"""Which visual tokens a training step keeps: the model should answer from a part of them too."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

WAYS = ("random", "uniform", "change", "diverse")


def choose(tokens: Tensor, keep: int, way: str, rng: torch.Generator) -> Tensor:
    """Indices of the tokens kept, ascending.

    Args:
        tokens: pooled visual tokens. # [B, T, P, D]
        keep: how many per clip.
        way: one of WAYS.
        rng: source of randomness.

    Returns:
        int64 [B, keep].
    """
    batch, frames, patches, _ = tokens.shape
    total = frames * patches
    if way == "uniform":
        shift = torch.rand((), generator=rng)
        picked = ((torch.arange(keep) + shift) * (total / keep)).long().clamp(max=total - 1)
        return picked.expand(batch, keep)
    if way == "diverse":
        return _farthest(tokens.flatten(1, 2), keep).sort(-1).values
    score = torch.rand(batch, total, generator=rng)
    if way == "change":
        unit = normalize(tokens, dim=-1)
        change = 1 - (unit[:, 1:] * unit[:, :-1]).sum(-1)
        new = change.new_full((batch, 1, patches), 2.0)  # the first frame
        score = torch.cat([new, change], 1).flatten(1) + 0.02 * score
    return score.topk(keep).indices.sort(-1).values


def _farthest(tokens: Tensor, keep: int) -> Tensor:
    """Greedy: always the token least like any chosen one: [B, N, D] -> [B, keep]."""
    unit = normalize(tokens, dim=-1)
    gap = 1 - unit @ unit.mT  # [B, N, N]
    rows = torch.arange(len(tokens))
    chosen = [gap.mean(-1).argmax(-1)]
    nearest = gap[rows, chosen[0]]
    for _ in range(keep - 1):
        chosen.append(nearest.argmax(-1))
        nearest = torch.minimum(nearest, gap[rows, chosen[-1]])
        nearest[rows, chosen[-1]] = -1.0  # never twice
    return torch.stack(chosen, -1)
