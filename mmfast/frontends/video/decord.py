"""Read frames with decord: fast, but on an old FFmpeg, so only what it is known to do right.

Measured on decord 0.6.0 against PyAV: H.264 and HEVC, 8-bit 4:2:0, progressive, in mp4 and Matroska
are bit-identical if every key frame is a fresh start; after others it returns wrong frames. 10-bit,
interlaced and odd-sized pictures differ, transport streams lose frames, AV1 is unknown, mirrored
pictures are not mirrored, damaged headers crash the process, and bytes are read past their end.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.frontends.picture import Frames, Orientation
from mmfast.frontends.source import MediaSource, Mismatch
from mmfast.frontends.video.container import Header
from mmfast.frontends.video.index import Index
from mmfast.frontends.video.sampling import Indices

_CHUNK = 64 << 20  # bytes of RGB fetched at once: decord holds its batch beside our copy


def why_not(
    source: MediaSource, header: Header, index: Index, interlaced: bool, turn: Orientation
) -> str:
    """Say why decord cannot read this input; empty when it can."""
    checks = (
        (importlib.util.find_spec("decord") is not None, "decord is not installed"),
        (isinstance(source.data, Path), "bytes: decord reads past the end of a damaged buffer"),
        (source.kind in ("mp4", "mkv"), f"{source.kind} files lose frames or times in decord"),
        (header.codec in ("h264", "hevc"), f"codec {header.codec}"),
        (header.pix_fmt in ("yuv420p", "yuvj420p"), f"pixel format {header.pix_fmt}"),
        (header.progressive and not interlaced, "interlaced pictures"),
        (not turn.mirrored, "mirrored pictures"),
        (header.alone, "several video streams"),
        (
            index.trusted and index.plain,
            "edits, damage, open groups of pictures or parameters in the stream",
        ),
    )
    return next((reason for fine, reason in checks if not fine), "")


def read(source: MediaSource, header: Header, index: Index, rows: Indices, out: Frames) -> None:
    """Fill `out` [m, H, W, 3] with frames number `rows` [m] (ascending), upright.

    Raises:
        Mismatch: decord fails or sees other frames than the packets list.
    """
    try:
        decord: Any = importlib.import_module("decord")
        decord.logging.set_level(decord.logging.QUIET)
        # One recovered (repeated) frame anywhere is an error, not something to pass on silently.
        reader = decord.VideoReader(str(source.data), fault_tol=1e-9)
        _compare_times(reader, header, index)
        step = max(1, _CHUNK // max(1, out[0].nbytes))
        for start in range(0, len(rows), step):
            part = reader.get_batch(rows[start : start + step].tolist())
            out[start : start + step] = part.asnumpy() if hasattr(part, "asnumpy") else part
    except Mismatch:
        raise
    except Exception as error:  # decord's own errors, and a wrong shape in the copy
        raise Mismatch from error


def _compare_times(reader: Any, header: Header, index: Index) -> None:
    """Check that decord numbers the frames as we do; it gives single precision and starts at 0."""
    count = len(index.ticks)
    if len(reader) != count:
        raise Mismatch
    theirs = reader.get_frame_timestamp(np.arange(count))[:, 0]
    ours = header.seconds(index.ticks)
    if not np.allclose(theirs - theirs[0], ours - ours[0], atol=1e-3, rtol=1e-6):
        raise Mismatch
