"""Files that are small, and enormous once they are decoded; made on the spot."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

import av
import numpy as np
from PIL import Image


def png(side: int = 13_000) -> bytes:
    """A black grey picture: 164 kB that decode to 500 MB of RGB."""
    size = side * (side + 1)  # a filter byte before each row
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    piece = packer.compress(bytes(size // 100)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, zlib.DEFLATED, -15)
    rest = last.compress(bytes(size - size // 100 * 100)) + last.flush()
    check = struct.pack(">I", size % 65521 << 16 | 1)  # Adler's sum of that many zeros
    body = b"\x78\xda" + piece * 100 + rest + check
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*each) for each in chunks)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def mp4(side: int = 4096, count: int = 88, group: int = 4) -> bytes:
    """H.264 of one colour: 50 kB that decode to gigabytes; one group of pictures over and over."""
    return video(np.full((side, side, 3), 90, np.uint8), count, group)


def video(frame: np.ndarray[Any, Any], count: int, group: int = 8) -> bytes:
    """An mp4 that shows one picture [H, W, 3] `count` times, 30 a second."""
    height, width = frame.shape[:2]
    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.gop_size, stream.max_b_frames = group, 0
        stream.options = {"preset": "ultrafast", "x264-params": "scenecut=0:threads=1:cabac=1"}
        picture = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuv420p")
        packets = [bytes(p) for _ in range(group) for p in stream.encode(picture)]
        packets += [bytes(p) for p in stream.encode(None)]
        for i in range(count):
            packet = av.Packet(packets[i % len(packets)])
            packet.stream, packet.time_base = stream, stream.codec_context.time_base
            packet.pts = packet.dts = i
            packet.duration, packet.is_keyframe = 1, i % len(packets) == 0
            container.mux(packet)
    return target.getvalue()


def gif(side: int = 2000, count: int = 300) -> bytes:
    """An animation of one frame over and over."""
    target = io.BytesIO()
    Image.new("P", (side, side)).save(target, "GIF")
    data = target.getvalue()
    start = 13 + 3 * (2 << (data[10] & 7))  # header and colour table
    frame = data[data.index(b"\x2c", start) : -1]
    control = b"\x21\xf9\x04\0\x01\0\0\0"
    return data[:start] + (control + frame) * count + b"\x3b"


def webp(side: int = 4000, count: int = 1000) -> bytes:
    """A large canvas on which a small frame is drawn over and over, fifty bytes each."""
    target = io.BytesIO()
    Image.new("RGB", (16, 16)).save(target, "WEBP", lossless=True)
    still = target.getvalue()[12:]  # its VP8L chunk
    size, small = struct.pack("<I", side - 1)[:3], b"\x0f\0\0"
    frame = b"\0" * 6 + small * 2 + b"\x01\0\0" + b"\0" + still
    chunks = _riff(b"VP8X", b"\x02\0\0\0" + size * 2) + _riff(b"ANIM", b"\0" * 6)
    return _riff(b"RIFF", b"WEBP" + chunks + _riff(b"ANMF", frame) * count)


def _riff(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def archive() -> bytes:
    """A zip."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("clip.mp4", bytes(1 << 20))
    return target.getvalue()


def picture(kind: str = "PNG", width: int = 64, height: int = 48) -> bytes:
    """A harmless picture."""
    target = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(target, kind)
    return target.getvalue()
