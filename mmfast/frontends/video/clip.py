"""`Clip`: decoded frames with the times at which they are really shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmfast.frontends.picture import Frames
from mmfast.frontends.video.sampling import Floats, Indices

_CLOCK = 1_000_000  # ticks per second of the stand-in frame numbers for uneven times
_JITTER = 1e-3  # seconds; Matroska rounds times to milliseconds


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames of one video, upright and in RGB, with their true times.

    Attributes:
        frames: [T, H, W, 3] uint8.
        times: Presentation time of each frame in seconds, on the file's own timeline.
        indices: Number of each frame in the source, counted in presentation order from 0.
        total_frames: Frames in the source.
        fps: Mean frames per second of the source.
        duration: Seconds from the first frame's appearance to the last one's end.
        width: Pixels after rotation. Non-square pixels are not stretched.
        height: Pixels after rotation.
        source: What was read, for messages.
        backend: What read it: ``decord``, ``pyav``, ``pillow`` or ``array``.
    """

    frames: Frames
    times: tuple[float, ...]
    indices: tuple[int, ...]
    total_frames: int
    fps: float
    duration: float
    width: int
    height: int
    source: str
    backend: str = "pyav"

    def __len__(self) -> int:
        return len(self.frames)

    def metadata(self) -> dict[str, Any]:
        """Give the fields of transformers' ``VideoMetadata`` for ``do_sample_frames=False``.

        Processors compute a frame's time as ``frames_indices / fps``. Where the source's own
        numbers and rate give the true times to within a millisecond they are handed over; with a
        variable frame rate or a late start they would not, so frames are then numbered on a clock
        of one million per second, which gives every time to within half a microsecond and the
        same mean sampling rate.
        """
        fps, total, indices = self.fps, self.total_frames, list(self.indices)
        times = np.array(self.times)
        if len(times) and np.abs(np.array(indices) / fps - times).max() > _JITTER:
            indices = np.round(times * _CLOCK).astype(int).tolist()
            fps, total = float(_CLOCK), max(round(self.duration * _CLOCK), max(indices) + 1)
        return {
            "total_num_frames": total,
            "fps": fps,
            "duration": self.duration,
            "frames_indices": indices,
            "width": self.width,
            "height": self.height,
            "video_backend": self.backend,
        }


def make_clip(
    frames: Frames,
    rows: Indices,
    times: Floats,
    end: float,
    rate: float,
    source: str,
    backend: str,
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
    )


def _mean_rate(times: Floats, duration: float, rate: float) -> float:
    """The header's rate where the times follow it, else the mean over the clip."""
    since = times - times[0]
    if rate > 0 and np.abs(since - np.arange(len(times)) / rate).max() <= _JITTER:
        return rate
    return float((len(times) - 1) / since[-1]) if len(times) > 1 else 1 / duration
