"""Text to sentences that the speech model can say at once, while it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from mmfast.core.errors import MmfastError
from mmfast.frontends.spoken import SpokenStream
from mmfast.models.speech_layout import MARKS

ENDS = (".", "?")
PAUSE = 12  # groups behind which a comma ends a sentence, too
MOST = 24  # groups of a sentence


class Sentence:
    """Words and marks of a sentence as they come; ends with a full stop if nothing else.

    Attributes:
        said: What has been handed over so far, marks that were added left out.
    """

    def __init__(self, source: Iterator[str]) -> None:
        self._source, self.said = source, list[str]()
        self._over = False

    def __iter__(self) -> Iterator[str]:
        """The words and marks."""
        last = ""
        while not self._over:
            group = next(self._source, None)
            if group is None:
                break
            self.said.append(group)
            last = group
            many = len(self.said)
            self._over = group in ENDS or (many >= PAUSE and group in MARKS) or many >= MOST
            yield group
        self._over = True
        if last and last not in MARKS:
            yield "."


def sentences(text: str | Iterable[str]) -> Iterator[Sentence]:
    """Sentences of a text, each to be used up before the next is asked for.

    Raises:
        MmfastError: The text is none.
    """
    source = groups(text)
    while (first := next(source, None)) is not None:
        yield Sentence(chain([first], source))


def groups(text: str | Iterable[str]) -> Iterator[str]:
    """Words and marks of text, or of pieces of text as they come."""
    stream = SpokenStream()
    for piece in [text] if isinstance(text, str) else text:
        if not isinstance(piece, str):
            raise MmfastError(f"text holds a {type(piece).__name__}; give strings")
        yield from stream.push(piece)
    yield from stream.finish()
