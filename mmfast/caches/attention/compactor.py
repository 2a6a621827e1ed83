"""Compactor: keys that the others cannot rebuild, and tokens that their neighbours attend to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import pooled_votes
from mmfast.ops.ranking import snap
from mmfast.ops.similarity import leverage_scores

_LEAST = 1e-6  # of a deviation: where all scores are alike, rounding tells nothing


@policy("compactor", paper="2507.08143", needs=("x", "values", "attn_mutual"), role="score")
def compactor(
    tokens: Tokens,
    budget: int,
    *,
    sink: int = 8,
    recent: int = 4,
    chunk: int = 256,
    blend: float = 0.5,
    rank: int = 48,
    seed: int = 0,
) -> Tensor:
    """Keep first and last tokens, and in each head those of much leverage and mutual attention.

    Chari & Van Durme (2025) need no question: the tokens of a chunk of the prompt attend to each
    other in both directions, what a token receives is multiplied by the length of its value and
    averaged over its neighbours, and the leverage of its key (`leverage`) is added. Both scores are
    brought to mean 0 and deviation 1 first.

    Args:
        tokens: Keys `x` and `values` `[..., H, N, d]`, and `attn_mutual` `[..., H, N]`, the
            attention of all tokens of a chunk to each of them, on logits that are not scaled, sum
            over the queries and mean over the query heads of a key head.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, at most a quarter of the budget; they are in no chunk.
        recent: Last tokens that stay, at most a quarter of the budget; they are in no chunk.
        chunk: Tokens of a chunk, at least 1.
        blend: Weight of the leverage beside 1 for the attention.
        rank: Columns of the projection of keys; 0, or no less than d, projects nothing.
        seed: Seed of the projection, one for all heads, made on the CPU.

    Raises:
        SpecError: A knob below its least.
    """
    if min(sink, recent, rank, blend) < 0 or chunk < 1:
        raise SpecError(
            f"knobs sink={sink}, recent={recent}, chunk={chunk}, blend={blend}, rank={rank} of "
            "'compactor': choose a chunk of 1 or more, and 0 or more elsewhere"
        )
    first, last = min(sink, budget // 4), min(recent, budget // 4)
    some = slice(first, tokens.n - last)
    length = torch.linalg.vector_norm(tokens.need("values").double(), dim=-1)
    attended = pooled_votes(tokens.need("attn_mutual") * length, 3, padded=False)[..., some]
    reach = leverage_scores(tokens.x[..., some, :], rank, seed)
    score = _standard(attended) + blend * _standard(reach)
    return F.pad(snap(score), (first, last), value=torch.inf)


def _standard(score: Tensor) -> Tensor:
    """A score `[..., N]` with mean 0 and deviation 1."""
    away = score - score.mean(-1, keepdim=True)
    return away / away.square().mean(-1, keepdim=True).sqrt().clamp_min(_LEAST)
