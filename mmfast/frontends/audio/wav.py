"""WAV files written as a stream, also to pipes, where libsndfile cannot write a header.

Compressed files are written at once, by libsndfile.
"""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.core.files import whole_file
from mmfast.frontends.source import SOUND_FORMATS, first_line, quote, seekable, sound_suffix
from mmfast.ops.audio import check_rate, resample

# Samples per second that a lossy format has; sound at another rate is at the next higher one.
_OPUS, _MP3 = (8000, 12000, 16000, 24000, 48000), (8000, 11025, 12000, 16000, 22050, 24000, 32000)
RATES = {"opus": _OPUS, "mp3": (*_MP3, 44100, 48000)}
_FORMATS = {"pcm16": (1, 2), "float32": (3, 4)}  # -> format tag, bytes of a sample
_UNKNOWN = 0xFFFFFFFF  # size of a stream that cannot seek: players read to the end
_HEADER = 44


class WavWriter:
    """A mono WAV file written piece by piece to a path, or to a file object, which stays open.

    Example: `with WavWriter("out.wav", 16000) as wav: wav.write(pcm)`. The sizes in its header are
    corrected on `close`; where the target cannot seek (a pipe, a socket) they say "unknown", which
    players take as "to the end". `encoding` is "pcm16" or "float32"; a MediaError names what is
    wrong, but a pipe whose reader has left raises BrokenPipeError as any file does.
    """

    def __init__(self, target: Any, rate: int, encoding: str = "pcm16") -> None:
        self.rate = check_rate(rate)
        if encoding not in _FORMATS:
            raise MediaError(f"encoding {encoding!r} is unknown; choices: {', '.join(_FORMATS)}")
        self.encoding, self.samples = encoding, 0
        self._own = isinstance(target, str | os.PathLike)
        self.name = quote(target if self._own else getattr(target, "name", type(target).__name__))
        self._file: Any = target
        try:
            if self._own:
                self._file = Path(target).open("wb")  # noqa: SIM115 - closed by `close`
            self._start = self._file.tell() if self._own or seekable(target) else None
        except (OSError, ValueError) as error:
            raise MediaError(f"{self.name} cannot be written: {first_line(error)}") from None
        self._put(self._header(_UNKNOWN))

    @property
    def seconds(self) -> float:
        """Seconds written so far."""
        return self.samples / self.rate

    def write(self, pcm: Tensor) -> None:
        """Append samples `[n]` float in -1..1; louder ones are clipped, NaN is silence."""
        if self._file is None:
            raise MediaError(f"{self.name} is closed: open another")
        pcm = torch.nan_to_num(pcm.detach().cpu().float().flatten(), nan=0.0)
        if self.encoding == "pcm16":
            data = (pcm * 32768.0).round().clamp(-32768, 32767).to(torch.int16)
        else:
            data = pcm.clamp(-1.0, 1.0)
        size = _FORMATS[self.encoding][1]
        if self._start is not None and (self.samples + len(pcm)) * size >= _UNKNOWN - _HEADER:
            raise MediaError(f"{self.name} would exceed 4 GiB, the most of a WAV: start another")
        self._put(data.numpy().astype(data.numpy().dtype.newbyteorder("<")).tobytes())
        self.samples += len(pcm)

    def close(self) -> None:
        """Correct the header; close the file when it was opened here."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if self._start is not None:
                end = file.tell()
                file.seek(self._start)
                file.write(self._header(self.samples * _FORMATS[self.encoding][1]))
                file.seek(end)
            file.close() if self._own else file.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError) as error:
            raise MediaError(f"{self.name} cannot be written: {first_line(error)}") from None

    def __enter__(self) -> WavWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except BrokenPipeError:
            raise
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise MediaError(f"{self.name} cannot be written: {first_line(error)}") from None

    def _header(self, size: int) -> bytes:
        tag, each = _FORMATS[self.encoding]
        whole = size if size == _UNKNOWN else size + _HEADER - 8
        fmt = struct.pack("<HHIIHH", tag, 1, self.rate, self.rate * each, each, 8 * each)
        parts = (b"RIFF", struct.pack("<I", whole), b"WAVEfmt \x10\0\0\0", fmt, b"data")
        return b"".join(parts) + struct.pack("<I", size)


def format_rate(kind: str, rate: int) -> int:
    """Return the rate of a format ("opus", "mp3"; others take all) for sound at a rate."""
    choices = RATES.get(kind, (rate,))
    return next((each for each in choices if each >= rate), choices[-1])


def write_wav(target: Any, pcm: Tensor, rate: int, encoding: str = "pcm16") -> None:
    """Write samples `[n]` float in -1..1 to a mono WAV file."""
    with WavWriter(target, rate, encoding) as wav:
        wav.write(pcm)


def write_sound(target: Any, pcm: Tensor, rate: int) -> None:
    """Write samples `[n]` float in -1..1 to a mono file of the format that its suffix names.

    A file object, or a name without a suffix, gets a WAV file; a format that lacks the rate gets
    the sound at the next higher one that it has. MediaError where there is no such
    format, or the target cannot be written; then nothing is written.
    """
    suffix = sound_suffix(target) if isinstance(target, str | os.PathLike) else ".wav"
    data = io.BytesIO()
    if suffix == ".wav":
        if not isinstance(target, str | os.PathLike):
            return write_wav(target, pcm, rate)
        write_wav(data, pcm, rate)
        return _write_whole(target, data)
    import soundfile

    kind, encoding = SOUND_FORMATS[suffix]
    samples = torch.nan_to_num(pcm.detach().cpu().float().flatten(), nan=0.0)
    target_rate = format_rate(suffix[1:], check_rate(rate))
    samples = resample(samples, rate, target_rate).clamp(-1.0, 1.0)
    try:
        with soundfile.SoundFile(data, "w", target_rate, 1, encoding, format=kind) as file:
            for part in (samples if len(samples) else torch.zeros(1)).split(4096):
                file.write(part.numpy())  # in blocks: Vorbis overflows the stack on long ones
    except (OSError, RuntimeError, ValueError) as error:
        raise MediaError(f"{quote(target)} cannot be written: {first_line(error)}") from None
    _write_whole(target, data)


def _write_whole(target: str | os.PathLike[str], data: io.BytesIO) -> None:
    with whole_file(target, MediaError) as draft:
        draft.write_bytes(data.getvalue())
