"""Codebooks of a speech language model: the delay pattern of their codes, and their loss.

Codebook q with delay d puts its code of frame t at step t + d. Moshi (arXiv 2410.00037) delays
the acoustic codebooks by one step after the semantic one; MusicGen delays book q by q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError


def check_delays(delays: Sequence[int], books: int) -> tuple[int, ...]:
    """Return the delays as a tuple: one whole number of at least 0 per codebook."""
    found = tuple(int(d) for d in delays)
    if len(found) != books or min(found, default=0) < 0:
        raise SpecError(
            f"delays {list(delays)!r} do not fit {books} codebooks; give one number >= 0 for each"
        )
    return found


def delay(codes: Tensor, delays: Sequence[int], fill: int) -> Tensor:
    """Spread frames `[B, Q, T]` over steps `[B, Q, T + max(delays)]`, elsewhere `fill`."""
    shifts = check_delays(delays, codes.shape[1])
    batch, books, frames = codes.shape
    steps = codes.new_full((batch, books, frames + max(shifts)), fill)
    for book, shift in enumerate(shifts):
        steps[:, book, shift : shift + frames] = codes[:, book]
    return steps


@dataclass(frozen=True, eq=False)
class DelayState:
    """The last steps of a stream."""

    ring: Tensor  # `[B, Q, R]` with R one more than the longest delay; entry R - 1 is the newest
    seen: Tensor  # `[B]` int64 steps so far


class DelayRing:
    """The delay pattern one step at a time, for streams that may start at different steps.

    `spread` turns the latest frame into the model's input of this step; `gather` turns the model's
    output of this step into the latest whole frame.
    """

    def __init__(self, delays: Sequence[int], fill: int) -> None:
        self.delays = check_delays(delays, len(delays))
        self.longest = max(self.delays)
        self.fill = fill

    def start(self, batch: int = 1, device: torch.device | str | None = None) -> DelayState:
        """Return the state before the first step."""
        shape = (batch, len(self.delays), self.longest + 1)
        ring = torch.full(shape, self.fill, dtype=torch.long, device=device)
        return DelayState(ring, torch.zeros(batch, dtype=torch.long, device=device))

    def spread(self, state: DelayState, codes: Tensor) -> tuple[DelayState, Tensor]:
        """Add frame `[B, Q]`; return of each codebook the code `delay` frames back, `[B, Q]`."""
        state = self._push(state, codes)
        return state, self._look([self.longest - d for d in self.delays], state.ring)

    def gather(self, state: DelayState, codes: Tensor) -> tuple[DelayState, Tensor, Tensor]:
        """Add step `[B, Q]`; return the whole frame `[B, Q]`, and `[B]` bool where there is one."""
        state = self._push(state, codes)
        return state, self._look(list(self.delays), state.ring), state.seen > self.longest

    def _push(self, state: DelayState, codes: Tensor) -> DelayState:
        ring = torch.cat([state.ring[:, :, 1:], codes[:, :, None]], dim=2)
        return DelayState(ring, state.seen + 1)

    def _look(self, places: list[int], ring: Tensor) -> Tensor:
        at = torch.tensor(places, device=ring.device)[None, :, None]
        return ring.gather(2, at.expand(len(ring), -1, 1))[:, :, 0]


@dataclass(frozen=True, eq=False)
class CodeLoss:
    """Loss of a head."""

    loss: Tensor  # scalar to minimise
    each: Tensor  # `[K]` mean cross-entropy per codebook, unweighted; 0 where there is no target
    right: Tensor  # `[K]` share of codes whose likeliest entry is the true one


def _log_probability(logits: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each code, 0 where there is none, and where there is one, `[..., K]`."""
    there = (codes >= 0) & (codes < logits.shape[-1])
    target = codes.where(there, 0)
    logp = F.log_softmax(logits.float(), -1).gather(-1, target[..., None])[..., 0]
    return logp * there, there


def code_loss(logits: Tensor, codes: Tensor, weights: Tensor | None = None) -> CodeLoss:
    """Weighted mean cross-entropy of logits `[..., K, V]` and codes `[..., K]` in 0..V-1."""
    logp, there = _log_probability(logits, codes)
    lost = -logp
    flat = there.flatten(0, -2)
    number = flat.sum(0).clamp(min=1)  # [K]
    weighted = lost if weights is None else lost * weights
    hits = (logits.argmax(-1) == codes).flatten(0, -2).sum(0)
    each = lost.detach().flatten(0, -2).sum(0) / number
    return CodeLoss(weighted.sum() / there.sum().clamp(min=1), each, hits / number)


@torch.no_grad()
def adaptive_weights(
    logits: Tensor, codes: Tensor, power: float = 0.1, ceiling: float = 0.5
) -> Tensor:
    """Weigh each codebook by the probability that the codebooks before it are right.

    The first codebook weighs 1, codebook q the product of the probabilities of the true codes
    before it, to the power λ (0.1 as published, 0.05 with groups); a code that is likelier than the
    ceiling p_max is left out, and what remains is scaled so that the heaviest code of a frame
    weighs 1. Logits `[..., K, V]` and codes `[..., K]` give `[..., K]`, no gradient.
    """
    logp, there = _log_probability(logits, codes)
    before = F.pad(logp.cumsum(-1)[..., :-1], (1, 0))  # sum over the codebooks in front
    weights = (power * before).exp() * (logp.exp() <= ceiling) * there
    most = weights.amax(-1, keepdim=True)
    return weights / torch.where(most > 0, most, 1.0)
