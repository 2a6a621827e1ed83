"""Pictures and clips: upright RGB frames, and the times at which they are shown."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfast.core.errors import MediaError
from mmfast.frontends.sampling import Floats, Indices

Frame = npt.NDArray[np.uint8]  # [H, W, 3]
Frames = npt.NDArray[np.uint8]  # [T, H, W, 3]


@dataclass(frozen=True)
class Orientation:
    """A quarter turn or mirroring, from the display matrix of a phone's recording."""

    swap: bool = False  # rows become columns; applied before the flips
    flip_x: bool = False
    flip_y: bool = False

    @classmethod
    def of(cls, frame: Any) -> Orientation:
        """Read the display matrix of a PyAV frame; other angles than quarter turns are ignored."""
        matrix = frame.side_data.get("DISPLAYMATRIX")
        if matrix is None or len(bytes(matrix)) < 36:
            return cls()
        # x' = a x + c y, y' = b x + d y in 16.16 fixed point; stored row by row as a b u c d v ...
        a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
        if a and d and not b and not c:
            return cls(False, a < 0, d < 0)
        if b and c and not a and not d:
            return cls(True, c < 0, b < 0)
        return cls()

    @property
    def mirrored(self) -> bool:
        """True for a reflection, False for a rotation."""
        return self.swap ^ self.flip_x ^ self.flip_y

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height after it is applied."""
        return (height, width) if self.swap else (width, height)

    def apply(self, rgb: Frame) -> Frame:
        """Turn a stored picture [h, w, 3] upright, [H, W, 3]."""
        if self.swap:
            rgb = rgb.transpose(1, 0, 2)
        if self.flip_x:
            rgb = rgb[:, ::-1]
        return rgb[::-1] if self.flip_y else rgb


def write_rgb(frame: Any, into: Frame, orientation: Orientation, name: str) -> None:
    """Convert a PyAV frame and write it upright into `into` [H, W, 3]; pixels are not stretched.

    Colours follow the stream's matrix and range, else BT.601 limited as FFmpeg assumes.
    """
    height, width = into.shape[:2]
    if orientation.size(frame.width, frame.height) != (width, height):
        got = "{}x{}".format(*orientation.size(frame.width, frame.height))
        raise MediaError(
            f"{name} changes its picture size from {width}x{height} to {got}: "
            f"re-encode it to one size"
        )
    into[:] = orientation.apply(frame.to_ndarray(format="rgb24"))


_CLOCK = 1_000_000  # ticks per second of the stand-in frame numbers for uneven times
_JITTER = 1e-3  # seconds; Matroska rounds times to milliseconds


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of one video, upright and in RGB, with their true times."""

    frames: Frames  # [T, H, W, 3] uint8
    times: tuple[float, ...]  # presentation time of each frame in seconds, on the file's timeline
    indices: tuple[int, ...]  # number of each frame in the source, in presentation order from 0
    total_frames: int  # frames in the source
    fps: float  # mean frames per second of the source
    duration: float  # seconds from the start of the first frame to the end of the last one
    width: int  # pixels after rotation. Non-square pixels are not stretched
    height: int  # pixels after rotation
    source: str  # name of the input, for messages
    backend: str = "pyav"  # reader: ``decord``, ``pyav``, ``pillow`` or ``array``
    mended: int = 0  # frames of the source whose time did not rise: put between their neighbours

    def __len__(self) -> int:
        return len(self.frames)

    def metadata(self) -> dict[str, Any]:
        """Return the fields of transformers' ``VideoMetadata`` for ``do_sample_frames=False``.

        Processors compute a time as ``frames_indices / fps``. Where the source's own numbers and
        rate do not give the true times to a millisecond (variable frame rate, late start), frames
        are numbered on a clock of one million per second.
        """
        fps, total, indices = self.fps, self.total_frames, list(self.indices)
        times = np.array(self.times)
        if len(times) and np.abs(np.array(indices) / fps - times).max() > _JITTER:
            indices = np.round(times * _CLOCK).astype(int).tolist()
            fps, total = float(_CLOCK), max(round(self.duration * _CLOCK), max(indices) + 1)
        return {
            "total_num_frames": total, "fps": fps, "duration": self.duration,
            "frames_indices": indices, "width": self.width, "height": self.height,
            "video_backend": self.backend,
        }  # fmt: skip


def make_clip(
    frames: Frames,
    rows: Indices,
    times: Floats,
    end: float,
    rate: float,
    source: str,
    backend: str,
    mended: int = 0,
) -> Clip:
    """Assemble a clip from frames [m, H, W, 3], their numbers [m] and all times [n]."""
    duration = max(float(end - times[0]), 1e-6)
    return Clip(
        frames=frames,
        times=tuple(times[rows].tolist()),
        indices=tuple(rows.tolist()),
        total_frames=len(times),
        fps=_mean_rate(times, duration, rate),
        duration=duration,
        width=frames.shape[2],
        height=frames.shape[1],
        source=source,
        backend=backend,
        mended=mended,
    )


def _mean_rate(times: Floats, duration: float, rate: float) -> float:
    """The header's rate where the times follow it, else the mean over the clip."""
    since = times - times[0]
    if rate > 0 and np.abs(since - np.arange(len(times)) / rate).max() <= _JITTER:
        return rate
    return float((len(times) - 1) / since[-1]) if len(times) > 1 else 1 / duration
