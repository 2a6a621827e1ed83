"""Where a turn of speech begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

RATE = 16000
LONGEST = 60.0  # seconds of a turn; then it is taken as it is


@dataclass(frozen=True)
class Heard:
    """A turn of speech begins, or is over; or nobody has spoken for long.

    Args:
        kind: Which of them.
        at: Sample of the input, padding included.
        pcm: What was said `[n]`, where it is over.
    """

    kind: Literal["started", "stopped", "timeout"]
    at: int
    pcm: Tensor | None = None


class Ear(Protocol):
    """Finds turns in sound at 16 kHz; any split of it gives the same turns."""

    def hear(self, pcm: Tensor) -> list[Heard]:
        """The next samples `[n]`."""

    def flush(self) -> list[Heard]:
        """End a turn that goes on, as far as it has come."""

    def clear(self) -> None:
        """Forget a turn that goes on."""


class ManualEar:
    """Takes all sound for speech, until it is told that a turn is over: push to talk.

    Args:
        longest: Seconds after which a turn ends by itself.
    """

    def __init__(self, longest: float = LONGEST) -> None:
        self._limit = round(longest * RATE)
        self._parts: list[Tensor] = []
        self._held = self._at = 0

    def hear(self, pcm: Tensor) -> list[Heard]:
        """The next samples `[n]`."""
        found: list[Heard] = []
        for part in pcm.split(RATE) if len(pcm) else ():
            if not self._held:
                found.append(Heard("started", self._at))
            self._parts.append(part)
            self._held, self._at = self._held + len(part), self._at + len(part)
            if self._held >= self._limit:
                found += self.flush()
        return found

    def flush(self) -> list[Heard]:
        """End the turn."""
        if not self._held:
            return []
        pcm = torch.cat(self._parts)
        self.clear()
        return [Heard("stopped", self._at, pcm)]

    def clear(self) -> None:
        """Forget it."""
        self._parts, self._held = [], 0
