"""Size limits: read from the header before decoding, and spent as a budget while decoding."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from mmfast.core.errors import MediaError


@dataclass(frozen=True)
class Limits:
    """What one media input may cost; media files are hostile until they are decoded.

    A 54 KB H.264 file can hold 4.5 GB of pictures, so each figure is checked from the header
    first and counted again while decoding, where the header may have lied.
    """

    bytes: int = 4 << 30  # size of the encoded input
    pixels: int = 89_478_485  # of one frame: 256 MiB of RGB
    frames: int = 1_000_000  # of the source, about 9 hours at 30 per second
    decoded_bytes: int = 2 << 30  # RGB handed back to the caller
    duration: float = 6 * 3600.0  # seconds of video
    seconds: float = 300.0  # wall clock that decoding one input may take
    min_side: int = 2  # a 1x1 picture has nothing to look at and no model takes it

    def untimed(self) -> Limits:
        """Drop the wall clock, for streams whose consumer sets the pace."""
        return replace(self, seconds=math.inf)

    def check_file(self, name: str, size: int) -> None:
        """Refuse an input of more encoded bytes than allowed."""
        if size > self.bytes:
            raise MediaError(
                f"{name} has {size:,} bytes, the limit is {self.bytes:,}: "
                f"cut or re-encode it, or raise Limits(bytes=...)"
            )

    def check_picture(self, name: str, width: int, height: int) -> None:
        """Refuse a picture that is too small to look at or too large to allocate."""
        if min(width, height) < self.min_side:
            raise MediaError(
                f"{name} is {width}x{height} pixels, the smallest side allowed is "
                f"{self.min_side}: give a larger picture"
            )
        if width * height > self.pixels:
            raise MediaError(
                f"{name} is {width}x{height} = {width * height:,} pixels, the limit is "
                f"{self.pixels:,}: scale it down, or raise Limits(pixels=...)"
            )

    def check_frames(self, name: str, count: int) -> None:
        """Refuse a source of too many frames."""
        if count > self.frames:
            raise MediaError(
                f"{name} has {count:,} frames or more, the limit is {self.frames:,}: "
                f"cut it into parts, or raise Limits(frames=...)"
            )

    def check_duration(self, name: str, seconds: float) -> None:
        """Refuse a source that lasts too long."""
        if seconds > self.duration:
            raise MediaError(
                f"{name} lasts {seconds:,.1f} s, the limit is {self.duration:,.1f} s: "
                f"cut it into parts, or raise Limits(duration=...)"
            )

    def check_decoded(self, name: str, count: int, width: int, height: int) -> None:
        """Refuse a read whose RGB frames would not fit the budget."""
        need = 3 * count * width * height
        if need > self.decoded_bytes:
            raise MediaError(
                f"{count} frames of {width}x{height} from {name} need {need:,} bytes, the limit "
                f"is {self.decoded_bytes:,}: ask for fewer, or raise Limits(decoded_bytes=...)"
            )


DEFAULT_LIMITS = Limits()


class Budget:
    """Counts the frames a decoder really produced and the time it took."""

    def __init__(self, limits: Limits, name: str) -> None:
        self._limits, self._name = limits, name
        self._deadline = time.monotonic() + limits.seconds
        self._frames = 0

    def frame(self, width: int, height: int) -> None:
        """Account for one decoded frame; raise `MediaError` when the budget is spent."""
        self._frames += 1
        self._limits.check_frames(self._name, self._frames)
        self._limits.check_picture(self._name, width, height)
        self.clock()

    def clock(self) -> None:
        """Raise `MediaError` when the wall clock has run out."""
        if time.monotonic() > self._deadline:
            raise MediaError(
                f"decoding {self._name} took over {self._limits.seconds:g} s: cut it into parts, "
                f"scale it down, or raise Limits(seconds=...)"
            )
