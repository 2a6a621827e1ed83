"""Doubles of speech models for tests: letters as tones, from `mmfast bench --speech soak`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from mmfast.bench.suites.speech.soak import (
    RATE,
    TONE,
    HumChatter,
    HumEar,
    HumSpeaker,
    hum,
    read,
)
from mmfast.core.speech import Sound, Turn

__all__ = ["TONE", "HumChatter", "HumEar", "HumListener", "HumModel", "HumSpeaker", "hum", "read"]


class HumListener:
    """A listener that reads tones."""

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """Return the text of tones `[n]`."""
        return read(pcm)


class HumModel(HumSpeaker, HumListener):
    """A speaker, listener and chatter that repeats the question if no answer is given.

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
        """Yield the answer to tones `[n]`."""
        return self._chatter.reply(pcm, rate, history, **options)
