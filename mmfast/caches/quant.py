"""Quant: the same tokens in fewer bits."""

from __future__ import annotations

from mmfast.core.budget import Budget
from mmfast.core.errors import SpecError
from mmfast.core.registry import register
from mmfast.ops.quantise import BITS, Quantiser, check_bits


@register(
    "quant",
    kind="cache",
    paper="2402.02750",
    needs=(),
    sites=("kv",),
    adaptive=True,
    role="store",
    moment="always",
)
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
