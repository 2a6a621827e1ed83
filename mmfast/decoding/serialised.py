"""Several texts in one stream of words with marks of the task, and back: serialised output.

The stream is that of joint t-SOT (Papi et al. 2023, 2307.03354): the words of a transcript and of
its translation alternate, and a mark tells whose words follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mmfast.core.errors import SpecError

HEARD, SAID = "<heard>", "<said>"  # the words of a speaker, and their translation


@dataclass(frozen=True)
class TimedWord:
    """A word, and when it was written, in seconds or words of the source."""

    text: str
    at: float


def serialise(runs: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return runs of words, each behind the mark of its text; empty runs are left out."""
    return [word for mark, words in runs if words for word in (mark, *words)]


def align_streams(source: Sequence[str], target: Sequence[str], needs: Sequence[int]) -> list[str]:
    """Return one stream in which every word of a translation follows the words that it needs.

    Args:
        source: Words of the transcript.
        target: Words of the translation.
        needs: For each of these, how many words of the transcript it needs.

    Raises:
        SpecError: There is no number for each word of the translation.
    """
    if len(needs) != len(target):
        raise SpecError(
            f"{len(needs)} alignments for {len(target)} words; give a number for each word"
        )
    runs, heard, said = list[tuple[str, Sequence[str]]](), 0, 0
    while said < len(target):
        need = min(len(source), max(needs[: said + 1]))
        due = said + 1
        while due < len(target) and needs[due] <= need:
            due += 1
        runs += [(HEARD, source[heard : max(heard, need)]), (SAID, target[said:due])]
        heard, said = max(heard, need), due
    return serialise([*runs, (HEARD, source[heard:])])


@dataclass
class Demultiplexer:
    """Parts one stream into its texts while it comes; words before any mark are of the first.

    Args:
        marks: Mark of each text.
    """

    marks: tuple[str, ...] = (HEARD, SAID)
    texts: dict[str, list[TimedWord]] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = {mark: [] for mark in self.marks}
        self._mark = self.marks[0]

    def push(self, word: str, at: float) -> str | None:
        """Take a word or a mark; return the mark of the text that it was added to."""
        if word in self.texts:
            self._mark = word
            return None
        self.texts[self._mark].append(TimedWord(word, at))
        return self._mark

    def text(self, mark: str) -> str:
        """Return the words of a text so far."""
        return " ".join(word.text for word in self.texts[mark])
