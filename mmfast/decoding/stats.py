"""Results and counts of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PassStats:
    """Tokens that one pass of the backbone, and the drafts behind it, made certain.

    `tokens` now stand, in order, without forced ones; `accepted` drafts are among them. `passes`
    are those of the backbone, `draft_passes` those of draft modules; `forced` counts forced tokens
    that were put in.
    """

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    passes: int
    draft_passes: int
    forced: int = 0


@dataclass
class Stats:
    """Sums over the steps of one stream.

    `tokens` are chosen by the backbone or a module. `by_place` has per draft number, from 0, how
    many were verified and how many stood (a draft behind one that fell is not verified); `by_book`
    the same per codebook. `widths` counts main passes by the tokens they read.
    """

    tokens: int = 0
    forced: int = 0
    passes: int = 0
    draft_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    by_place: list[list[int]] = field(default_factory=list)
    by_book: dict[int, list[int]] = field(default_factory=dict)
    widths: dict[int, int] = field(default_factory=dict)

    def add(self, step: PassStats) -> None:
        """Count a step."""
        self.tokens += len(step.tokens)
        for name in ("forced", "passes", "draft_passes", "drafted", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(step, name))

    def verified(self, place: int, book: int | None, stood: bool) -> None:
        """Count a draft that was verified."""
        while len(self.by_place) <= place:
            self.by_place.append([0, 0])
        counters = [self.by_place[place]]
        if book is not None:
            counters.append(self.by_book.setdefault(book, [0, 0]))
        for counter in counters:
            counter[0] += 1
            counter[1] += stood

    @property
    def acceptance(self) -> float:
        """Share of the verified drafts that stood; 1 where nothing is verified."""
        tried = sum(tries for tries, _ in self.by_place)
        return sum(stood for _, stood in self.by_place) / tried if tried else 1.0
