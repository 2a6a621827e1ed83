"""CurDKV: tokens whose keys and values have the largest leverage."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import ROUNDING, Numbers, RoughScores, lengths_at, snap
from mmfast.ops.similarity import rough_lengths

_TINY = 1e-30  # a token of no length


def _rough(
    tokens: Tokens, budget: int, *, sink: int = 4, rank: int = 20, seed: int = 0
) -> RoughScores | None:
    if rank or sink < 0:
        return None
    rows = tokens.x.float(), tokens.need("values").float()
    one, other = map(rough_lengths, rows)
    if one is None or other is None:
        return None
    (keys, off), (wide, more) = one, other
    score = 2 * (keys * wide).clamp_min(_TINY**0.5).log()
    score[..., : min(sink, budget)] = torch.inf

    def exact(places: Numbers) -> Numbers:
        pair = (torch.from_numpy(lengths_at(x, places)).square() for x in rows)
        found: Numbers = _score(*pair).numpy()
        found[places % tokens.n < min(sink, budget)] = torch.inf
        return found

    # The logarithm has the relative error of what it is of, and one of its own.
    return RoughScores(score.numpy(), 3 * (off + more) + 2**-16 + ROUNDING, exact)


@policy("curdkv", paper="2509.15038", needs=("x", "values"), role="score", rough=_rough)
def curdkv(tokens: Tokens, budget: int, *, sink: int = 4, rank: int = 20, seed: int = 0) -> Tensor:
    """Keep in each head the first tokens, and those of the largest leverage of key and value.

    Sengupta et al. (2025): a CUR decomposition of keys and values keeps the rows that rebuild the
    output of attention. The leverage of a row is estimated by its squared length under a Gaussian
    projection, and a token scores by the product of both.

    Args:
        tokens: Keys `x` and `values`, both `[..., H, N, d]`.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, at most the budget.
        rank: Columns of the projection, 20 as published; 0 projects nothing.
        seed: Seed of the projection, one for all heads, made on the CPU.

    Raises:
        SpecError: A negative sink or rank.
    """
    if min(sink, rank) < 0:
        raise SpecError(f"knobs sink={sink}, rank={rank} of 'curdkv': choose 0 or more")
    keys, values = (_leverage(x, rank, seed) for x in (tokens.x, tokens.need("values")))
    score = _score(keys, values)
    score[..., : min(sink, budget)] = torch.inf
    return score


def _score(keys: Tensor, values: Tensor) -> Tensor:
    return snap((keys * values).clamp_min(_TINY).log())


def _leverage(rows: Tensor, rank: int, seed: int) -> Tensor:
    """Squared lengths `[..., N]` of rows `[..., N, d]` under a projection to `rank` columns."""
    if rank:
        rows = rows.double()
        generator = torch.Generator().manual_seed(seed)
        plane = torch.randn(rows.shape[-1], rank, dtype=torch.float64, generator=generator)
        rows = rows @ (plane / rank**0.5).to(rows.device)
    # Makes no table of squares.
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return lengths.square()
