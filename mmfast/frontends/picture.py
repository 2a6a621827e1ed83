"""From a decoded frame to upright RGB."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfast.core.errors import MediaError

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
        """Whether it is a reflection and not a rotation."""
        return self.swap ^ self.flip_x ^ self.flip_y

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after it is applied."""
        return (height, width) if self.swap else (width, height)

    def apply(self, rgb: Frame) -> Frame:
        """Turn a stored picture [h, w, 3] upright, [H, W, 3]."""
        if self.swap:
            rgb = rgb.transpose(1, 0, 2)
        if self.flip_x:
            rgb = rgb[:, ::-1]
        return rgb[::-1] if self.flip_y else rgb


def to_rgb(frame: Any, into: Frame, orientation: Orientation, name: str) -> None:
    """Convert a PyAV frame and write it upright into `into` [H, W, 3].

    Colours follow the stream's matrix and range; where it names none, BT.601 limited as FFmpeg
    assumes. Pixels are taken as stored: non-square ones are not stretched.
    """
    height, width = into.shape[:2]
    if orientation.size(frame.width, frame.height) != (width, height):
        got = "{}x{}".format(*orientation.size(frame.width, frame.height))
        raise MediaError(
            f"{name} changes its picture size from {width}x{height} to {got}: "
            f"re-encode it to one size"
        )
    into[:] = orientation.apply(frame.to_ndarray(format="rgb24"))
