"""Sound to the formats of `/v1/audio/speech`, while it is still being made."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mmfast.frontends.wav import WavWriter
from mmfast.ops.resample import Resampler

PCM_RATE = 24_000  # what OpenAI's clients expect of `pcm`, which does not say
TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
_CODECS = {  # format -> container and codec of FFmpeg
    "mp3": ("mp3", "libmp3lame"),
    "opus": ("ogg", "libopus"),
    "aac": ("adts", "aac"),
    "flac": ("flac", "flac"),
}


class SoundWriter(Protocol):
    """Takes samples, gives what is ready of the file."""

    def write(self, pcm: Tensor) -> bytes:
        """Samples `[n]` float in -1..1."""

    def close(self) -> bytes:
        """The rest."""


def sound_writer(kind: str, rate: int) -> SoundWriter:
    """What writes one format.

    Args:
        kind: One of `TYPES`.
        rate: Samples per second of what will come.
    """
    if kind == "pcm":
        return _Pcm(rate)
    return _Wav(rate) if kind == "wav" else _Encoded(*_CODECS[kind], rate)


class _Sink:
    """A file that cannot seek, emptied from the other end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def take(self) -> bytes:
        found, self._parts = b"".join(self._parts), []
        return found


class _Wav:
    def __init__(self, rate: int) -> None:
        self._sink = _Sink()
        self._wav = WavWriter(self._sink, rate)

    def write(self, pcm: Tensor) -> bytes:
        self._wav.write(pcm)
        return self._sink.take()

    def close(self) -> bytes:
        self._wav.close()
        return self._sink.take()


class _Pcm:
    def __init__(self, rate: int) -> None:
        self._resampler = Resampler(rate, PCM_RATE)
        self._state = self._resampler.start()

    def write(self, pcm: Tensor) -> bytes:
        self._state, out = self._resampler.step(self._state, pcm[None])
        return _int16(out[0])

    def close(self) -> bytes:
        return _int16(self._resampler.finish(self._state)[0])


class _Encoded:
    def __init__(self, container: str, codec: str, rate: int) -> None:
        import av

        self._sink, self._rate, self._samples = _Sink(), rate, 0
        self._file: Any = av.open(self._sink, "w", format=container)
        self._stream: Any = self._file.add_stream(codec, rate=rate, layout="mono")

    def write(self, pcm: Tensor) -> bytes:
        import av

        if not len(pcm):
            return b""
        samples = torch.frombuffer(bytearray(_int16(pcm)), dtype=torch.int16).numpy()
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = self._rate, self._samples
        self._samples += len(samples)
        self._file.mux(self._stream.encode(frame))
        return self._sink.take()

    def close(self) -> bytes:
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()


def _int16(pcm: Tensor) -> bytes:
    whole = torch.nan_to_num(pcm.detach().float().cpu(), nan=0.0) * 32768.0
    data = whole.round().clamp(-32768, 32767).to(torch.int16).numpy()
    return data.astype("<i2").tobytes()
