"""Conversion of samples of any usual type and layout to float32 mono in -1..1."""

from __future__ import annotations

from functools import cache
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MediaError

LOUDEST = 16.0  # of float samples, 24 dB above full scale: more is a wrong scale
_CHANNELS = 64
_SCALES = {
    torch.uint8: (128.0, 128.0),
    torch.int8: (0.0, 128.0),
    torch.int16: (0.0, 32768.0),
    torch.int32: (0.0, 2147483648.0),
}  # type -> silence, full scale
ENCODINGS = {"pcm16": 2, "float32": 4, "pcm8": 1, "mulaw": 1, "alaw": 1}  # -> bytes of a sample


def to_mono(samples: Any, name: str = "the sound") -> Tensor:
    """Bring samples to float32 mono `[n]`; peaks above 1 are left to the caller.

    Takes a NumPy or torch array, or a list of numbers: `[n]`, `[channels, n]` or `[n, channels]`
    (the shorter axis is the channels, averaged); float in -1..1, or int8, int16, int32, or uint8
    around 128. A MediaError names another shape, type or scale, and NaN or infinite samples.
    """
    return check(mix(samples, name), name)


def mix(samples: Any, name: str, axis: int | None = None) -> Tensor:
    """`to_mono` without a check of the values; `axis` is that of the channels, if known."""
    pcm = _tensor(samples, name)
    if pcm.ndim == 1:
        return _scaled(pcm, name)
    if pcm.ndim == 2:
        channels = axis if axis is not None else int(pcm.shape[0] > pcm.shape[1])
        if 1 <= pcm.shape[channels] <= _CHANNELS:
            return _scaled(pcm, name).mean(dim=channels)
        if pcm.numel() == 0:
            return torch.zeros(0)
    raise MediaError(
        f"{name} has shape {tuple(pcm.shape)}: one sound is [n], [channels, n] or [n, channels] "
        f"with at most {_CHANNELS} channels"
    )


def check(pcm: Tensor, name: str, before: float = 0.0, rate: int = 0) -> Tensor:
    """Return float samples `[n]` if finite and plausible; messages count from `before` seconds."""
    if not pcm.numel():
        return pcm
    low, high = torch.aminmax(pcm)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        if max(-float(low), float(high)) > LOUDEST:
            raise MediaError(
                f"{name} has float samples up to {max(-float(low), float(high)):g}, full scale is "
                f"1.0: divide by 32768 if they were 16-bit integers"
            )
        return pcm
    at = int((~torch.isfinite(pcm)).nonzero()[0, 0])
    where = f"at {before + at / rate:.3f} s" if rate else f"sample {at}"
    raise MediaError(
        f"{name} has samples that are no numbers (NaN or infinite), the first {where}: "
        f"repair it, or replace them with numpy.nan_to_num"
    )


def _tensor(samples: Any, name: str) -> Tensor:
    if isinstance(samples, Tensor):
        return samples.detach()
    try:
        array = np.asarray(samples)
        if array.dtype.kind not in "iuf" or array.dtype.itemsize > 8:
            raise TypeError
        # A copy in native order: torch takes neither read-only nor foreign ones.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        shown = getattr(getattr(samples, "dtype", None), "name", type(samples).__name__)
        raise MediaError(
            f"{name} is no array of samples ({shown}): give float32 in -1..1, int16, int32 or "
            f"uint8, [n] or [channels, n]"
        ) from None


def _scaled(pcm: Tensor, name: str) -> Tensor:
    if pcm.dtype in _SCALES:
        silence, full = _SCALES[pcm.dtype]
        wide = pcm.double() if pcm.dtype is torch.int32 else pcm.float()
        return ((wide - silence) / full).float()
    if not pcm.is_floating_point():
        raise MediaError(
            f"{name} has samples of type {str(pcm.dtype).removeprefix('torch.')}, which has no "
            f"customary full scale: convert it to float32 in -1..1, int16, int32 or uint8"
        )
    return pcm.float()


def decode_pcm(data: bytes, encoding: str, channels: int = 1) -> tuple[Tensor, bytes]:
    """Decode raw little-endian samples (pcm8 is unsigned, mulaw and alaw are G.711) to mono.

    Returns float32 `[n]`, and the bytes of an incomplete sample, which belong to the next chunk.
    """
    if encoding not in ENCODINGS:
        raise MediaError(f"encoding {encoding!r} is unknown; choices: {', '.join(ENCODINGS)}")
    if not isinstance(channels, int) or not 1 <= channels <= _CHANNELS:
        raise MediaError(f"channels={channels!r}: give a number from 1 to {_CHANNELS}")
    each = ENCODINGS[encoding] * channels
    whole = len(data) // each * each
    raw = np.frombuffer(data[:whole], dtype={2: "<i2", 4: "<f4", 1: "u1"}[ENCODINGS[encoding]])
    if encoding in ("mulaw", "alaw"):
        raw = _g711(encoding)[raw]
    pcm = _scaled(torch.from_numpy(np.array(raw, dtype=raw.dtype.newbyteorder("="))), "the sound")
    return pcm.view(-1, channels).mean(dim=1), data[whole:]


@cache
def _g711(encoding: str) -> Any:
    """16-bit values of all 256 codes (ITU-T G.711), by FFmpeg."""
    codec: Any = av.CodecContext.create(f"pcm_{encoding}", "r")
    codec.sample_rate, codec.layout = 8000, "mono"
    return codec.decode(av.Packet(bytes(range(256))))[0].to_ndarray().flatten()
