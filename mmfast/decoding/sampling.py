"""Choice of a token from logits: the same processors for backbone and drafts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError

# Ids before a place [1, n] and its scores [1, V] to other scores: as those of transformers
Processor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """Choices of a stream; SpecError for a number outside its range.

    A `temperature` of 0 takes the likeliest token; several are one per codebook, and a place is of
    the codebook of its likeliest token. `top_k` keeps the k likeliest, 0 keeps all;
    `top_p` the likeliest that together reach this probability, `min_p` those with at least this
    share of the probability of the likeliest. `penalty` divides the logits of tokens that were said
    before (multiplies negative ones), `penalty_window` tokens back; 0 is all. `processors` are
    those of transformers, one or a `LogitsProcessorList`, each a function of the ids alone: they
    are asked for places behind drafts, too, in any order. `seed` is that of the first stream of a
    batch; the next ones count on.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int = 0
    top_p: float = 1.0
    penalty: float = 1.0
    penalty_window: int = 0
    seed: int = 0
    min_p: float = 0.0
    processors: Processor | Sequence[Processor] = ()

    def __post_init__(self) -> None:
        given = self.processors
        chain = tuple(given) if isinstance(given, list | tuple) else (given,)
        if odd := [each for each in chain if not callable(each)]:
            raise SpecError(f"processors has {odd[0]!r}; give logits processors of transformers")
        object.__setattr__(self, "processors", chain)
        if isinstance(self.temperature, list | tuple):
            object.__setattr__(self, "temperature", tuple(self.temperature))
        heats = self.heats
        fine = len(heats) > 0 and all(0 <= heat < float("inf") for heat in heats)
        ranges = {
            "temperature": (self.temperature, fine, "0 or more, or one per codebook"),
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
        return not any(self.heats)

    @property
    def plain(self) -> bool:
        """True where that token is the likeliest of the model's own logits."""
        return self.greedy and self.penalty == 1 and not self.processors

    @property
    def heats(self) -> tuple[float, ...]:
        """Temperatures of the codebooks; one that is that of all."""
        heat = self.temperature
        return heat if isinstance(heat, tuple) else (heat,)

    def heat(self, book: int | None) -> float:
        """Temperature of a codebook; SpecError where it has none."""
        heats = self.heats
        if len(heats) == 1 or book is None:
            return heats[0]
        if not 0 <= book < len(heats):
            raise SpecError(
                f"temperature {heats} is of {len(heats)} codebooks and a token is of codebook "
                f"{book}, counted from 0; give one temperature, or one for every codebook"
            )
        return heats[book]

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
    *,
    books: Sequence[int | None] = (),
    vocabulary: int = 0,
) -> Tensor:
    """Apply what `generate` applies, in its order, to logits `[.., n, V]` of n places.

    That is penalty, processors, temperature, top-k, top-p and min-p; a temperature of 0 leaves only
    the first two. `prefixes` are per place the tokens before it, ids of the `vocabulary` (its size;
    0 is unknown); `start` is the id of the first of the V rows; `books` are the codebooks of the
    places, where temperatures differ. `check` looks for NaN and infinity, which waits for the
    device. The result is at least float32, with -inf for removed tokens; a processor may remove
    all. ModelError: a place has NaN or infinity.
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
    if sampling.processors:
        found = torch.stack(
            [
                _processed(row, prefix, sampling, start, vocabulary)
                for row, prefix in zip(found, prefixes, strict=True)
            ]
        )
    if sampling.greedy:
        return found
    heats = [sampling.heat(book) for book in books] or [sampling.heat(None)]
    if any(heat != 1 for heat in heats):
        found = _tempered(found, heats)
    if 0 < sampling.top_k < found.shape[-1]:
        least = found.topk(sampling.top_k, -1).values[..., -1:]
        found = found.masked_fill(found < least, -torch.inf)
    if sampling.top_p < 1:
        found = _nucleus(found, sampling.top_p)
    if sampling.min_p > 0:
        peak = found.amax(-1, keepdim=True)
        found = found.masked_fill(found < peak + math.log(sampling.min_p), -torch.inf)
    return found


def not_finite() -> str:
    """Return the error text for logits that are NaN, infinite, or -inf throughout."""
    return (
        "the logits of the model are NaN or infinite, so no token can be chosen; "
        "check its weights, or run it in float32 or bfloat16 instead of float16"
    )


def none_left() -> str:
    """Return the error text for a place at which processors have removed every token."""
    return (
        "the logits processors leave no token to choose from; loosen them, or allow the rows of "
        "the vocabulary that the next token is of"
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


def _processed(
    row: Tensor, prefix: Sequence[int], sampling: Sampling, start: int, vocabulary: int
) -> Tensor:
    """Logits `[V]` of some rows, as processors that know the whole vocabulary change them."""
    end = start + len(row)
    scores = row.new_full((1, max(vocabulary, end, *(token + 1 for token in prefix))), -torch.inf)
    scores[0, start:end] = row
    ids = torch.tensor([list(prefix)], dtype=torch.long, device=row.device)
    for each in sampling.processors:  # type: ignore[union-attr]
        scores = each(ids, scores)
    return scores[0, start:end]


def _tempered(logits: Tensor, heats: Sequence[float]) -> Tensor:
    """Logits `[.., n, V]` by n temperatures, or all by one; of 0, the likeliest alone is left."""
    below = logits - logits.amax(-1, keepdim=True)  # from the peak down, so that nothing overflows
    if len(set(heats)) == 1 and heats[0]:  # a number, so that graphs may be captured
        return below / heats[0]
    best = torch.zeros_like(logits, dtype=torch.bool)
    best = best.scatter(-1, logits.argmax(-1, keepdim=True), True)
    only = torch.zeros_like(logits).masked_fill(~best, -torch.inf)
    if len(set(heats)) == 1:
        return only
    each = torch.tensor(heats, dtype=logits.dtype, device=logits.device)[:, None]
    return torch.where(each == 0, only, below / each.masked_fill(each == 0, 1))


def _nucleus(logits: Tensor, top_p: float) -> Tensor:
    ranked, order = logits.sort(-1, descending=True)
    before = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1)
    gone = before >= top_p
    gone[..., 0] = False
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf)
