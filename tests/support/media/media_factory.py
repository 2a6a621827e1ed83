"""Media made on the spot: every frame carries its own number as a bar code, so that a decoded
frame tells which one it is, whatever the reader claims.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mmfast.core.errors import MediaError

BITS = 10
STRIP = 16  # height of the bar code
RED, BLUE = (200, 20, 20), (20, 20, 200)  # left and right half below it: mirroring shows


def picture(number: int, width: int = 96, height: int = 64) -> np.ndarray:
    """An upright frame [H, W, 3] with its number in black and white bars on top."""
    frame = np.empty((height, width, 3), np.uint8)
    frame[:, : width // 2], frame[:, width // 2 :] = RED, BLUE
    frame[:STRIP] = 0
    bar = width // BITS
    for bit in range(BITS):
        if number >> bit & 1:
            frame[:STRIP, bit * bar : (bit + 1) * bar] = 255
    return frame


def number_of(frame: np.ndarray) -> int:
    """Read the number back from the middle of each bar, and check that the frame is upright."""
    height, width = frame.shape[:2]
    low = frame[STRIP + 8 : height - 4].astype(int)
    assert (low[:, : width // 2 - 4, 0] > low[:, : width // 2 - 4, 2] + 60).all(), "left not red"
    assert (low[:, width // 2 + 4 :, 2] > low[:, width // 2 + 4 :, 0] + 60).all(), "right not blue"
    bar = width // BITS
    rows = frame[4 : STRIP - 4]
    marks = [rows[:, b * bar + 2 : (b + 1) * bar - 2].mean() > 127 for b in range(BITS)]
    return sum(1 << bit for bit, mark in enumerate(marks) if mark)


def numbers_of(frames: Any) -> list[int]:
    return [number_of(frame) for frame in frames]


def write_video(
    path: Path,
    *,
    count: int = 48,
    size: tuple[int, int] = (96, 64),
    rate: int = 30,
    codec: str = "libx264",
    pix_fmt: str = "yuv420p",
    gop: int = 12,
    bframes: int | None = 2,
    times: Sequence[Fraction] | None = None,
    audio: bool = False,
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    stored: Any = None,
) -> Path:
    """Encode frames 0, 1, 2, ... at `rate`, or at the given `times`; `stored` turns each first."""
    with av.open(str(path), "w", container_options=container or {}) as file:
        stream: Any = file.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.gop_size = gop
        if bframes is not None:
            stream.codec_context.max_b_frames = bframes
        clock = Fraction(1, 1000) if times is not None else Fraction(1, rate)
        stream.codec_context.time_base = clock
        sound = file.add_stream("aac", rate=16000) if audio else None
        for number in range(count):
            rgb = picture(number, *size) if stored is None else stored(number)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
            frame.pts = number if times is None else round(times[number] / clock)
            frame.time_base = clock
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if sound is not None:
            _write_sound(file, sound, count / rate)
    return path


def restamped(path: Path, out: Path, times: Sequence[int]) -> Path:
    """A copy of a video whose frames are shown at `times` in milliseconds, repeated or not."""
    with av.open(str(path)) as file, av.open(str(out), "w") as copy:
        source = file.streams.video[0]
        stream: Any = copy.add_stream_from_template(source)
        packets: list[Any] = [packet for packet in file.demux(source) if packet.size]
        shown = np.array(times)[np.argsort(np.argsort([packet.pts for packet in packets]))]
        decoded = np.minimum.accumulate(shown[::-1])[::-1]  # never behind the time of showing
        if out.suffix == ".mp4":  # where times of decoding have to rise
            decoded = decoded - np.arange(len(packets))[::-1]
        for packet, pts, dts in zip(packets, shown.tolist(), decoded.tolist(), strict=True):
            stay = round(1000 * packet.duration * packet.time_base)
            packet.stream, packet.time_base, packet.duration = stream, Fraction(1, 1000), stay
            packet.pts, packet.dts = pts, dts
            copy.mux(packet)
    return out


def write_sound(path: Path, seconds: float = 1.0) -> Path:
    """An mp4 with an audio stream and no picture."""
    with av.open(str(path), "w", format="mp4") as file:
        _write_sound(file, file.add_stream("aac", rate=16000), seconds)
    return path


def _write_sound(file: Any, stream: Any, seconds: float) -> None:
    for block in range(int(seconds * 16000) // 1024 + 1):
        silence = np.zeros((1, 1024), np.float32)
        frame = av.AudioFrame.from_ndarray(silence, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, block * 1024
        file.mux(stream.encode(frame))
    file.mux(stream.encode())


def write_flat(path: Path, yuv: tuple[int, int, int], space: int, span: int) -> Path:
    """Two lossless frames of one colour in the given matrix (1: BT.709, 5: BT.601) and range."""
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream("libx264", rate=10, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        stream.codec_context.colorspace, stream.codec_context.color_range = space, span
        planes = [np.full((32, 32), yuv[0]), np.full((8, 32), yuv[1]), np.full((8, 32), yuv[2])]
        for number in range(2):
            array = np.concatenate(planes).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(array, format="yuv420p")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            frame.colorspace, frame.color_range = space, span
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def write_animation(path: Path, durations: Sequence[int], size: tuple[int, int] = (96, 64)) -> Path:
    """An animated GIF, WebP or PNG whose frame i lasts durations[i] milliseconds."""
    images = [Image.fromarray(picture(i, *size)) for i in range(len(durations))]
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=list(durations), **options
    )
    return path


def turned(data: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """Put a display matrix into the (first) track header of an mp4."""
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    return patched(data, b"tkhd", 44, matrix)


def patched(data: bytes, tag: bytes, offset: int, new: bytes) -> bytes:
    """Replace bytes at `offset` from the first occurrence of `tag`."""
    at = data.index(tag) + offset
    return data[:at] + new + data[at + len(new) :]


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def jpeg_of_size(width: int, height: int) -> bytes:
    """A 16x16 JPEG whose frame header declares another size."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    return patched(file.getvalue(), b"\xff\xc0", 5, struct.pack(">HH", height, width))


def refused(call: Callable[[], Any], *parts: str) -> None:
    """Check that `call` raises a MediaError of one line that holds every part."""
    with pytest.raises(MediaError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
