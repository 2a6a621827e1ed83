"""Sound as it is pushed: any kind of samples at any rate, to blocks at 16 kHz."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.frontends.audio_array import decode_pcm, to_mono
from mmfast.ops.resample import Resampler, check_rate
from mmfast.streams.voice_ear import RATE

LONGEST = 600  # seconds of one chunk


class Inlet:
    """Takes chunks of one stream, and changes their rate without a seam between them.

    Attributes:
        samples: At 16 kHz so far.
    """

    def __init__(self) -> None:
        self.samples = 0
        self._resampler: Resampler | None = None
        self._state: Any = None
        self._odd = b""  # half a sample that ended a chunk of bytes

    def take(self, pcm: Any, rate: int) -> Tensor:
        """A chunk as samples `[n]` at 16 kHz.

        Raises:
            MediaError: It is no sound; nothing of it is taken.
        """
        rate, chunk = check_rate(rate), self._samples(pcm)
        if len(chunk) > LONGEST * rate:
            raise MediaError(
                f"a chunk of {len(chunk) / rate:.0f} s is too long; push {LONGEST} s at most"
            )
        if self._resampler is None or self._resampler.source != rate:
            self._resampler = Resampler(rate, RATE)
            self._state = self._resampler.start()
        self._state, out = self._resampler.step(self._state, chunk[None])
        self.samples += out.shape[-1]
        return out[0]

    def blocks(self, chunks: Iterable[Any], rate: int, size: int) -> Iterator[Tensor]:
        """Chunks of any length as blocks of `size` samples at their own rate, the last shorter."""
        check_rate(rate)
        held = torch.zeros(0)
        for chunk in chunks:
            held = torch.cat([held, self._samples(chunk)])
            whole = len(held) // size * size
            yield from held[:whole].split(size) if whole else ()
            held = held[whole:].clone()
        if len(held):
            yield held

    def _samples(self, pcm: Any) -> Tensor:
        if isinstance(pcm, bytes | bytearray | memoryview):
            found, self._odd = decode_pcm(self._odd + bytes(pcm), "pcm16")
        else:
            found = to_mono(pcm, "the chunk")
        return found.cpu().clamp(-1.0, 1.0)
