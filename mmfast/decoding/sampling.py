"""Choice of a token from logits: the same processors for backbone and drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError


@dataclass(frozen=True)
class Sampling:
    """Choices of a stream; SpecError for a number outside its range.

    A `temperature` of 0 takes the likeliest token. `top_k` keeps the k likeliest, 0 keeps all;
    `top_p` the likeliest that together reach this probability, `min_p` those with at least this
    share of the probability of the likeliest. `penalty` divides the logits of tokens that were said
    before (multiplies negative ones), `penalty_window` tokens back; 0 is all.
    `seed` is that of the first stream of a batch; the next ones count on.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    penalty_window: int = 0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (self.temperature, 0 <= self.temperature < float("inf"), "0 or more"),
            "top_k": (self.top_k, self.top_k >= 0, "0 (all) or more"),
            "top_p": (self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (self.min_p, 0 <= self.min_p <= 1, "0 (all) to 1"),
            "penalty": (self.penalty, 0 < self.penalty < float("inf"), "above 0; 1 is none"),
            "penalty_window": (self.penalty_window, self.penalty_window >= 0, "0 (all) or more"),
        }
        for name, (value, fine, choices) in ranges.items():
            if not fine:
                raise SpecError(f"{name} {value!r} is not possible; use a number {choices}")

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is taken."""
        return self.temperature == 0

    def prefix(self, history: Sequence[int]) -> Sequence[int]:
        """Return the tokens that the penalty looks at."""
        if self.penalty == 1:
            return ()
        return history[-self.penalty_window :] if self.penalty_window else history


def process(
    logits: Tensor,
    sampling: Sampling,
    prefixes: Sequence[Sequence[int]],
    start: int = 0,
    check: bool = True,
) -> Tensor:
    """Apply penalty, temperature, top-k, min-p and top-p, in order, to logits `[n, V]` of n places.

    A temperature of 0 leaves only the penalty. `prefixes` are per place the tokens before it, ids
    of the vocabulary; `start` is the id of the first of the V rows; `check` looks for NaN and
    infinity, which waits for the device. The result is at least float32, with -inf for removed
    tokens. ModelError: a place has NaN, infinity, or no token left to choose from.
    """
    found = logits if logits.dtype == torch.float64 else logits.float()
    if check and not torch.isfinite(found.amax(-1)).all():
        raise ModelError(not_finite())
    if sampling.penalty != 1:
        found = torch.stack(
            [
                _penalised(row, sampling.prefix(prefix), sampling.penalty, start)
                for row, prefix in zip(found, prefixes, strict=True)
            ]
        )
    if sampling.greedy:
        return found
    if sampling.temperature != 1:  # from the peak down, so that nothing overflows
        found = (found - found.amax(-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < found.shape[-1]:
        least = found.topk(sampling.top_k, -1).values[..., -1:]
        found = found.masked_fill(found < least, -torch.inf)
    if sampling.min_p > 0:
        peak = found.amax(-1, keepdim=True)
        found = found.masked_fill(found < peak + math.log(sampling.min_p), -torch.inf)
    return _nucleus(found, sampling.top_p) if sampling.top_p < 1 else found


def not_finite() -> str:
    """Return the error text for logits that are NaN, infinite, or -inf throughout."""
    return (
        "the logits of the model are NaN or infinite, so no token can be chosen; "
        "check its weights, or run it in float32 or bfloat16 instead of float16"
    )


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw one token per row by inverse transform: `[..]` int64.

    Probabilities `[.., V]` need not sum to 1; a token of 0 is never drawn unless all are 0.
    `uniforms` are `[..]` in [0, 1).
    """
    sums = probabilities.double().cumsum(-1)
    total = sums[..., -1:]
    places = torch.searchsorted(sums, uniforms.double()[..., None] * total, right=True)
    last = (sums < total).sum(-1, keepdim=True)  # the last token that adds anything
    return torch.minimum(places, last).squeeze(-1)


def _penalised(row: Tensor, prefix: Sequence[int], penalty: float, start: int) -> Tensor:
    seen = sorted({token - start for token in prefix if 0 <= token - start < len(row)})
    if not seen:
        return row
    index = torch.tensor(seen, device=row.device)
    old = row[index]
    return row.index_copy(0, index, torch.where(old < 0, old * penalty, old / penalty))


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    ranked, order = logits.sort(-1, descending=True)
    before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
    gone = before >= top_p
    gone[..., 0] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)
