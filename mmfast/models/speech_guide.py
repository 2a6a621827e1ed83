"""Who says what comes next while the speech model speaks: text by turns with its sound.

The guide hands the text over two groups ahead of the sound, one group for every `<next>`; what
kind a token is of is its decision, not the model's. Text may come as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mmfast.decoding.guide import Open
from mmfast.models.speech_layout import LOOK_AHEAD, SpeechLayout

LONGEST = 70  # frames of one group; a word of the domain has 25 at most
MOST = 48  # groups of a reply that the model words itself


class SpeechGuide:
    """Leads one utterance; a `mmfast.decoding.guide.Guide`.

    Args:
        layout: Rows of the model.
        groups: Ids of each word and mark as they come; None where the model chooses the text.
        longest: Frames of one group before it is ended by force.
        most: Groups that the model may choose.

    Attributes:
        done: All is said.
        draft_rows: The audio rows.
        text: Ids of the text so far, the model's own too.
    """

    def __init__(
        self,
        layout: SpeechLayout,
        groups: Iterator[list[int]] | None = None,
        *,
        longest: int = LONGEST,
        most: int = MOST,
    ) -> None:
        self.layout, self.done = layout, False
        self.draft_rows = slice(layout.texts, layout.total)
        self._texts = slice(layout.id("<done>"), layout.texts)
        self._finish = layout.id("<done>")
        self._source, self._longest, self._most = groups, longest * layout.books, most
        self._peeked: list[list[int]] = []  # taken from the source, not yet handed over
        self._ended = False  # `<done>` is there
        self._owed: list[int] = []  # to be forced now
        self._choices = 0 if groups is not None else LOOK_AHEAD + 1  # groups the model owes
        self.text: list[int] = []
        self._groups = 0  # that are there
        self._spoken = 0  # whose sound has ended
        self._length = 0  # tokens of the sound of this one
        self._break = False  # it has been ended by force

    def opening(self) -> list[int]:
        """The first groups of a given text: the end of the prompt.

        Returns:
            Their ids; empty where there is nothing to say.
        """
        first: list[int] = []
        for _ in range(LOOK_AHEAD + 1):
            first += self._hand()
        if not self._ended and self._peek(0) is None:
            first += self._hand()
        if not self._groups:
            self.done = True
        return first

    def forced(self) -> Sequence[int]:
        """Text that is owed, and the end of a sound that would not end."""
        found = self._owed
        self._owed = []
        if self._break:
            self._break = False
            found = [self.layout.next, *found, *self._turn()]
        return found

    def ahead(self, drafts: Sequence[int]) -> Sequence[int]:
        """What would be owed behind these drafts."""
        if self._source is None or self._length + len(drafts) >= self._longest:
            return ()
        found, depth, ended = list(self._owed), 0, self._ended
        turns = sum(token in (self.layout.next, self.layout.end) for token in drafts)
        for _ in range(turns):
            if ended:
                break
            group = self._peek(depth)
            found += [self._finish] if group is None else group
            ended, depth = group is None, depth + 1
        return found

    def rows(self) -> slice:
        """Text rows where the model owes a group, else audio rows."""
        return self._texts if self._choices else self.draft_rows

    def stops(self, token: int) -> bool:
        """At the end of a sound, where text is to follow."""
        owes = not self._ended or bool(self._owed)  # `<done>` is text that is to follow, too
        return token in (self.layout.next, self.layout.end) and owes

    def book(self, token: int) -> int | None:
        """The codebook of a code."""
        place = token - self.layout.base
        return place // self.layout.entries if place >= 0 else None

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens that stand."""
        for token in tokens:
            if token < self.layout.texts:
                self._choose(token)
            elif token >= self.layout.base:
                self._length += 1
                self._break = self._length >= self._longest
            elif not self.done:
                self._owed += self._turn()

    def _turn(self) -> list[int]:
        """A group's sound has ended; what is owed now."""
        self._length, self._break = 0, False
        self._spoken += 1
        if self._ended and self._spoken >= self._groups:
            self.done = True
            return []
        if self._source is not None:
            return self._hand()
        self._choices += not self._ended
        return []

    def _choose(self, token: int) -> None:
        """A token of the model's own text."""
        if token == self._finish:
            self._ended, self._choices = True, 0
            self.done = self._spoken >= self._groups
            return
        self.text.append(token)
        if self.layout.ends_group(token):
            self._groups += 1
            self._choices -= 1
            if self._groups >= self._most and self._choices == 0:
                self._ended = True
                self._owed += [self._finish]

    def _peek(self, depth: int) -> list[int] | None:
        """The group so many behind the next one; None behind the last."""
        while len(self._peeked) <= depth and self._source is not None:
            group = next(self._source, None)
            if group is None:
                break
            if group:
                self._peeked.append(group)
        return self._peeked[depth] if depth < len(self._peeked) else None

    def _hand(self) -> list[int]:
        """Ids of the next group, `<done>` behind the last, nothing behind that."""
        if self._ended:
            return []
        group = self._peek(0)
        if group is None:
            self._ended = True
            return [self._finish]
        del self._peeked[0]
        self._groups += 1
        self.text += group
        return group


class HearingGuide(Open):
    """Leads what is heard: text to its `<done>`; no drafts, they are sound."""

    def __init__(self, layout: SpeechLayout, limit: int) -> None:
        self._done = layout.id("<done>")
        super().__init__(limit, (self._done,))
        self._texts = slice(self._done, layout.texts)
        self.draft_rows = slice(layout.texts, layout.total)

    def rows(self) -> slice:
        """Text rows."""
        return self._texts

    @property
    def words(self) -> list[int]:
        """Ids of what was heard."""
        return [token for token in self.said if token != self._done]

    @property
    def owed(self) -> list[int]:
        """The `<done>` that is missing where the limit came first."""
        return [] if self._done in self.said else [self._done]
