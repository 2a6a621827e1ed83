"""Checks of container headers for faults that decoders hide: missing bytes and zero frame rates.

FFmpeg plays a truncated file up to the cut and replaces a zero time base by a guess; both would
silently give wrong times. Formats: ISO/IEC 14496-12, RIFF, EBML (RFC 8794), YUV4MPEG2.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import IO

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.source import MediaSource

_INDEX_BYTES = 64 << 20  # largest mp4 index parsed: FFmpeg itself checks larger ones
_MAX_BOXES = 100_000  # a day of one-second fragments; a hostile file could hold 2**29 empty ones
_NO_SIZE = 0xFFFFFFFF  # RIFF written to a pipe
_STREAMED = 0x7FFF0000  # sizes of a WAV from here on are those of writers that cannot know them


class TruncatedError(MediaError):
    """A container is shorter than its header says."""


def check_header(source: MediaSource) -> None:
    """Refuse a container that is truncated, has no index or declares zero frames per second."""
    with source.open() as file:
        if source.kind == "mp4":
            _check_mp4(source, file)
        elif source.kind in ("avi", "webp"):
            _check_riff(source, file.read(1 << 16))
        elif source.kind == "mkv":
            _check_ebml(source, file.read(256))
        elif source.kind == "wav":
            _check_wav(source, file)
        elif source.kind == "y4m":
            _check_y4m(source, file.read(256))


def cut_note(source: MediaSource) -> str:
    """Return a line on a sound that its file has a part of only, or "": it is heard up to there."""
    try:
        check_header(source)
    except TruncatedError as error:
        return f"{error}; it is heard up to there"
    except MediaError:  # of its pictures
        pass
    return ""


def _truncated(source: MediaSource, declared: int) -> TruncatedError:
    return TruncatedError(
        f"{source.name} is truncated: its header declares {declared:,} bytes, "
        f"{source.size:,} are there; copy or download it again"
    )


def _zero_rate(source: MediaSource, field: str) -> MediaError:
    return MediaError(
        f"{source.name} declares 0 frames per second ({field}), so its frames have no times: "
        f"re-encode it with a rate (ffmpeg -r 30 -i IN OUT.mp4)"
    )


def _check_mp4(source: MediaSource, file: IO[bytes]) -> None:
    index = 0
    for kind, start, stop in _boxes(file, source.size):
        if kind in (b"moov", b"mdat", b"moof") and stop > source.size:
            raise _truncated(source, stop)
        if kind == b"moov":
            index += 1
            if stop - start <= _INDEX_BYTES:
                file.seek(start)
                _check_tracks(source, file.read(stop - start))
    if not index:
        raise MediaError(
            f"{source.name} has no index (moov box), it is truncated or was never finished: "
            f"copy or record it again"
        )


def _boxes(file: IO[bytes], size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (kind, first byte of the body, end) of the boxes at the top level."""
    position = 0
    for _ in range(_MAX_BOXES):
        if position + 8 > size:
            return
        file.seek(position)
        head = file.read(16).ljust(16, b"\0")
        length, kind = struct.unpack(">I4s", head[:8])
        body = position + 8
        if length == 1:  # a 64-bit length follows
            length, body = struct.unpack(">Q", head[8:])[0], body + 8
        end = position + length if length else size
        if end < body:
            return
        yield kind, body, end
        position = end


def _children(data: bytes, kind: bytes) -> Iterator[bytes]:
    position = 0
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        if length < 8:
            return
        if name == kind:
            yield data[position + 8 : position + length]
        position += length


def _descend(data: bytes, *path: bytes) -> bytes:
    """Follow the first box of each name; empty where there is none."""
    for kind in path:
        data = next(_children(data, kind), b"")
    return data


def _check_tracks(source: MediaSource, moov: bytes) -> None:
    if _time_scale(_descend(moov, b"mvhd")) == 0:
        raise _zero_rate(source, "mp4 movie time scale 0")
    for track in _children(moov, b"trak"):
        media = _descend(track, b"mdia")
        if _descend(media, b"hdlr")[8:12] != b"vide":
            continue
        if _time_scale(_descend(media, b"mdhd")) == 0:
            raise _zero_rate(source, "mp4 time scale 0")
        table = _descend(media, b"minf", b"stbl", b"stts")[8:]
        runs = np.frombuffer(table[: len(table) // 8 * 8], dtype=">u4").reshape(-1, 2)
        if runs[:, 0].sum() > 1 and not runs[:, 1].any():
            raise _zero_rate(source, "every mp4 sample lasts 0")


def _time_scale(header: bytes) -> int | None:
    """Read the ticks per second of an mvhd or mdhd box; None where the box is cut short."""
    offset = 20 if header[:1] == b"\1" else 12  # version 1 has 64-bit dates before it
    scale = header[offset : offset + 4]
    return int.from_bytes(scale, "big") if len(scale) == 4 else None


def _check_riff(source: MediaSource, head: bytes) -> None:
    declared = struct.unpack_from("<I", head.ljust(8, b"\0"), 4)[0]
    if declared not in (0, _NO_SIZE) and declared + 8 > source.size:
        raise _truncated(source, declared + 8)
    for match in re.finditer(rb"strh....vids", head, re.DOTALL):
        scale, rate = struct.unpack_from(
            "<II", head.ljust(match.start() + 36, b"\0"), match.start() + 28
        )
        if not scale or not rate:
            raise _zero_rate(source, f"AVI rate {rate}, scale {scale}")


def _check_wav(source: MediaSource, file: IO[bytes]) -> None:
    position, long = 12, 0  # RF64 has the size of its samples in an earlier chunk
    for _ in range(_MAX_BOXES):
        file.seek(position)
        kind, length, second = struct.unpack("<4sI8xQ", file.read(24).ljust(24, b"\0"))
        if kind == b"data":
            length = long if length == _NO_SIZE else length if length < _STREAMED else 0
            if position + 8 + length > source.size:
                raise _truncated(source, position + 8 + length)
            return
        if position + 8 > source.size:
            return
        long = second if kind == b"ds64" else long
        position += 8 + length + length % 2


def _check_ebml(source: MediaSource, head: bytes) -> None:
    position = 4
    length, position = _vint(head, position)
    position += length
    if head[position : position + 4] != b"\x18\x53\x80\x67":  # Segment
        return
    length, body = _vint(head, position + 4)
    unknown = (1 << 7 * (body - position - 4)) - 1  # all ones: a live recording
    if length != unknown and body + length > source.size:
        raise _truncated(source, body + length)


def _vint(data: bytes, position: int) -> tuple[int, int]:
    """Read an EBML variable-length integer; return it and the position after it."""
    first = data[position] if position < len(data) else 0
    width = 9 - first.bit_length()  # 9 for a zero byte, which no writer produces
    raw = int.from_bytes(data[position : position + width], "big")
    return raw & ((1 << 7 * width) - 1), position + width


def _check_y4m(source: MediaSource, head: bytes) -> None:
    rate = re.search(rb" F(\d+):(\d+)", head.split(b"\n", 1)[0])
    if rate is None or int(rate[1]) == 0 or int(rate[2]) == 0:
        raise _zero_rate(source, "no rate in the YUV4MPEG2 header")
