"""A speaker, a listener and a chatter that hum: every letter is a tone, and can be read again.

They stand in for models where a conversation is tested: what was really played can be read from
its samples, independently of what the conversation believes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.speech import Sound, Turn
from mmfast.voice.ear import EarEvent

RATE = 16000
LETTERS = " abcdefghijklmnopqrstuvwxyz0123456789.,?!'-"
TONE = 320  # samples of a letter: 20 ms
LOWEST, STEP = 600.0, 50.0  # Hz: a whole number of waves, so tones do not leak into each other
LOUD = 0.3


def hum(text: str) -> Tensor:
    """Text as tones `[n]`; a space is one, too, and stands for signs that have none."""
    time = torch.arange(TONE, dtype=torch.float64) / RATE
    tones = [
        torch.sin(2 * math.pi * (LOWEST + STEP * max(LETTERS.find(letter), 0)) * time)
        for letter in text.lower()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *tones]).float() * LOUD


def read(pcm: Tensor) -> str:
    """Tones as text; a letter that is cut off is left out, and so is silence around them."""
    loud = torch.nonzero(pcm.abs() > LOUD / 20)
    if not len(loud):
        return ""
    start = max(int(loud[0]) - 1, 0)  # a sine begins with a sample of silence
    whole = (len(pcm) - start) // TONE * TONE
    if not whole:
        return ""
    frames = pcm[start : start + whole].reshape(-1, TONE)
    power = torch.fft.rfft(frames).abs()  # [letters, TONE / 2 + 1], 50 Hz apart
    first = round(LOWEST / STEP)
    best = power[:, first : first + len(LETTERS)].max(-1)
    full = best.values > 0.9 * LOUD * TONE / 2
    found = [LETTERS[int(i)] if ok else "\n" for i, ok in zip(best.indices, full, strict=True)]
    return "".join(found).split("\n")[0]


class HumSpeaker:
    """Hums text.

    Args:
        piece: Samples of a piece, at most; a piece never holds two words.
        each: Called before every piece, for a clock that passes while a model works.
    """

    sample_rate = RATE

    def __init__(self, piece: int = 1600, each: Callable[[], Any] | None = None) -> None:
        self.piece, self.each = piece, each
        self.made = 0  # pieces so far

    def speak(self, text: str | Iterable[str], **_: Any) -> Iterator[Sound]:
        """Hum it, a word after another."""
        for word in _words([text] if isinstance(text, str) else text):
            for index, part in enumerate(hum(word).split(self.piece)):
                if self.each is not None:
                    self.each()
                self.made += 1
                yield Sound(
                    part, RATE, word if index == 0 else "", passes=1, tokens=len(part) // 80
                )


def _words(parts: Iterable[str]) -> Iterator[str]:
    """Words with the space before them, as soon as they are complete."""
    held = ""
    for part in parts:
        held += part
        while (end := held.find(" ", 1)) > 0:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


class HumEar:
    """Finds humming by its loudness, 10 ms at a time.

    Args:
        pause: Seconds of silence that end a turn.
        padding: Seconds before it that belong to it.
    """

    def __init__(self, pause: float = 0.3, padding: float = 0.1) -> None:
        self._pause, self._padding = round(pause * 100), round(padding * 100)
        self._rest, self._blocks = torch.zeros(0), list[Tensor]()
        self._speaking, self._quiet, self._at = False, 0, 0

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        """The next samples `[n]`."""
        held = torch.cat([self._rest, pcm])
        whole = len(held) // 160 * 160
        self._rest = held[whole:].clone()
        blocks = held[:whole].split(160) if whole else ()
        return [found for block in blocks for found in self._block(block)]

    def _block(self, block: Tensor) -> list[EarEvent]:
        loud = float(block.abs().max()) > LOUD / 3
        self._blocks.append(block)
        self._at += len(block)
        self._quiet = 0 if loud else self._quiet + 1
        if not self._speaking:
            del self._blocks[: -self._padding - 1]
            if not loud:
                return []
            self._speaking = True
            return [EarEvent("started", self._at - 160 * len(self._blocks))]
        return self.flush() if self._quiet >= self._pause else []

    def flush(self) -> list[EarEvent]:
        """End a turn that goes on."""
        if not self._speaking:
            return []
        pcm = torch.cat(self._blocks)
        self.clear()
        return [EarEvent("stopped", self._at, pcm)]

    def clear(self) -> None:
        """Forget a turn that goes on."""
        self._blocks, self._speaking, self._quiet = [], False, 0


class HumListener:
    """Reads what was hummed."""

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """`[n]` to text."""
        return read(pcm)


class HumChatter:
    """Listens, answers and hums.

    Args:
        answer: Gives the answer to the turns so far, the last of which is the user's.
        speaker: Hums it.
    """

    sample_rate = RATE

    def __init__(
        self,
        answer: Callable[[Sequence[Turn]], str | Iterable[str]],
        speaker: HumSpeaker | None = None,
    ) -> None:
        self._answer, self._speaker = answer, speaker or HumSpeaker()

    def reply(
        self, pcm: Tensor, rate: int = RATE, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """What was hummed `[n]` to the answer as it is hummed."""
        heard = read(pcm).strip()
        if not heard:  # a cough
            yield Sound(torch.zeros(0), RATE, heard="")
            return
        first: str | None = heard
        for sound in self._speaker.speak(self._answer((*history, Turn("user", heard)))):
            yield Sound(sound.pcm, RATE, sound.text, heard=first, passes=1, tokens=sound.tokens)
            first = None


class HumModel(HumSpeaker, HumListener):
    """All three in one: it says again what it hears, unless told otherwise.

    Args:
        answer: As of `HumChatter`.
        piece: As of `HumSpeaker`.
    """

    def __init__(
        self,
        answer: Callable[[Sequence[Turn]], str | Iterable[str]] | None = None,
        piece: int = 1600,
    ) -> None:
        super().__init__(piece)
        self._chatter = HumChatter(answer or (lambda turns: turns[-1].text), self)

    def reply(
        self, pcm: Tensor, rate: int = RATE, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """What was hummed `[n]` to the answer as it is hummed."""
        return self._chatter.reply(pcm, rate, history, **options)
