"""Sound files, and the sound of videos, decoded piece by piece to mono."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.frontends.audio_array import check, mix
from mmfast.frontends.audio_kinds import OTHER, demuxer, not_sound
from mmfast.frontends.guard import refusing
from mmfast.frontends.limits import Budget, Limits
from mmfast.frontends.source import Source
from mmfast.ops.resample import check_rate

Piece = tuple[Tensor, int]  # samples [n] float32 mono, their rate
_SECONDS = 0.5  # of a piece: a packet may be 1 ms
_DAMAGED = 100  # packets in a row that do not decode: nothing more will


def sound_pieces(source: Source, limits: Limits) -> Iterator[Piece]:
    """Decode a file; the rate may change between pieces.

    A damaged packet is left out, so is a truncated end.

    Raises:
        MediaError: Nothing can be decoded, it lasts too long, or takes too long to decode.
    """
    raw = _other_pieces(source) if source.kind == OTHER else _decoded(source, limits)
    budget, seconds = Budget(limits, source.name), 0.0
    waiting: list[Tensor] = []
    rate = 0
    for pcm, at in raw:
        budget.clock()
        if waiting and (at != rate or sum(map(len, waiting)) >= rate * _SECONDS):
            yield torch.cat(waiting), rate
            waiting = []
        rate = check_rate(at, f"the rate of {source.name}")
        waiting.append(check(pcm, source.name, seconds, rate))
        seconds += len(pcm) / rate
        limits.check_duration(source.name, seconds)
    if waiting:
        yield torch.cat(waiting), rate


@contextmanager
def _open(source: Source) -> Iterator[Any]:
    """PyAV's container; nothing but the file itself can be opened, whatever it refers to."""
    file: Any = source.open() if isinstance(source.data, bytes) else str(source.data)
    with refusing(source.name, "opened"):
        container = av.open(
            file,
            format=demuxer(source),
            options={"protocol_whitelist": "file"},
            metadata_errors="ignore",
        )
    with container:
        yield container


def _decoded(source: Source, limits: Limits) -> Iterator[Piece]:
    with _open(source) as container:
        stream = _main_stream(source, container)
        length = stream.duration * stream.time_base if stream.duration else 0
        limits.check_duration(source.name, float(length))
        heard = failed = 0
        for frame in _frames(source, container, stream):
            if frame is None:
                failed += 1
                if failed >= _DAMAGED:
                    break
                continue
            heard, failed = heard + 1, 0
            yield _mono(frame, source.name), int(frame.sample_rate)
    if not heard:
        raise MediaError(f"{source.name} holds no sound that can be decoded: record it again")


def _main_stream(source: Source, container: Any) -> Any:
    streams = [s for s in container.streams.audio if s.codec_context is not None]
    if not streams:
        kinds = sorted({s.type for s in container.streams if s.type})
        raise MediaError(
            f"{source.name} has no sound that can be decoded, only "
            f"{', '.join(kinds) or 'nothing'}: give a file with an audio track"
        )
    best = container.streams.best("audio")
    return best if best in streams else streams[0]


def _frames(source: Source, container: Any, stream: Any) -> Iterator[Any]:
    """Frames as they decode, None for a packet that does not."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except Exception:  # a truncated end, or a stream that the header does not name
            return
        if packet is None:
            return
        try:
            with refusing(source.name):
                decoded = packet.decode()
        except MediaError:
            yield None
        else:
            yield from decoded


def _mono(frame: Any, name: str) -> Tensor:
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, frame.layout.nb_channels).T
    if array.dtype == np.int64:
        array = (array >> 32).astype(np.int32)
    return mix(array, name, axis=0)


def _other_pieces(source: Source) -> Iterator[Piece]:
    """What libsndfile knows and our table does not."""
    import soundfile

    with source.open() as file:
        try:
            sound = soundfile.SoundFile(file)
        except (soundfile.SoundFileError, TypeError, RuntimeError):
            raise not_sound(source) from None
        with sound, refusing(source.name):
            for block in sound.blocks(blocksize=1 << 14, dtype="float32", always_2d=True):
                yield torch.from_numpy(block.mean(axis=1)), int(sound.samplerate)
