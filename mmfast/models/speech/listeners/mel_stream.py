"""Mel frames of a stream, in the parts that a stock processor with streaming wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.models.speech.sound import resampled, taken

ENDLESS = 10**9  # tokens of a stream, which ends with its sound


class MelStream:
    """Cuts sound so that the parts of it have the mel frames of the whole.

    A part overlaps with the one before by as much as a frame sees; `frames` is the number of mel
    frames of a part behind the first. `count`, of the samples that came, is the number of parts
    behind the first when the sound has ended; None: until its last sample is in one.
    """

    def __init__(
        self, processor: Any, frames: int, count: Callable[[int], int] | None = None
    ) -> None:
        self.processor, self.count = processor, count
        features = processor.feature_extractor
        self.rate, hop = int(features.sampling_rate), int(features.hop_length)
        self.first = int(processor.num_samples_first_audio_chunk)
        self.size = int(processor.num_samples_per_audio_chunk)
        self.start = processor.num_mel_frames_first_audio_chunk * hop - features.n_fft // 2
        self.step = frames * hop
        self.opening: Any = None  # all that the processor made of the first part

    def features(self, chunks: Iterable[Tensor], rate: int) -> Iterator[Tensor]:
        """Yield the mel frames of part after part; silence fills the last."""
        sound = resampled(chunks, rate, self.rate)
        buffer, going = taken(torch.zeros(0), sound, self.first)
        ended = len(buffer)
        self.opening = self._mel(_filled(buffer, self.first), True)
        yield _frames(self.opening)
        at, number = self.start, 0
        base = 0  # place of the buffer's first sample
        while True:
            if going:
                buffer, going = taken(buffer, sound, at - base + self.size)
                ended = base + len(buffer)
            if not going and not self._goes_on(number, at, ended):
                return
            part = buffer[max(at - base, 0) :][: self.size]
            yield _frames(self._mel(_filled(part, self.size), False))
            at, number = at + self.step, number + 1
            buffer, base = buffer[max(at - base, 0) :], max(at, base)

    def _goes_on(self, number: int, at: int, ended: int) -> bool:
        if self.count is not None:
            return number < self.count(ended)
        return at + self.size - self.step < ended

    def _mel(self, sound: Tensor, first: bool) -> Any:
        return self.processor(
            sound.numpy(),
            sampling_rate=self.rate,
            is_streaming=True,
            is_first_audio_chunk=first,
            return_tensors="pt",
        )


def _frames(read: Any) -> Tensor:
    """The mel frames, without those that a mask takes out."""
    found: Tensor = read["input_features"]
    mask = read.get("attention_mask")
    return found if mask is None or "input_ids" in read else found[:, : int(mask.sum())]


def _filled(sound: Tensor, count: int) -> Tensor:
    return F.pad(sound[:count], (0, max(count - len(sound), 0)))
