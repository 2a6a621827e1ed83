"""Sound as the protocol carries it: base64 of 16-bit PCM at 24 kHz, or of G.711 at 8 kHz."""

from __future__ import annotations

import base64
import binascii
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.frontends.audio.reader import decode_pcm
from mmfast.ops.audio import Resampler
from mmfast.serve.realtime.protocol import EventError
from mmfast.voice.channel import Inlet
from mmfast.voice.ear import RATE

# name -> encoding of `decode_pcm`, samples per second
FORMATS = {
    "audio/pcm": ("pcm16", 24000),
    "audio/pcmu": ("mulaw", 8000),
    "audio/pcma": ("alaw", 8000),
}


def unpack(text: str, param: str, most: int) -> bytes:
    """Decode base64; `EventError` if it is malformed or too long."""
    if len(text) > most:
        raise EventError(
            f"{len(text)} letters of base64 are too many; send {most} at most",
            "string_above_max_length",
            param,
        )
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (ValueError, binascii.Error):
        raise EventError("this is no base64", "invalid_value", param) from None


class Incoming:
    """Converts the chunks of one stream to samples at 16 kHz, without a seam between them."""

    def __init__(self, format: str) -> None:
        self.format, self._inlet, self._rest = format, Inlet(), b""

    def take(self, data: bytes) -> Tensor:
        """Return the next samples `[n]`."""
        encoding, rate = FORMATS[self.format]
        pcm, self._rest = decode_pcm(self._rest + data, encoding)
        return self._inlet.take(pcm, rate)


class Outgoing:
    """Converts the samples of one reply to chunks, without a seam between them."""

    def __init__(self, format: str, rate: int) -> None:
        self._encoding, self.rate = FORMATS[format]
        self._stage = Resampler(rate, self.rate)
        self._state: Any = self._stage.start()

    def step(self, pcm: Tensor) -> str:
        """Return the next samples `[n]` as base64."""
        self._state, out = self._stage.step(self._state, pcm[None].float().cpu())
        return self._packed(out[0])

    def finish(self) -> str:
        """Return what was held back for samples that did not come."""
        return self._packed(self._stage.finish(self._state)[0])

    def _packed(self, pcm: Tensor) -> str:
        return base64.b64encode(encode(pcm, self._encoding)).decode("ascii")


def encode(pcm: Tensor, encoding: str) -> bytes:
    """Encode samples `[n]` in -1..1 as bytes of `pcm16`, `mulaw` or `alaw`."""
    clean = torch.nan_to_num(pcm.float()).clamp(-1.0, 1.0)
    values = (clean * 32767.0).round().numpy().astype("<i2")
    if encoding == "pcm16":
        return bytes(values.tobytes())
    codes, levels = _levels(encoding)
    above = np.clip(np.searchsorted(levels, values), 1, len(levels) - 1)
    nearer = values - levels[above - 1] <= levels[above] - values
    return bytes(codes[above - nearer].tobytes())


@cache
def _levels(encoding: str) -> tuple[Any, Any]:
    """Return the codes of G.711 and their values, in ascending order."""
    pcm, _ = decode_pcm(bytes(range(256)), encoding)
    values = (pcm * 32768.0).round().numpy().astype(np.int64)
    order = np.argsort(values, kind="stable")
    return order.astype(np.uint8), values[order]


def shown(pcm: Tensor, format: str) -> str:
    """Return samples `[n]` at 16 kHz as the client would have sent them, in base64."""
    out = Outgoing(format, RATE)
    return base64.b64encode(
        base64.b64decode(out.step(pcm)) + base64.b64decode(out.finish())
    ).decode("ascii")
