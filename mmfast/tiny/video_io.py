"""Write a drawn clip as an H.264 file and read back the frames a model is shown."""

import io
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from mmfast.tiny.scene import FPS, SAMPLED, sampled_indices


def encode(frames: Iterable[NDArray[np.uint8]], fps: int = FPS) -> bytes:
    """The file that `write` makes, as bytes."""
    buffer = io.BytesIO()
    write(buffer, frames, fps)
    return buffer.getvalue()


def write(file: Path | io.BytesIO, frames: Iterable[NDArray[np.uint8]], fps: int = FPS) -> None:
    """Encode RGB frames as an H.264 mp4, one after the other.

    Args:
        file: where to.
        frames: uint8 [H, W, 3] each, of one size, even sides; at least one.
        fps: frames per second.
    """
    pictures = iter(frames)
    first = next(pictures)
    target = file if isinstance(file, io.BytesIO) else str(file)
    with av.open(target, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=fps)
        stream.height, stream.width = first.shape[:2]
        stream.pix_fmt = "yuv420p"
        # One thread: the same bytes on any machine, and no start-up cost per clip.
        stream.options = {"preset": "veryfast", "crf": "20", "threads": "1"}
        for picture in chain([first], pictures):
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())


def decode(clip: bytes, frames: int = SAMPLED) -> NDArray[np.uint8]:
    """Frames of a small clip, uniformly sampled: uint8 [frames, H, W, 3]."""
    with av.open(io.BytesIO(clip), "r") as box:
        pictures = [frame.to_ndarray(format="rgb24") for frame in box.decode(video=0)]
    return np.stack([pictures[i] for i in sampled_indices(len(pictures), frames)])
