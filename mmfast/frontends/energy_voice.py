"""A detector that knows loud from quiet and nothing else, for where silero-vad is not installed."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 512
_QUIETEST = -60.0  # dB of full scale: below it nothing counts as loud
_MARGIN = 12.0  # dB above the noise that count as half a voice
_SLOPE = 2.0  # dB
_RISE = 0.05  # dB per window that the noise is thought to rise while it is loud


class Energy:
    """How far a window stands out of the noise before it; any loud noise passes for speech.

    The state is the level of the noise, `[B]` in dB: it falls at once and rises 1.5 dB a second.
    """

    window = WINDOW

    def start(self, batch: int) -> Tensor:
        """Noise is thought to be low at first."""
        return torch.full((batch,), _QUIETEST)

    def step(self, state: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Samples `[B, 512]` in -1..1 to what passes for probabilities `[B]`."""
        moved = samples - samples.mean(dim=1, keepdim=True)  # an offset is no sound
        level = 10.0 * moved.square().mean(dim=1).clamp(min=1e-12).log10()
        noise = torch.minimum(state + _RISE, level).clamp(min=_QUIETEST)
        return noise, ((level - noise - _MARGIN) / _SLOPE).sigmoid()

    def reset(self, state: Tensor, rows: Tensor) -> Tensor:
        """State with some streams (`[B]` bool) started anew."""
        return state.masked_fill(rows, _QUIETEST)
