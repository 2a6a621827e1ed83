"""A merge plan of one block of the vision tower, carried out over the blocks that follow.

Neighbouring blocks find nearly the same pairs (LiteVGGT), so one matching may serve several: it
is made for all the tokens that these blocks are to lose, and each of them merges its part, the
most similar pairs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.ops.paired_cosine import paired_cosine


class Carried:
    """What is left to do of a plan.

    Args:
        plan: From the S tokens there are to those after the last block it serves.
        keys: `[S, d]` what similarity was measured on.
        lengths: Tokens of each segment, S in all; no pair crosses segments.
    """

    def __init__(self, plan: Reduction, keys: Tensor, lengths: Sequence[int]) -> None:
        device = plan.owner.device
        self._target = plan.keep[plan.owner]  # [S] the token each one joins, itself if it stands
        self._left = torch.arange(plan.n, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._segment = torch.arange(len(lengths), device=device).repeat_interleave(self._lengths)
        score = paired_cosine(keys, keys[self._target])
        score = score.masked_fill(self._target == self._left, -torch.inf)
        order = score.argsort(descending=True, stable=True)
        order = order[self._segment[order].argsort(stable=True)]
        begins = torch.tensor([0, *accumulate(lengths)], device=device)
        self._rank = torch.empty_like(order)  # place of each token among those to go, by segment
        self._rank[order] = self._left - begins[self._segment[order]]

    def step(self, targets: Sequence[int]) -> Reduction:
        """From the tokens that are left to `targets` tokens per segment."""
        going = self._lengths - torch.tensor(targets, device=self._rank.device)
        stands = self._rank >= going[self._segment]  # [S]
        place = stands.cumsum(0) - 1
        stays = stands[self._left]
        owner = torch.where(stays, place[self._left], place[self._target[self._left]])
        self._left = self._left[stays]
        return Reduction(stays.nonzero()[:, 0], owner)
