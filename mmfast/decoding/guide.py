"""Who says what kind of token comes next: forced ones, and rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol


class Guide(Protocol):
    """Leads one stream. It is told every token that stands, once, in order.

    Attributes:
        done: Nothing more is to be said.
        draft_rows: Rows of the vocabulary that drafts are of, the same all along.
    """

    done: bool
    draft_rows: slice

    def forced(self) -> Sequence[int]:
        """Tokens that must come now, handed over once; they are not told to `push`."""

    def ahead(self, drafts: Sequence[int]) -> Sequence[int]:
        """What `forced` would say if these drafts stood; changes nothing. () where not known."""

    def rows(self) -> slice:
        """Rows of the vocabulary that the next token is of, behind what is forced.

        Drafts are made where this is `draft_rows`, so it must be that at every place that a
        draft may stand at: behind every token that `stops` is false of.
        """

    def stops(self, token: int) -> bool:
        """Whether a draft run that is to be exact must end at this token."""

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens that stand."""

    def book(self, token: int) -> int | None:
        """The codebook of a token, for the acceptance per codebook; None where it has none."""


class Open:
    """No guidance but an end: any token, drafts anywhere.

    Args:
        limit: Most tokens to say.
        ends: Tokens behind which nothing is said.
        rows: Rows of the vocabulary to choose from.

    Attributes:
        said: Tokens that stand.
    """

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
