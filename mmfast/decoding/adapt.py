"""Number of drafts that is worth its time, by what was accepted and what passes cost."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._tries = [0.0] * _BUCKETS
        self._stood = [0.0] * _BUCKETS
        self._tokens, self._spent = 1.0, 1.0  # of late: their ratio is what has to be beaten
        self._idle = 0
        self._chance = 1.0  # that all drafts of this run stand

    def expected(self, confidence: float) -> float:
        """The chance that a draft of this confidence stands, by what was measured."""
        bucket = _bucket(confidence)
        return (self._stood[bucket] + _PRIOR * confidence) / (self._tries[bucket] + _PRIOR)

    @property
    def mean(self) -> float:
        """The chance that a draft stands, whatever its confidence."""
        return (sum(self._stood) + _PRIOR * 0.7) / (sum(self._tries) + _PRIOR)

    def begin(self, most: int) -> int:
        """Start a run of at most `most` drafts; 0 where not even one is worth it."""
        self._chance = 1.0
        if not most:
            return 0
        if self._worth(self.mean) or self._idle >= _PROBE:
            self._idle = 0
            return most
        self._idle += 1
        return 0

    def more(self, confidence: float) -> bool:
        """Test if another draft is worth it behind one of this confidence."""
        self._chance *= self.expected(confidence)
        return self._worth(self._chance * self.mean)

    def end(self, confidences: list[float], accepted: int) -> None:
        """Take in how a run went: drafts behind the first that fell say nothing."""
        for i, confidence in enumerate(confidences[: accepted + 1]):
            bucket = _bucket(confidence)
            self._tries[bucket] = _FADE * self._tries[bucket] + 1
            self._stood[bucket] = _FADE * self._stood[bucket] + (i < accepted)
        spent = 1 + (self.costs.draft + self.costs.wide) * len(confidences)
        self._tokens = _FADE * self._tokens + accepted + 1
        self._spent = _FADE * self._spent + spent

    def _worth(self, chance: float) -> bool:
        rate = self._tokens / self._spent
        return chance >= (self.costs.draft + self.costs.wide) * max(1.0, rate)


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, max(0, int(confidence * _BUCKETS)))
