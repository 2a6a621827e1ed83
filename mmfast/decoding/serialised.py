"""Several texts in one stream of words with marks of the task, and back: serialised output.

The stream is that of joint t-SOT (Papi et al. 2023, 2307.03354): the words of a transcript and of
its translation alternate, and a mark tells whose words follow. The words of two speakers at once
are one stream in order of their ends (t-SOT, Kanda et al. 2022, 2202.00842): a mark between two
words tells that the next is the other speaker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from mmfast.core.errors import SpecError

HEARD, SAID = "<heard>", "<said>"  # the words of a speaker, and their translation
CHANGE = "<change>"  # the next word is the other speaker's
CHANNELS = 2  # a change names nobody, so there is one other


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


def serialise_channels(channels: Sequence[Sequence[TimedWord]]) -> list[TimedWord]:
    """Return the words of two channels in order of their ends, with a mark at each change.

    The first channel is on before any mark; a mark has the time of the word behind it. Of words
    that end together those of the first channel come first.

    Args:
        channels: At most two, each in order of `at`.

    Raises:
        SpecError: More channels, words out of order, or a word that is the mark.
    """
    if len(channels) > CHANNELS:
        raise SpecError(
            f"{len(channels)} channels; a mark of change tells {CHANNELS} apart: give at most those"
        )
    for channel in channels:
        if any(after.at < before.at for before, after in pairwise(channel)):
            raise SpecError("words of a channel are out of order; sort them by their ends")
        if any(word.text == CHANGE for word in channel):
            raise SpecError(f"a word is {CHANGE!r}, the mark of a change; leave it out")
    sources = [(word.at, number, word) for number, own in enumerate(channels) for word in own]
    found, on = list[TimedWord](), 0
    for at, number, word in sorted(sources, key=lambda each: each[:2]):
        found += [TimedWord(CHANGE, at)] * (number != on) + [word]
        on = number
    return found


@dataclass
class ChannelSplitter:
    """Parts a stream with marks of change into its two channels while it comes.

    Attributes:
        channels: Words so far, of the channel that is on first and of the other.
        on: Number of the channel that the next word is of.
    """

    channels: tuple[list[TimedWord], ...] = field(init=False)
    on: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.channels = tuple([] for _ in range(CHANNELS))

    def push(self, word: TimedWord) -> int | None:
        """Take a word or a mark; return the channel of a word."""
        if word.text == CHANGE:
            self.on = CHANNELS - 1 - self.on
            return None
        self.channels[self.on].append(word)
        return self.on


def split_channels(stream: Iterable[TimedWord]) -> tuple[list[TimedWord], ...]:
    """Return the two channels of a stream; the inverse of `serialise_channels`."""
    splitter = ChannelSplitter()
    for word in stream:
        splitter.push(word)
    return splitter.channels
