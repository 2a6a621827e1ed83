"""Quant: the same tokens in fewer bits."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.spec import Budget
from mmfast.core.tokens import Tokens
from mmfast.ops.quantisation import BITS, Quantiser, check_bits
from mmfast.ops.ranking import stable_topk


@policy("quant", paper="2402.02750", needs=(), adaptive=True, role="store", moment="always")
def quant(bits: Budget, *, group: int = 32, residual: int = 128) -> Quantiser:
    """Store keys and values in 8, 4 or 2 bits, the most recent tokens as they are.

    After KIVI (Liu et al., ICML 2024): keys share a scale along the tokens of a channel, values
    along the channels of a token. The scale of a group is asymmetric, between its extremes.

    Args:
        bits: 8, 4 or 2: the place of the budget in `quant:4`.
        group: Numbers that share a scale, 32 as published.
        residual: Most recent tokens that stay in full precision, 128 as published; 0 is none.

    Raises:
        SpecError: Other bits, no group, a negative residual.
    """
    if bits not in BITS or isinstance(bits, float):
        raise SpecError(f"'quant' stores 8, 4 or 2 bits, not {bits}; write 'quant:8' or 'quant:4'")
    if residual < 0:
        raise SpecError(f"knob residual={residual} of 'quant' is negative; choose 0 or more")
    check_bits(bits, group)
    return Quantiser(int(bits), group, residual)


@policy("zipvl", paper="2410.08584", needs=("attn_sum",), adaptive=True, role="score")
def zipvl(
    tokens: Tokens, budget: int | None, *, mass: float = 0.975, high: int = 4, low: int = 2
) -> Reduction:
    """Find the tokens that hold most of a layer's attention; they get more bits than the others.

    He et al. (2024): the number of important tokens is the smallest that holds a given part of the
    attention, so easy layers keep few; the attention that each received from the queries that could
    see it decides which ones. All heads of a layer agree. The cache stores important tokens in
    `high` bits and the others in `low`; nothing leaves, unless `low` is 0, as in the second version
    of the paper.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, one conversation where there is no budget, and `attn_sum`
            `[..., H, N]`, the attention received from all queries. `behind` `[..., N]`, how many
            queries see each token, is N, N - 1 … 1 where it is missing.
        budget: Important tokens; a share is of all tokens. None lets `mass` decide.
        mass: Part of the attention that the important tokens hold, in (0, 1].
        high: Bits of important tokens, 16 (as they are), 8, 4 or 2.
        low: Bits of the others, or 0 to let them go.
    """
    _check(mass, high, low)
    received = tokens.need("attn_sum").double()  # [..., H, N]
    heads = received.shape[-2:-1] if tokens.x.ndim > 2 else torch.Size()
    received = received.sum(-2) if heads else received
    number = _holding(received, mass) if budget is None else budget
    behind = tokens.signal("behind")
    if behind is None:
        behind = torch.arange(tokens.n, 0, -1, device=received.device)
    keep = stable_topk(received / behind, number)
    keep = keep[..., None, :].expand(*keep.shape[:-1], *heads, -1) if heads else keep
    return Reduction.prune(keep, tokens.n)


def _holding(received: Tensor, mass: float) -> int:
    """The smallest number of tokens that hold `mass` of the attention `[..., N]` of every row."""
    sums = received.sort(dim=-1, descending=True).values.cumsum(-1)
    short = sums < mass * sums[..., -1:] * (1 - 1e-12)  # a rounded sum is still the whole
    return min(int(short.sum(-1).max()) + 1, received.shape[-1])


def _check(mass: float, high: int, low: int) -> None:
    if not 0 < mass <= 1:
        raise SpecError(f"knob mass={mass} of 'zipvl' is no share; choose one in (0, 1]")
    if high not in (16, 8, 4, 2) or low not in (16, 8, 4, 2, 0):
        raise SpecError(
            f"knobs high={high}, low={low} of 'zipvl': choose bits 16, 8, 4 or 2, and low=0 to "
            "let tokens go"
        )
