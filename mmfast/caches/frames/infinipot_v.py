"""InfiniPot-V: what changes from frame to frame, and long values."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import best_of, frame_ranks, marked, snap
from mmfast.ops.similarity import unit_rows


@policy("infinipot_v", paper="2506.15745", needs=("x", "values", "frame", "spot"), role="score")
def infinipot_v(
    tokens: Tokens, budget: int, *, tar: float = 0.5, recent: float = 0.25
) -> Reduction:
    """Keep text, recent frames, what differs from those, and the tokens of the longest values.

    Kim et al. (NeurIPS 2025) need no question. A part `tar` of the room that text leaves goes to
    temporal redundancy: the latest frames stay, and of each earlier frame the tokens whose keys
    have the lowest cosine, in the mean, with the keys at the same place of those frames. The rest
    goes to the longest values.

    Args:
        tokens: Keys `x` and `values` `[..., H, N, d]`; `frame` `[..., N]`, a number for each frame,
            -1 at text and separators; and `spot` `[..., N]`, the place in the frame.
        budget: Tokens to keep in every head; a share is of all tokens. Text comes first; where it
            alone is more than the budget, the last of it.
        tar: Part that goes to temporal redundancy, half as published; 0 leaves values alone.
        recent: Share of the frames that count as recent, at least one of several, and never all.

    Raises:
        SpecError: A knob outside [0, 1].
    """
    if not 0 <= tar <= 1 or not 0 <= recent <= 1:
        raise SpecError(
            f"knobs tar={tar}, recent={recent} of 'infinipot_v' are no shares; choose from 0 to 1"
        )
    rank, spot = (
        _wide(v, tokens) for v in (frame_ranks(tokens.need("frame")), tokens.need("spot"))
    )
    place = torch.arange(tokens.n, device=rank.device)
    text = rank < 0
    kept = best_of(place, text, budget)
    room = budget - kept.sum(-1, keepdim=True)
    part = (room * tar + 0.5).long()
    frames = rank.amax(-1, keepdim=True) + 1
    latest = torch.minimum((frames * recent).long().clamp_min(1), frames - 1).clamp_min(0)
    late = ~text & (rank >= frames - latest)
    if tar:
        kept = kept | best_of(place, late, part)
        part = part - (kept & late).sum(-1, keepdim=True)
        novel = -_redundancy(tokens.x, spot, late, latest)
        kept = kept | best_of(novel, ~text & ~late & (latest > 0), part)
    length = snap(torch.linalg.vector_norm(tokens.need("values").double(), dim=-1))
    kept = kept | best_of(length, ~kept, budget - kept.sum(-1, keepdim=True))
    return Reduction.prune(marked(kept.expand(tokens.x.shape[:-1])), tokens.n)


def _wide(value: Tensor, tokens: Tokens) -> Tensor:
    """The same numbers `[..., N]` for every head."""
    return value[..., None, :] if value.ndim < tokens.x.ndim - 1 else value


def _redundancy(keys: Tensor, spot: Tensor, late: Tensor, latest: Tensor) -> Tensor:
    """Mean cosine `[..., N]` of each key with those of the recent frames at its spot."""
    units = unit_rows(keys.double())
    index = spot.clamp_min(0)[..., None].expand(units.shape)
    sums = units.new_zeros(*units.shape[:-2], int(spot.max().clamp_min(0)) + 1, units.shape[-1])
    sums.scatter_add_(-2, index, units * late[..., None])
    found = (units * sums.gather(-2, index)).sum(-1)
    return snap(found / latest.clamp_min(1))
