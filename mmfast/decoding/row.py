"""One stream of a decoder: what it has said, what waits to be read, how it judges drafts.

The number of drafts that is worth its time follows from what was accepted and what passes cost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.decoding.accept import AcceptRule, Stats, accept_sampled, accept_typical
from mmfast.decoding.sampling import Sampling, draw, none_left, not_finite, process

_BUCKETS = 10
_PRIOR = 4.0  # tries that a guess about an untried confidence counts for
_FADE = 0.97
_PROBE = 16  # main passes after which one draft is tried whatever was measured


@dataclass
class Costs:
    """Costs of a draft module, and of one more token in a main pass.

    They are relative to a main pass over one token; where `live`, they follow the times that `time`
    gets. `mains` and `drafts` are smoothed seconds of a main pass over one token (0 is not known)
    and of a draft module.
    """

    draft: float = 0.1
    wide: float = 0.03
    live: bool = False
    mains: dict[int, float] = field(default_factory=dict)
    drafts: float = 0.0

    def time(self, width: int, main: float, modules: int, drafting: float) -> None:
        """Take in a cycle: seconds of a main pass over `width` tokens and of `modules` drafts."""
        if width <= 32:  # prompts say nothing about catching up
            self.mains[width] = _smooth(self.mains.get(width, 0.0), main)
        if modules:
            self.drafts = _smooth(self.drafts, drafting / modules)
        one = self.mains.get(1, 0.0)
        if not self.live or not self.drafts or not (one or self.mains):
            return
        narrow, widest = min(self.mains), max(self.mains)
        if widest > narrow:
            slope = (self.mains[widest] - self.mains[narrow]) / (widest - narrow)
        else:
            slope = self.wide * self.mains[narrow]
        one = one or max(self.mains[narrow] - slope * (narrow - 1), 0.5 * self.mains[narrow])
        self.draft = min(1.0, self.drafts / one)
        self.wide = min(1.0, max(0.0, slope / one))


def _smooth(old: float, new: float) -> float:
    # Slower than all before is most often another process: such times count less.
    return new if not old else old + (0.05 if new > old else 0.3) * (new - old)


class DraftLength:
    """Decides, draft by draft, whether one more is worth it.

    One more draft costs a module and a wider main pass. It gains a token if it and all before it
    stand. How sure a draft was of itself says how likely it stands, once that was measured.
    Drafts less confident than `least` are not made. Before that was measured, one of confidence c
    is expected to stand with c ** `power`: 1 where it must be the likeliest, less under looser
    rules.
    """

    def __init__(self, costs: Costs, least: float = 0.0, power: float = 1.0) -> None:
        self.costs, self.least, self.power = costs, least, power
        self._tries = [0.0] * _BUCKETS
        self._stood = [0.0] * _BUCKETS
        self._tokens, self._spent = 1.0, 1.0  # of late: their ratio is what has to be beaten
        self._idle = 0
        self._chance = 1.0  # that all drafts of this run stand

    def expected(self, confidence: float) -> float:
        """The chance that a draft of this confidence stands, by what was measured."""
        bucket = _bucket(confidence)
        guess: float = _PRIOR * confidence**self.power
        return (self._stood[bucket] + guess) / (self._tries[bucket] + _PRIOR)

    @property
    def mean(self) -> float:
        """The chance that a draft stands, whatever its confidence."""
        stood: float = sum(self._stood) + _PRIOR * 0.7**self.power
        return stood / (sum(self._tries) + _PRIOR)

    def begin(self, most: int) -> int:
        """Start a run of at most `most` drafts; 0 where not even one is worth it."""
        self._chance = 1.0
        if not most:
            return 0
        if self.worth(self.mean) or self._idle >= _PROBE:
            self._idle = 0
            return most
        self._idle += 1
        return 0

    def doubts(self, confidence: float) -> bool:
        """Test if the run ends in front of a draft of this confidence.

        The confidence is that of the likeliest token, whichever is drawn: the rule of sampling
        stays exact, since where a run ends does not depend on what it would have said.
        """
        return confidence < self.least

    def more(self, confidence: float) -> bool:
        """Test if another draft is worth it behind one of this confidence."""
        self._chance *= self.expected(confidence)
        return self.worth(self._chance * self.mean)

    def end(self, confidences: list[float], accepted: int) -> None:
        """Take in how a run went: drafts behind the first that fell say nothing."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            bucket = _bucket(confidence)
            self._tries[bucket] = _FADE * self._tries[bucket] + 1
            self._stood[bucket] = _FADE * self._stood[bucket] + (i < accepted)
        spent = 1 + (self.costs.draft + self.costs.wide) * len(confidences)
        self._tokens = _FADE * self._tokens + accepted + 1
        self._spent = _FADE * self._spent + spent

    def worth(self, chance: float) -> bool:
        """Test if a draft that stands with this chance pays for itself."""
        rate = self._tokens / self._spent
        return chance >= (self.costs.draft + self.costs.wide) * max(1.0, rate)


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, max(0, int(confidence * _BUCKETS)))


class Guide(Protocol):
    """Leads one stream until it is `done`; `push` gets every token that stands, once, in order.

    Drafts are of `draft_rows` of the vocabulary, the same all along.
    """

    done: bool
    draft_rows: slice

    def forced(self) -> Sequence[int]:
        """Tokens that must come now, handed over once; `push` does not get them."""

    def ahead(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return what `forced` would if these drafts stood; () where not known. Changes nothing."""

    def rows(self) -> slice:
        """Rows of the vocabulary that the next token is of, behind what is forced.

        Drafts are made where this is `draft_rows`, so it must be that at every place that a
        draft may stand at: behind every token that `stops` is false of.
        """

    def guesses(self, token: int, place: int) -> slice:
        """Rows of `draft_rows` that the draft number `place` behind `token` is guessed from.

        Fewer rows are fewer products; what stands is judged over all rows.
        """

    def stops(self, token: int) -> bool:
        """Test if a draft run that is to be exact must end at this token."""

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens that stand."""

    def book(self, token: int) -> int | None:
        """The codebook of a token, for the acceptance per codebook; None where it has none."""


class Open:
    """No guidance but an end: `limit` tokens of `rows`, or one of `ends`; drafts anywhere."""

    def __init__(self, limit: int, ends: Collection[int] = (), rows: slice | None = None) -> None:
        self.draft_rows = slice(None) if rows is None else rows
        self.limit, self.ends = limit, frozenset(ends)
        self.said: list[int] = []
        self.done = limit < 1

    def forced(self) -> Sequence[int]:
        """Nothing."""
        return ()

    def ahead(self, drafts: Sequence[int]) -> Sequence[int]:
        """Nothing."""
        return ()

    def rows(self) -> slice:
        """All of its rows."""
        return self.draft_rows

    def guesses(self, token: int, place: int) -> slice:
        """All of its rows."""
        return self.draft_rows

    def stops(self, token: int) -> bool:
        """At an end."""
        return token in self.ends

    def push(self, tokens: Sequence[int]) -> None:
        """Count, and look for an end."""
        for token in tokens:
            self.said.append(token)
            self.done = self.done or len(self.said) >= self.limit or token in self.ends

    def book(self, token: int) -> int | None:
        """None."""
        return None


@dataclass(eq=False)
class DecodeRow:
    """State of one stream.

    `before` are embeddings `[n, D]` that wait to be read, in front of `unseen`: tokens that stand
    (`sure` of them), then `drafts`, then what is forced if the drafts stand (`ahead`). `chances`
    are the probabilities `[rows]` that drafts were drawn from, `confidences` how sure they were of
    themselves. `history` has all tokens that stand, of prompt, guide and model; `said` those of the
    step that is being made.
    """

    guide: Guide
    sampling: Sampling
    rule: AcceptRule
    rng: random.Random
    length: DraftLength
    vocabulary: int = 0
    before: Tensor | None = None
    unseen: list[int] = field(default_factory=list)
    sure: int = 0
    drafts: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    chances: list[Tensor] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    said: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    accepted: int = 0
    forced: int = 0

    @property
    def waiting(self) -> int:
        """Tokens that wait to be read, embeddings too."""
        return len(self.unseen) + (0 if self.before is None else len(self.before))

    def rows(self) -> slice:
        """Rows of the vocabulary of the place behind what waits."""
        return self.guide.draft_rows if self.drafts else self.guide.rows()

    def owed(self) -> list[int]:
        """Take the tokens that are forced now: they stand."""
        tokens = list(self.guide.forced())
        self.history += tokens
        self.forced += len(tokens)
        return tokens

    def take_forced(self) -> None:
        """Put in what is forced now."""
        if not self.drafts and (tokens := self.owed()):
            self.unseen += tokens
            self.sure = len(self.unseen)

    def say(self, token: int) -> bool:
        """Push a token that stands to the guide; False where it was the last one."""
        self.guide.push((token,))
        self.said.append(token)
        self.history.append(token)
        return not self.guide.done

    def read(self, left: list[int]) -> None:
        """All that waited has been read; `left` is forced and still to be."""
        self.before, self.unseen, self.sure = None, list(left), len(left)
        self.drafts, self.ahead, self.chances, self.confidences = [], [], [], []

    def verified(self, accepted: int) -> None:
        """Count how the drafts went."""
        if not self.drafts:
            return
        for i, draft in enumerate(self.drafts[: accepted + 1]):
            self.stats.verified(i, self.guide.book(draft), i < accepted)
        self.length.end(self.confidences, accepted)

    def drop_drafts(self) -> None:
        """Forget what does not stand."""
        del self.unseen[self.sure :]
        self.drafts, self.ahead, self.chances, self.confidences = [], [], [], []

    # --- judging ------------------------------------------------------------------------------

    def wanted(self) -> list[int]:
        """Places, counted in what waits, whose logits decide: of every draft and behind all."""
        first = self.waiting - len(self.unseen) + self.sure - 1
        end = first + len(self.drafts)
        return [*range(first, end), end + len(self.ahead)]

    def judge(self, logits: Tensor, start: int) -> tuple[int, int]:
        """Count accepted drafts and choose the token behind, from logits `[n + 1, rows]`."""
        n = len(self.drafts)
        if self.sampling.plain:
            typical, double = n and self.rule.kind == "typical", logits.dtype == torch.float64
            found = (logits if double else logits.float()).softmax(-1) if typical else logits
            peaks, best = found.max(-1)
            if not all(map(math.isfinite, peaks.tolist())):
                raise ModelError(not_finite())
            likeliest = [token + start for token in best.tolist()]
            if not typical:
                return self._leading(likeliest)
            accepted = self._typical(found, start)
            return accepted, likeliest[accepted]
        prefixes: list[Sequence[int]] = []
        if self.sampling.penalty != 1 or self.sampling.processors:
            prefixes = [self.history + self.drafts[:i] for i in range(n + 1)]
        found = self._processed(logits, prefixes, start)
        if self.rule.kind == "typical":
            accepted = self._typical(p := found.softmax(-1), start)
            token = int(self._draw(p[accepted])) + start
        elif self.sampling.greedy:
            likeliest = [token + start for token in found.argmax(-1).tolist()]
            accepted, token = self._leading(likeliest)
        else:
            accepted, token = self._sampled(found.softmax(-1), start)
        # Behind a draft that falls nothing need be left.
        if self.sampling.processors and (found[: accepted + 1].amax(-1) == -torch.inf).any():
            raise ModelError(none_left())
        return accepted, token

    def _processed(self, logits: Tensor, prefixes: Sequence[Sequence[int]], start: int) -> Tensor:
        """Logits `[n, rows]` behind prefixes as they are drawn from."""
        books: list[int | None] = []
        if len(self.sampling.heats) > 1:
            books = [self.guide.book(token + start) for token in logits.argmax(-1).tolist()]
        return process(
            logits, self.sampling, prefixes, start, books=books, vocabulary=self.vocabulary
        )

    def _leading(self, best: list[int]) -> tuple[int, int]:
        accepted = 0
        while accepted < len(self.drafts) and self.drafts[accepted] == best[accepted]:
            accepted += 1
        return accepted, best[accepted]

    def _typical(self, p: Tensor, start: int) -> int:
        if not self.drafts:
            return 0
        places = torch.tensor(self.drafts, device=p.device).sub_(start)
        return accept_typical(places, p[:-1], self.rule.epsilon)

    def _draw(self, p: Tensor) -> Tensor:
        return p.argmax() if self.sampling.greedy else draw(p, self._uniforms(1, p)[0])

    def _sampled(self, p: Tensor, start: int) -> tuple[int, int]:
        n = len(self.drafts)
        u = self._uniforms(n + 1, p)
        if not n:
            return 0, int(draw(p[0], u[0])) + start
        drafts = torch.tensor([self.drafts], device=p.device) - start
        q = torch.stack(self.chances)[None]
        count = torch.tensor([n], device=p.device)
        accepted, token = accept_sampled(drafts, p[None], q, count, u[None, :n], u[n:])
        return int(accepted), int(token) + start

    def choose(self, logits: Tensor, start: int) -> int:
        """The token of one place, `[rows]`, behind all that stands."""
        held, self.drafts = self.drafts, []
        _, token = self.judge(logits[None], start)
        self.drafts = held
        return token

    def draw_draft(self, logits: Tensor, start: int, doubts: bool = True) -> int | None:
        """A draft from logits `[rows]`, remembered with its chances; None where it is in doubt."""
        asked = self.sampling.penalty != 1 or self.sampling.processors
        prefixes = [self.history + self.drafts] if asked else []
        found = self._processed(logits[None], prefixes, start)[0]
        if self.sampling.processors and found.amax() == -torch.inf:
            return None
        q = found.softmax(-1)
        confidence = float(q.max())
        if doubts and self.length.doubts(confidence):
            return None
        place = int(self._draw(q))
        self.chances.append(q)
        self.keep_draft(place + start, confidence)
        return place + start

    def keep_draft(self, token: int, confidence: float) -> None:
        """Remember a draft."""
        self.drafts.append(token)
        self.confidences.append(confidence)

    def _uniforms(self, n: int, like: Tensor) -> Tensor:
        numbers = [self.rng.random() for _ in range(n)]
        return torch.tensor(numbers, dtype=torch.float64, device=like.device)


def new_row(
    guide: Guide,
    sampling: Sampling,
    rule: AcceptRule,
    number: int,
    length: DraftLength,
    vocabulary: int,
) -> DecodeRow:
    """A stream that has said nothing; `number` counts the streams of a batch."""
    rng = random.Random(sampling.seed + number)
    return DecodeRow(guide, sampling, rule, rng, length, vocabulary)
