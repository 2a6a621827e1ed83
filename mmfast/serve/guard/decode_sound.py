"""Sound for the server: decoded to mono pieces, each at its own rate, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.audio_kinds import OTHER, demuxer, not_sound
from mmfast.frontends.guard import refusing
from mmfast.frontends.limits import Budget, Limits
from mmfast.frontends.source import Source

Samples = np.ndarray[Any, np.dtype[np.float32]]
_RATES = (1_000, 400_000)
_DAMAGED = 100  # packets in a row that do not decode: nothing more will


def read_sound(source: Source, limits: Limits) -> tuple[Samples, dict[str, Any]]:
    """Decode a file to mono.

    Returns:
        Samples [n] float32, and `runs`: rates and how many samples each holds for, in order.

    Raises:
        MediaError: Nothing can be decoded, or it is too long.
    """
    budget, seconds, count = Budget(limits, source.name), 0.0, 0
    parts: list[Samples] = []
    runs: list[list[int]] = []
    for pcm, rate in _other(source) if source.kind == OTHER else _decoded(source, limits):
        budget.clock()
        if not _RATES[0] <= rate <= _RATES[1]:
            raise MediaError(f"{source.name} has {rate} samples per second: convert it to 16000")
        count, seconds = count + len(pcm), seconds + len(pcm) / rate
        limits.check_duration(source.name, seconds)
        if 4 * count > limits.decoded_bytes:
            raise MediaError(f"{source.name} is more than {limits.decoded_bytes:,} bytes decoded")
        parts.append(pcm)
        if not runs or runs[-1][0] != rate:
            runs.append([rate, 0])
        runs[-1][1] += len(pcm)
    if not count:
        raise MediaError(f"{source.name} holds no sound that can be decoded: record it again")
    return np.concatenate(parts), {"runs": runs}


def _decoded(source: Source, limits: Limits) -> Iterator[tuple[Samples, int]]:
    options = {"protocol_whitelist": "file"}  # nothing but the file, whatever it refers to
    with refusing(source.name, "opened"):
        container = av.open(
            str(source.data), format=demuxer(source), options=options, metadata_errors="ignore"
        )
    with container:
        streams = [s for s in container.streams.audio if s.codec_context is not None]
        if not streams:
            raise MediaError(f"{source.name} has no sound: give a file with an audio track")
        stream = streams[0]
        length = stream.duration * stream.time_base if stream.duration and stream.time_base else 0
        limits.check_duration(source.name, float(length))
        for frame in _frames(container, stream):
            yield _mono(frame, source.name), int(frame.sample_rate)


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Frames; a packet that does not decode is left out, and so is a truncated end."""
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
        except Exception:  # garbage makes decoders raise nearly anything
            failed += 1
            continue
        failed = 0
        yield from found


def _mono(frame: Any, name: str) -> Samples:
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, frame.layout.nb_channels).T
    mono: Samples = _scaled(array, name).mean(axis=0, dtype=np.float32)
    return mono


def _scaled(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Integers to -1..1."""
    if array.dtype == np.uint8:
        return (array.astype(np.float32) - 128.0) / 128.0
    if array.dtype.kind == "i":
        return (array / float(1 << (8 * array.itemsize - 1))).astype(np.float32)
    out = array.astype(np.float32)
    if not np.isfinite(out).all():
        raise MediaError(f"{name} has samples that are no numbers: record it again")
    return out


def _other(source: Source) -> Iterator[tuple[Samples, int]]:
    """What libsndfile knows and our table does not."""
    import soundfile

    with source.open() as file:
        try:
            sound = soundfile.SoundFile(file)
        except (soundfile.SoundFileError, TypeError, RuntimeError):
            raise not_sound(source) from None
        with sound, refusing(source.name):
            for block in sound.blocks(blocksize=1 << 14, dtype="float32", always_2d=True):
                yield _scaled(block.T, source.name).mean(axis=0), int(sound.samplerate)
