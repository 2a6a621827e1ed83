"""Simultaneous translation: speech is heard again as it grows, and translated before it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.trace import Trace
from mmfast.decoding.simultaneous import WritePolicy, write_policy
from mmfast.frontends.audio.turns import TurnCutter, TurnEvent
from mmfast.models.translation import Translator
from mmfast.voice.ear import RATE

UNSURE = 1  # last words of what is still being said, which may be the beginning of others


@dataclass(frozen=True)
class Translated:
    """Words of a translation, and when they were written.

    Attributes:
        text: What follows the text so far, with the space before it.
        at: Seconds of sound, or words of a text, that had been read.
        words: How many words it has.
        heard: The source of this sentence, as it was understood so far.
        final: True at the end of a sentence, whose text may be "".
    """

    text: str
    at: float
    words: int
    heard: str
    final: bool = False


class SentenceWriter:
    """Translation of one sentence that grows: what is written stays."""

    def __init__(self, translator: Translator, policy: WritePolicy) -> None:
        self._translator, self._policy = translator, policy
        self._past: deque[tuple[str, ...]] = deque(maxlen=policy.past)
        self._words: tuple[str, ...] = ()
        self._ids: list[int] = []
        self.calls = 0  # of the model

    def read(self, words: Sequence[str], over: bool = False) -> tuple[str, int]:
        """Return the text to write behind the source so far, and the number of its words.

        `over` ends the sentence: the rest is written.
        """
        if not words or (self._policy.name == "offline" and not over):
            return "", 0
        found = self._translator.hypothesis(" ".join(words), self._ids)
        self.calls += 1
        count, written = len(found.words), len(self._words)
        self._past.append((*self._words, *found.words))
        if not over:
            count = self._policy.count([*self._past], found.chances, len(words), written)
        before = self._translator.text(self._ids)
        self._words = (*self._words, *found.words[:count])
        self._ids += [token for word in found.ids[:count] for token in word]
        return self._translator.text(self._ids)[len(before) :], count


def joined(pieces: Sequence[Translated]) -> str:
    """Return the text of pieces, sentences parted by a space."""
    found, text = list[str](), ""
    for piece in pieces:
        text += piece.text
        if piece.final:
            found.append(text.strip())
            text = ""
    return " ".join(part for part in (*found, text.strip()) if part)


def word_by_word(
    translator: Translator, policy: WritePolicy, source: Iterable[str]
) -> Iterator[Translated]:
    """Translate one sentence of text while its words, or pieces of it, come; `at` counts words."""
    writer, read = SentenceWriter(translator, policy), list[str]()
    for word in (word for piece in source for word in piece.split()):
        read.append(word)
        text, count = writer.read(read)
        if count:
            yield Translated(text, len(read), count, " ".join(read))
    text, count = writer.read(read, over=True)
    yield Translated(text, len(read), count, " ".join(read), final=True)


class Interpreter:
    """A stream of speech translated as it is said; sentences end where the speaker pauses.

    Args:
        listener: A `Listener`; it hears what was said of a sentence again and again.
        translator: A `Translator`.
        policy: As of `write_policy`.
        every: Seconds of speech between two hearings.
        silence: Seconds of silence that end a sentence.

    Raises:
        SpecError: A policy, or a number of seconds, that there is not.
    """

    def __init__(
        self,
        listener: Any,
        translator: Translator,
        policy: str | WritePolicy = "confidence:0.99",
        every: float = 0.4,
        silence: float = 0.5,
    ) -> None:
        for name, value in (("every", every), ("silence", silence)):
            if isinstance(value, bool) or not 0.05 <= value <= 60:
                raise SpecError(f"{name}={value!r}: give seconds from 0.05 to 60")
        self._listener, self._translator = listener, translator
        self._policy, self._every = write_policy(policy), math.ceil(every * RATE)
        self._cutter = TurnCutter(silence_duration_ms=round(1000 * silence), sound=True)
        self._state = self._cutter.start()
        self._begin()
        self._ms = {"listen": 0.0, "translate": 0.0}
        self._counts = {"listen": 0, "translate": 0}

    def _begin(self) -> None:
        self._sound, self._unheard = list[Tensor](), 0
        self._writer = SentenceWriter(self._translator, self._policy)
        self._heard: list[str] = []

    def push(self, pcm: Tensor) -> list[Translated]:
        """Add sound `[n]` at 16 kHz; return what is written now."""
        self._state, events = self._cutter.step(self._state, pcm)
        return [piece for event in events for piece in self._take(event)]

    def finish(self) -> list[Translated]:
        """End the stream; return the rest of an open sentence."""
        events = self._cutter.finish(self._state)
        self._state = self._cutter.start()
        return [piece for event in events for piece in self._take(event)]

    @property
    def trace(self) -> Trace:
        """Time that went into listening and into translating, and how often."""
        found = Trace()
        for stage, ms in self._ms.items():
            found.add(stage, self._counts[stage], 0, ms)
        return found

    def _take(self, event: TurnEvent) -> Iterator[Translated]:
        if event.kind == "turn":
            assert event.pcm is not None
            self._heard = self._words(event.pcm)
            yield self._write(event.at_ms, over=True)
            self._begin()
        elif event.kind in ("speech_started", "sound") and event.pcm is not None:
            self._sound.append(event.pcm)
            self._unheard += len(event.pcm)
            if self._unheard >= self._every and self._policy.name != "offline":
                self._unheard = 0
                words = self._words(torch.cat(self._sound))[:-UNSURE]
                if words != self._heard:
                    self._heard = words
                    piece = self._write(event.at_ms)
                    if piece.words:
                        yield piece

    def _words(self, pcm: Tensor) -> list[str]:
        start = time.perf_counter()
        found = str(self._listener.transcribe(pcm, RATE)).split()
        self._count("listen", start)
        return found

    def _write(self, at_ms: int, over: bool = False) -> Translated:
        start = time.perf_counter()
        text, words = self._writer.read(self._heard, over)
        self._count("translate", start)
        return Translated(text, at_ms / 1000, words, " ".join(self._heard), over)

    def _count(self, stage: str, start: float) -> None:
        self._ms[stage] += (time.perf_counter() - start) * 1e3
        self._counts[stage] += 1
