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
from mmfast.decoding.serialised import HEARD, SAID, Demultiplexer
from mmfast.decoding.simultaneous import WritePolicy, write_policy
from mmfast.frontends.audio.turns import TurnCutter, TurnEvent
from mmfast.models.interleaved import InterleavedTranslator
from mmfast.models.translation import EMBEDDED_INTERLEAVED, AnyTranslator, Translator
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

    settles = False  # whether hearing the same again tells it something
    transcript: str | None = None  # of a model that writes one

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
            sure = found.stays if self._policy.learned else found.chances
            count = self._policy.count([*self._past], sure, len(words), written)
        before = self._translator.text(self._ids)
        self._words = (*self._words, *found.words[:count])
        self._ids += [token for word in found.ids[:count] for token in word]
        return self._translator.text(self._ids)[len(before) :], count


class InterleavedWriter:
    """The same by a model that reads and writes in one sequence: what is read stays, too.

    Args:
        translator: The model.
        policy: Its latency.
        settle: Read a word only when it was heard twice at its place, as hearings differ.
    """

    def __init__(
        self, translator: InterleavedTranslator, policy: WritePolicy, settle: bool = False
    ) -> None:
        assert policy.late is not None
        self._translator, self.settles = translator, settle
        self._sequence = translator.open(policy.late, policy.joint)
        self._parts = Demultiplexer() if policy.joint else None
        self._marks = {translator.number(mark): mark for mark in (HEARD, SAID) if policy.joint}
        self._heard: Sequence[str] = ()
        self._read = list[str]()
        self._said = list[int]()

    @property
    def calls(self) -> int:
        """The number of passes of the model."""
        return self._sequence.passes

    @property
    def transcript(self) -> str | None:
        """The source as the model wrote it down so far; None where it writes none."""
        return None if self._parts is None else self._parts.text(HEARD)

    def read(self, words: Sequence[str], over: bool = False) -> tuple[str, int]:
        """Return the text to write behind the source so far, and the number of its words."""
        sure = len(words)
        if self.settles and not over:
            pairs = enumerate(zip(words, self._heard, strict=False))
            sure = next((i for i, pair in pairs if pair[0] != pair[1]), min(sure, len(self._heard)))
        self._heard = list(words)
        new = list(words[place_of(self._read, words) :][: max(0, sure - len(self._read))])
        new = list(words[place_of(self._read, words) :]) if over else new
        self._read += new
        found = self._sequence.read(new)
        if over and self._read:
            found += self._sequence.finish()
        return self._tell(found)

    def _tell(self, ids: Sequence[int]) -> tuple[str, int]:
        before = self._translator.text(self._said)
        for token in ids:
            mark = SAID
            if self._parts is not None:
                word = self._marks.get(token) or self._translator.text([token])
                mark = self._parts.push(word, float(len(self._read))) or ""
            self._said += [token] if mark == SAID else []
        text = self._translator.text(self._said)[len(before) :]
        return text, len(text.split())


def place_of(read: Sequence[str], words: Sequence[str]) -> int:
    """Return how many words of a new hearing stand for those read before.

    That beginning of the hearing which differs least by edits; of several, one as long as `read`.
    """
    costs = list(range(len(words) + 1))
    for row, before in enumerate(read, 1):
        last, costs = costs, [row]
        for column, word in enumerate(words, 1):
            changed = last[column - 1] + (word != before)
            costs.append(min(changed, last[column] + 1, costs[-1] + 1))
    return min(range(len(costs)), key=lambda place: (costs[place], abs(place - len(read))))


def sentence_writer(
    translator: AnyTranslator, policy: WritePolicy, settle: bool = False
) -> SentenceWriter | InterleavedWriter:
    """Return what translates one sentence by a policy.

    Raises:
        SpecError: The policy is not of such a model.
    """
    if isinstance(translator, InterleavedTranslator):
        if policy.late is None:
            raise SpecError(
                f"policy={policy.name!r}: {type(translator.model).__name__} reads and writes in "
                "one sequence and decides by itself; choose interleaved:N"
            )
        return InterleavedWriter(translator, policy, settle)
    if policy.late is not None:
        raise SpecError(
            f"policy={policy.name!r} needs a causal model that reads and writes in one sequence, "
            f"such as {EMBEDDED_INTERLEAVED}; {type(translator.model).__name__} takes agreement:N, "
            "wait:K, confidence:P"
        )
    if policy.learned and translator.head is None:
        raise SpecError(
            f"policy={policy.name!r} needs a head that learned which words stay; train it with "
            "python -m mmfast.tiny.translation.train_stability, or choose confidence:P"
        )
    return SentenceWriter(translator, policy)


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
    translator: AnyTranslator, policy: WritePolicy, source: Iterable[str]
) -> Iterator[Translated]:
    """Translate one sentence of text while its words, or pieces of it, come; `at` counts words."""
    writer, read = sentence_writer(translator, policy), list[str]()
    for word in (word for piece in source for word in piece.split()):
        read.append(word)
        text, count = writer.read(read)
        if count:
            yield Translated(text, len(read), count, writer.transcript or " ".join(read))
    text, count = writer.read(read, over=True)
    yield Translated(text, len(read), count, writer.transcript or " ".join(read), final=True)


class Interpreter:
    """A stream of speech translated as it is said; sentences end where the speaker pauses.

    Args:
        listener: A `Listener`; it hears what was said of a sentence again and again.
        translator: A `Translator` or an `InterleavedTranslator`.
        policy: As of `write_policy`.
        every: Seconds of speech between two hearings.
        silence: Seconds of silence that end a sentence.

    Raises:
        SpecError: A policy, or a number of seconds, that there is not.
    """

    def __init__(
        self,
        listener: Any,
        translator: AnyTranslator,
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
        self._writer = sentence_writer(self._translator, self._policy, settle=True)
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
                if words != self._heard or self._writer.settles:
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
        heard = self._writer.transcript or " ".join(self._heard)
        return Translated(text, at_ms / 1000, words, heard, over)

    def _count(self, stage: str, start: float) -> None:
        self._ms[stage] += (time.perf_counter() - start) * 1e3
        self._counts[stage] += 1
