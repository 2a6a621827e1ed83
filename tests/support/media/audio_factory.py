"""Sound files of every kind, made in memory."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

Samples = NDArray[np.float32]


def tone(rate: int, seconds: float = 0.5, channels: int = 1, hertz: float = 440.0) -> Samples:
    """A sine of amplitude 0.4 in every channel, `[n, channels]`."""
    at = np.arange(int(rate * seconds)) / rate
    wave = 0.4 * np.sin(2 * np.pi * hertz * at)
    return np.stack([wave] * channels, axis=1).astype(np.float32)


def encoded(samples: Any, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file written by libsndfile."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def muxed(container: str, codec: str, rate: int = 48_000, picture: bool = False) -> bytes:
    """A file written by FFmpeg, stereo, with a picture or without."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout="stereo")
        video = out.add_stream("mpeg4", rate=10, width=32, height=32) if picture else None
        if picture:
            for _ in range(5):
                black = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
                out.mux(video.encode(black))
            out.mux(video.encode(None))
        planes = np.ascontiguousarray(tone(rate, channels=2).T)
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="stereo")
        frame.rate = rate
        context = stream.codec_context
        to_codec = av.AudioResampler(
            format=context.format.name,
            layout="stereo",
            rate=rate,
            frame_size=context.frame_size or 1024,
        )
        for part in to_codec.resample(frame) + to_codec.resample(None):
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return file.getvalue()
