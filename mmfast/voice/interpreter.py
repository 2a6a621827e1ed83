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
from mmfast.decoding.serialised import CHANNELS, HEARD, SAID, Demultiplexer
from mmfast.decoding.simultaneous import WritePolicy, write_policy
from mmfast.frontends.audio.reader import mix
from mmfast.frontends.audio.turns import TurnCutter, TurnEvent
from mmfast.models.interleaved import InterleavedTranslator
from mmfast.models.speech.overlap import CHUNK, CONTEXT, HeardWindow, OverlapEar
from mmfast.models.translation import EMBEDDED_INTERLEAVED, AnyTranslator, Translator
from mmfast.voice.ear import RATE

# Seconds that a word may take: an ear for two knows the ends of words and not their beginnings
WORD = 0.8
LONGEST_WINDOW = 12  # seconds of a window, and around it, that an ear for two takes
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
        speaker: Whose words they are, 0 or 1; None where there is one speaker.
        span: With it, the ends of the first and the last word heard of the sentence, in seconds.
    """

    text: str
    at: float
    words: int
    heard: str
    final: bool = False
    speaker: int | None = None
    span: tuple[float, float] = (0.0, 0.0)


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


def joined(pieces: Sequence[Translated], speaker: int | None = None) -> str:
    """Return the text of pieces, of one speaker or of all; sentences are parted by a space."""
    if speaker is not None:
        pieces = [piece for piece in pieces if piece.speaker == speaker]
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


def check_pace(most: float = 60, **seconds: float | None) -> None:
    """Refuse what is no number of seconds from 0.05 to `most` (SpecError); None passes."""
    for name, value in seconds.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and (not number or not 0.05 <= value <= most):
            raise SpecError(f"{name}={value!r}: give seconds from 0.05 to {most:g}")


class StageClock:
    """Time that goes into listening and into translating."""

    def __init__(self) -> None:
        self._ms = {"listen": 0.0, "translate": 0.0}
        self._counts = dict.fromkeys(self._ms, 0)

    def count(self, stage: str, start: float) -> None:
        """Add a run of a stage that began at `start`, in seconds of `time.perf_counter`."""
        self._ms[stage] += (time.perf_counter() - start) * 1e3
        self._counts[stage] += 1

    @property
    def trace(self) -> Trace:
        """The time of each stage, and how often it ran."""
        found = Trace()
        for stage, ms in self._ms.items():
            found.add(stage, self._counts[stage], 0, ms)
        return found


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
        check_pace(every=every, silence=silence)
        self._listener, self._translator = listener, translator
        self._policy, self._every = write_policy(policy), math.ceil(every * RATE)
        self._cutter = TurnCutter(silence_duration_ms=round(1000 * silence), sound=True)
        self._state = self._cutter.start()
        self._begin()
        self._clock = StageClock()

    def _begin(self) -> None:
        self._sound, self._unheard = list[Tensor](), 0
        self._writer = sentence_writer(self._translator, self._policy, settle=True)
        self._heard: list[str] = []

    def push(self, pcm: Tensor) -> list[Translated]:
        """Add sound `[n]` at 16 kHz; return what is written now. MediaError: it is no sound."""
        self._state, events = self._cutter.step(self._state, mix(pcm, "the chunk"))
        return [piece for event in events for piece in self._take(event)]

    def finish(self) -> list[Translated]:
        """End the stream; return the rest of an open sentence."""
        events = self._cutter.finish(self._state)
        self._state = self._cutter.start()
        return [piece for event in events for piece in self._take(event)]

    @property
    def trace(self) -> Trace:
        """Time that went into listening and into translating, and how often."""
        return self._clock.trace

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
        self._clock.count("listen", start)
        return found

    def _write(self, at_ms: int, over: bool = False) -> Translated:
        start = time.perf_counter()
        text, words = self._writer.read(self._heard, over)
        self._clock.count("translate", start)
        heard = self._writer.transcript or " ".join(self._heard)
        return Translated(text, at_ms / 1000, words, heard, over)


class OverlapInterpreter:
    """A stream of two speakers, who may speak at once; the words of each are translated.

    The ear writes both down as one stream with marks of change (joint t-SOT, Papi et al. 2023,
    2307.03354, of the overlapping speakers of Kanda et al. 2022, 2202.00842). What is parted goes
    to a translation for each speaker. It writes a word down once, so all that is heard is read. A
    sentence ends where its speaker writes no word for so long as a word and a silence take.

    Args:
        ear: An `OverlapEar`.
        translator: A `Translator` or an `InterleavedTranslator`.
        policy: As of `write_policy`.
        every, context: Seconds that are written down at once, and heard on both sides of them.
        silence: Seconds of silence that end a sentence.

    Raises:
        SpecError: A policy, or a number of seconds, that there is not.
    """

    def __init__(
        self,
        ear: OverlapEar,
        translator: AnyTranslator,
        policy: str | WritePolicy = "confidence:0.99",
        every: float = CHUNK,
        context: float = CONTEXT,
        silence: float = 0.5,
    ) -> None:
        check_pace(silence=silence)
        check_pace(LONGEST_WINDOW, every=every, context=context)
        self._ear, self._translator, self._policy = ear, translator, write_policy(policy)
        self._seconds, self._pause = (every, context), silence + WORD
        self._clock = StageClock()
        self._begin()

    def _begin(self) -> None:
        self._session = self._ear.open(*self._seconds)
        self._writers = [self._writer() for _ in range(CHANNELS)]
        self._heard: list[list[str]] = [[] for _ in range(CHANNELS)]
        self._spans = [(0.0, 0.0)] * CHANNELS  # of the newest sentences
        self._over = False

    def _writer(self) -> SentenceWriter | InterleavedWriter:
        return sentence_writer(self._translator, self._policy)

    def push(self, pcm: Tensor) -> list[Translated]:
        """Add sound `[n]` at 16 kHz; return what is written now. MediaError: it is no sound.

        After `finish` another stream begins.
        """
        sound = mix(pcm, "the chunk")
        if self._over:
            self._begin()
        return self._take(self._session.push(sound))

    def finish(self) -> list[Translated]:
        """End the stream; return the rest of open sentences."""
        found = [] if self._over else self._take(self._session.finish(), over=True)
        self._over = True
        return found

    @property
    def trace(self) -> Trace:
        """Time that went into listening and into translating, and how often."""
        return self._clock.trace

    def _take(self, windows: Iterator[HeardWindow], over: bool = False) -> list[Translated]:
        found, start, at = list[Translated](), time.perf_counter(), self._session.pushed
        for window in windows:
            self._clock.count("listen", start)
            found += self._window(window)
            start = time.perf_counter()
        for speaker in range(CHANNELS if over else 0):
            found += self._end(speaker, at)
        return found

    def _window(self, window: HeardWindow) -> Iterator[Translated]:
        for word in window.words:
            begin, last = self._spans[word.speaker]
            if word.at - last > self._pause:
                yield from self._end(word.speaker, window.at)
            begin = begin if self._heard[word.speaker] else word.at
            self._heard[word.speaker].append(word.text)
            self._spans[word.speaker] = begin, word.at
        for speaker, heard in enumerate(self._heard):
            if window.until - self._spans[speaker][1] > self._pause:
                yield from self._end(speaker, window.at)
            elif heard and any(word.speaker == speaker for word in window.words):
                piece = self._write(speaker, window.at)
                if piece.words:
                    yield piece

    def _end(self, speaker: int, at: float) -> Iterator[Translated]:
        """Write the rest of a speaker's sentence, where one is open."""
        if self._heard[speaker]:
            yield self._write(speaker, at, over=True)
            self._heard[speaker], self._writers[speaker] = [], self._writer()

    def _write(self, speaker: int, at: float, over: bool = False) -> Translated:
        start, writer = time.perf_counter(), self._writers[speaker]
        text, words = writer.read(self._heard[speaker], over)
        self._clock.count("translate", start)
        heard = writer.transcript or " ".join(self._heard[speaker])
        return Translated(text, at, words, heard, over, speaker, self._spans[speaker])
