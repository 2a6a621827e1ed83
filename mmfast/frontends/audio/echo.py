"""Echo of our own voice, taken out of a microphone's sound by the canceller of WebRTC (AEC3).

The `livekit` wheel brings it as a library that works offline. It adapts to the room within a second
by counts of samples, so that equal sound gives equal output.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.ops.audio import RATE

FRAME = RATE // 100  # samples that the library takes at once


class EchoCanceller:
    """Takes the sound of a loudspeaker out of the sound of a microphone, both at 16 kHz.

    The echo may be 0.3 s late. Whole frames of 10 ms come back: up to 159 samples wait for more.
    ModelError: livekit is not installed.
    """

    def __init__(self) -> None:
        try:
            modules = [importlib.import_module(f"livekit.rtc.{n}") for n in ("apm", "audio_frame")]
        except ImportError:
            raise ModelError(
                "the echo canceller is missing; it comes with: pip install 'mmfast[echo]'"
            ) from None
        self._module: Any = modules[0].AudioProcessingModule(echo_cancellation=True)
        self._frame: Any = modules[1].AudioFrame
        self._waiting = torch.zeros(2, 0)

    def cancel(self, near: Tensor, far: Tensor) -> Tensor:
        """Return the microphone's samples `[n]` without those of the loudspeaker `[n]`."""
        both = torch.cat([self._waiting, torch.stack([near, far])], 1)
        whole = both.shape[1] // FRAME * FRAME
        self._waiting = both[:, whole:].clone()
        parts = both[:, :whole].clamp(-1, 1).mul(32767).round().short().split(FRAME, 1)
        found = [self._clean(*part) for part in parts if part.shape[1]]
        return torch.cat(found) if found else torch.zeros(0)

    def _clean(self, near: Tensor, far: Tensor) -> Tensor:
        mic, speaker = (
            self._frame(bytearray(part.contiguous().numpy().tobytes()), RATE, 1, FRAME)
            for part in (near, far)
        )
        self._module.process_reverse_stream(speaker)
        self._module.set_stream_delay_ms(0)
        self._module.process_stream(mic)
        return torch.frombuffer(bytearray(mic.data.cast("b")), dtype=torch.int16).float() / 32767
