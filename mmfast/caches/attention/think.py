"""ThinK: keys without the channels that the queries do not read."""

from __future__ import annotations

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.ops.ragged import ChannelPruner


@policy("think", paper="2407.21018", needs=(), role="store")
def think(channels: int | float, *, window: int = 32, residual: int = 32) -> ChannelPruner:
    """Store keys without the channels that add least to the logits of the last queries.

    Xu et al. (ICLR 2025): what a channel of a head adds to the logits is the length of that channel
    of the queries times that of the keys. The channels that add least are left out of the stored
    keys of the prompt and count as zero when they are read; values and later keys are whole.

    Args:
        channels: Channels of keys that stay, the place of the budget: a share of the width as in
            `think:0.6`, or a number.
        window: Last queries of the prompt that are read, at least 1, 32 as published.
        residual: Last tokens of the prompt whose keys stay whole, 32 as published; 0 is none.

    Raises:
        SpecError: A window of no query, or a negative residual.
    """
    if window < 1 or residual < 0:
        raise SpecError(
            f"knobs window={window}, residual={residual} of 'think': choose at least 1 and 0"
        )
    return ChannelPruner(channels, window, residual)
