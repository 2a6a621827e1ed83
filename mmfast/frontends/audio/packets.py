"""Kinds of sound files by their first bytes, and their packets decoded to mono NumPy samples.

Imports no torch: the confined process that decodes the media of clients must stay light.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfast.core.errors import MediaError
from mmfast.frontends.container import main_stream, open_container
from mmfast.frontends.source import (
    IMAGE_KINDS,
    VIDEO_KINDS,
    Budget,
    Limits,
    MediaSource,
    magic_kind,
    refusing,
)

# kind -> FFmpeg's demuxer; containers with a picture may hold sound, too
AUDIO_KINDS = {
    "wav": "wav", "w64": "w64", "aiff": "aiff", "au": "au", "caf": "caf", "flac": "flac",
    "wavpack": "wv", "mp3": "mp3", "aac": "aac", "ac3": "ac3", "amr": "amr",
}  # fmt: skip
OTHER = "other"  # unknown magic, which libsndfile may know (NIST, VOC, PAF, RF64, …)

# mp4: any brand, also those that announce pictures
_MAGIC = (
    ("wav", 0, b"RF64"), ("w64", 0, b"riff\x2e\x91\xcf\x11"), ("aiff", 8, b"AIFF"),
    ("aiff", 8, b"AIFC"), ("au", 0, b".snd"), ("caf", 0, b"caff"), ("wavpack", 0, b"wvpk"),
    ("ac3", 0, b"\x0bw"), ("amr", 0, b"#!AMR"), ("mp4", 4, b"ftyp"),
)  # fmt: skip


def sniff_sound(name: str, head: bytes) -> str:
    """Kind of a file by its first bytes (`AUDIO_KINDS`, `VIDEO_KINDS`, `OTHER`); no images."""
    kind = next((k for k, at, magic in _MAGIC if head[at : at + len(magic)] == magic), "")
    kind = kind or magic_kind(head)
    if kind in IMAGE_KINDS:
        raise MediaError(f"{name} is an image ({kind}): give a file with sound, such as a WAV")
    return kind if kind in AUDIO_KINDS or kind in VIDEO_KINDS else OTHER


def demuxer(source: MediaSource) -> str:
    """Return FFmpeg's demuxer for a sound file, read after an ID3 tag, which any kind may have."""
    if source.kind != "mp3":
        return AUDIO_KINDS.get(source.kind) or VIDEO_KINDS[source.kind]
    with source.open() as file:
        head = file.read(10)
        if head[:3] == b"ID3" and len(head) == 10:
            size = 0
            for byte in head[6:]:  # seven bits of each count
                size = size << 7 | byte & 0x7F
            file.seek(10 + size)
            behind = magic_kind(file.read(16))
            return AUDIO_KINDS.get(behind, "mp3")
    return "mp3"


def not_sound(source: MediaSource) -> MediaError:
    """Return the error for a file without sound."""
    with source.open() as file:
        head = file.read(12)
    return MediaError(
        f"{source.name} is no sound that can be read, it starts with {head!r}: give one of "
        f"{', '.join((*AUDIO_KINDS, *VIDEO_KINDS))}, or raw samples with encoding='pcm16'"
    )


Samples = npt.NDArray[np.float32]
_DAMAGED = 100  # packets in a row that do not decode, after which reading ends


def decoded_sound(source: MediaSource, limits: Limits) -> Iterator[tuple[Samples, int]]:
    """Yield samples `[n]` and their rate, without damaged packets; the rate may change.

    Channels are mixed; the values are not checked, the duration and the clock are.
    """
    budget, seconds = Budget(limits, source.name), 0.0
    for pcm, rate in _other(source) if source.kind == OTHER else _packets(source, limits):
        budget.clock()
        yield pcm, rate
        seconds += len(pcm) / max(rate, 1)
        limits.check_duration(source.name, seconds)


def _packets(source: MediaSource, limits: Limits) -> Iterator[tuple[Samples, int]]:
    heard = False
    with open_container(source, demuxer(source)) as container:
        stream = main_stream(source, container, "audio", "a file with an audio track")
        length = stream.duration * stream.time_base if stream.duration and stream.time_base else 0
        limits.check_duration(source.name, float(length))
        for frame in _frames(container, stream):
            heard = True
            yield _mono(frame), int(frame.sample_rate)
    if not heard:
        raise MediaError(f"{source.name} holds no sound that can be decoded: record it again")


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Yield frames, without undecodable packets and a truncated end."""
    packets, failed = container.demux(stream), 0
    while failed < _DAMAGED:
        try:
            packet = next(packets, None)
        except Exception:  # a truncated end, or a stream that the header does not name
            return
        if packet is None:
            return
        try:
            found = packet.decode()
        except Exception:  # decoders raise many exceptions on damaged data
            failed += 1
            continue
        failed = 0
        yield from found


def _mono(frame: Any) -> Samples:
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, frame.layout.nb_channels).T
    if array.dtype == np.uint8:
        array = (array.astype(np.float32) - 128.0) / 128.0
    elif array.dtype.kind == "i":
        array = (array / float(1 << (8 * array.itemsize - 1))).astype(np.float32)
    mono: Samples = mix_channels(array.astype(np.float32, copy=False))
    return mono


_SHORTEST, _LOST = 160, 10**-1.5  # samples that can tell; the level of a mean that has lost 30 dB


def mix_channels(channels: Any) -> Any:
    """Return the mean `[n]` of channels `[c, n]`, NumPy or torch, float.

    Where the channels cancel each other (a plug wired the wrong way round, left = -right), the mean
    would be silence: there it is the first channel that is at least half as loud as the loudest.
    """
    mean = channels.mean(0)
    if len(channels) < 2 or len(mean) < _SHORTEST:
        return mean
    levels = [float(level) for level in abs(channels).mean(1)]
    if not float(abs(mean).mean()) * len(channels) < _LOST * sum(levels):  # nor if it is NaN
        return mean
    return channels[next(i for i, level in enumerate(levels) if 2 * level >= max(levels))]


def _other(source: MediaSource) -> Iterator[tuple[Samples, int]]:
    """Decode with libsndfile the formats that PyAV is not used for."""
    import soundfile

    with source.open() as file:
        try:
            sound = soundfile.SoundFile(file)
        except (soundfile.SoundFileError, TypeError, RuntimeError):
            raise not_sound(source) from None
        with sound, refusing(source.name):
            for block in sound.blocks(blocksize=1 << 14, dtype="float32", always_2d=True):
                yield mix_channels(block.T), int(sound.samplerate)
