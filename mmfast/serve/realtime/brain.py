"""What listens, sees and answers in one session, on models that all sessions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound, Turn
from mmfast.streams.voice_cascade import speaking
from mmfast.streams.voice_ear import RATE


@dataclass(frozen=True)
class Question:
    """What is to be answered.

    Attributes:
        turns: What was said so far, oldest first; the last one is the user's, unless it is `pcm`.
        pcm: What was said last `[n]` at 16 kHz, for a model that answers speech itself.
        instructions: What the model is told to be; the embedded ones cannot be told.
        aloud: Whether the answer is spoken.
        options: Of the speaker: `voice`, `speed`.
        limit: Most tokens of the answer's text.
    """

    turns: tuple[Turn, ...]
    pcm: Tensor | None = None
    instructions: str = ""
    aloud: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None


class Brain(Protocol):
    """One session's; each method is called in a worker thread, any number of them at once."""

    native: bool  # answers speech itself, and nothing else
    sees: bool

    def hear(self, pcm: Tensor) -> str:
        """Speech `[n]` at 16 kHz to text."""

    def answer(self, question: Question) -> Iterator[Sound]:
        """The answer as it comes; where it was asked by `pcm`, first what was understood."""

    def see(self, frame: Any, time: float) -> None:
        """Watch a frame `[H, W, 3]` of so many seconds."""

    def count(self, text: str) -> int:
        """Tokens of a text, as near as the model tells."""

    def figures(self) -> dict[str, Any]:
        """What it has seen, and what that takes."""

    def close(self) -> None:
        """Free what the session holds."""


class Voices(Protocol):
    """What all sessions share."""

    voices: tuple[str, ...]
    pace: tuple[int, int, int] | None  # words per minute: least, usual, most

    def open(self) -> Brain:
        """A session's own."""


def pace_of(speaker: Any) -> tuple[int, int, int] | None:
    """Words per minute that a speaker has learned."""
    speeds = sorted(getattr(getattr(speaker, "layout", None), "speeds", ()))
    return (speeds[0], speeds[len(speeds) // 2], speeds[-1]) if speeds else None


class ChatterBrain:
    """A model that answers speech with speech; or one that listens, chats in text, and speaks.

    Args:
        chatter: A `Chatter`; with `answer_turns` it also answers what is written.
    """

    sees = False

    def __init__(self, chatter: Any) -> None:
        self._chatter = chatter
        self._chat: Any = getattr(chatter, "chat", None)
        self.native = self._chat is None
        own = hasattr(chatter, "transcribe")
        self._ears = chatter if own else getattr(chatter, "listener", None)
        self._mouth = chatter if self.native else chatter.speaker

    def hear(self, pcm: Tensor) -> str:
        """See `Brain`."""
        if self._ears is None:
            return ""
        return str(self._ears.transcribe(pcm, RATE)).strip()

    def answer(self, question: Question) -> Iterator[Sound]:
        """See `Brain`."""
        if self.native:
            return self._reply(question)
        return voiced(self._chat(told_turns(question)), self._mouth, question)

    def _reply(self, question: Question) -> Iterator[Sound]:
        if question.pcm is None:
            raise ModelError("this model answers speech alone; send input_audio, not text")
        options = question.options
        for sound in self._chatter.reply(question.pcm, RATE, question.turns, **options):
            yield sound if question.aloud else silent(sound)

    def see(self, frame: Any, time: float) -> None:
        """See `Brain`."""
        raise ModelError("this model sees nothing; start the server with one that does")

    def count(self, text: str) -> int:
        """Words: the tokens of a model of speech are another matter."""
        return len(text.split())

    def figures(self) -> dict[str, Any]:
        """Nothing is kept."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


class ChatterVoices:
    """Shares a `Chatter`.

    Args:
        chatter: See `ChatterBrain`.
    """

    def __init__(self, chatter: Any) -> None:
        self._chatter = chatter
        mouth = getattr(chatter, "speaker", None) or chatter
        self.voices: tuple[str, ...] = tuple(getattr(mouth, "voices", ()))
        self.pace = pace_of(mouth)

    def open(self) -> ChatterBrain:
        """See `Voices`."""
        return ChatterBrain(self._chatter)


def told_turns(question: Question) -> Sequence[Turn]:
    """The turns; instructions, for a function of text, are said by the user first."""
    if not question.instructions:
        return question.turns
    return (Turn("user", question.instructions), *question.turns)


def voiced(text: str | Iterable[str], speaker: Any, question: Question) -> Iterator[Sound]:
    """A written answer as it is spoken, or as it is; nothing where nothing is written."""
    parts = iter([text] if isinstance(text, str) else text)
    first = next((part for part in parts if part.strip()), "")
    if not first:
        return
    if question.aloud and speaker is not None:
        yield from speaker.speak(chain([first], parts), **speaking(question.options))
        return
    for each in chain([first], parts):
        yield Sound(torch.zeros(0), RATE, text=each)


def silent(sound: Sound) -> Sound:
    """Its text."""
    return Sound(torch.zeros(0), sound.rate, sound.text, heard=sound.heard)


Load = Callable[[], Voices]
