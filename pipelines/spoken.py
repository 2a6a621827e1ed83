"""Spoken: sound, the text that it says, and what it cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Sound
from mmfast.core.trace import Trace
from mmfast.frontends.wav import write_wav
from mmfast.streams.voice_metrics import Meter

LONGEST = 20_000  # letters: half an hour of speech
KEYS = ("seconds", "first_audio_ms", "rtf", "tokens_per_pass")


@dataclass(frozen=True)
class Spoken:
    """What a pipeline said.

    Attributes:
        pcm: Samples `[n]`, float32 in -1..1.
        rate: Samples per second.
        text: What it says.
        stats: `seconds`, `first_audio_ms`, `rtf`, `tokens`, `passes`, `tokens_per_pass`,
            `tokens_per_second`, `acceptance` a codebook; see `Meter.stats`.
        heard: What was understood, of an answer to speech.
    """

    pcm: Tensor = field(repr=False)
    rate: int
    text: str
    stats: dict[str, Any] = field(default_factory=dict, repr=False)
    heard: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.pcm) / self.rate

    @property
    def trace(self) -> Trace:
        """The stages as rows: listening where there was speech, then speaking."""
        found, listened = Trace(), self.stats.get("heard_ms") or 0.0
        if self.heard:
            found.add("listen", 0, len(self.heard.split()), listened)
        spoke = max((self.stats.get("work_ms") or 0.0) - listened, 0.0)
        found.add("speak", self.stats.get("passes", 0), self.stats.get("tokens", 0), spoke)
        return found

    def save(self, target: str | Path | BinaryIO) -> None:
        """Write a WAV file of 16-bit samples.

        Raises:
            MediaError: It cannot be written.
        """
        write_wav(target, self.pcm, self.rate)

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast say --json` and `mmfast talk --json` print."""
        first: dict[str, Any] = {"text": self.text, "heard": self.heard} if self.heard else {}
        first = {"text": self.text, **first, **{key: self.stats.get(key) for key in KEYS}}
        return {**first, "sample_rate": self.rate, **self.stats}


def collect(
    sounds: Iterable[Sound],
    rate: int,
    meter: Meter | None = None,
    each: Callable[[Tensor], Any] | None = None,
) -> Spoken:
    """All pieces in one, each of them counted.

    Args:
        sounds: The pieces.
        rate: Samples per second, where there is none.
        meter: Counts; time began when it was made.
        each: Takes the samples of every piece as it comes.
    """
    meter, parts, texts, heard = meter or Meter(), [torch.zeros(0)], [], ""
    for sound in meter.timed(sounds):
        parts.append(sound.pcm.detach().float().cpu())
        if each is not None:
            each(parts[-1])
        texts.append(sound.text)
        rate, heard = sound.rate, heard or (sound.heard or "")
    return Spoken(torch.cat(parts), rate, "".join(texts).strip(), meter.stats(), heard.strip())


def check_text(text: object) -> str:
    """A text that can be said.

    Raises:
        MmfastError: It is none, is empty, has no letter or digit, or is too long.
    """
    if not isinstance(text, str):
        raise MmfastError(f"{type(text).__name__} cannot be said; give a text")
    if not any(letter.isalnum() for letter in text):
        raise MmfastError(f"there is nothing to say in {text[:40]!r}; give a text with words")
    if len(text) > LONGEST:
        raise MmfastError(
            f"a text of {len(text):,} letters is too long; say at most {LONGEST:,} at once, "
            "or stream it in parts"
        )
    return text


def checked_parts(parts: Iterable[Any]) -> Iterator[str]:
    """Pieces of a text as they come.

    Raises:
        MmfastError: One is no text.
    """
    for part in parts:
        if not isinstance(part, str):
            raise MmfastError(f"{type(part).__name__} cannot be said; give pieces of text")
        yield part
