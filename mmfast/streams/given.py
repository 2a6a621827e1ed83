"""Frames as a caller pushes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.image import picture
from mmfast.frontends.limits import Limits
from mmfast.streams.encode import Frame


def read_frames(frame: Any, time: Any, limits: Limits) -> tuple[list[Frame], list[Any]]:
    """One frame or several, as RGB `[H, W, 3]` uint8, and a time or None for each.

    Args:
        frame: Anything `read_image` takes; a list, a tuple or an array of four axes is several.
        time: Seconds; of several frames a sequence of them, or None.
        limits: Of a frame's size.

    Raises:
        MediaError: A frame cannot be read, or there are not as many times as frames.
    """
    several = isinstance(frame, list | tuple) or getattr(frame, "ndim", 0) == 4
    frames = list(frame) if several else [frame]
    many = isinstance(time, Sequence | np.ndarray) and not isinstance(time, str)
    times = list(time) if many else [time] * len(frames)
    if len(times) != len(frames) or (several and time is not None and not many):
        given = f"{len(times)} times" if many else f"time={time!r}"
        raise MediaError(f"{len(frames)} frames came with {given}; give one time for each, or None")
    return [picture(each, "the frame", limits) for each in frames], times
