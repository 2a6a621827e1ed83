"""The video front-end: any kind of media in, frames with their true times out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from mmfast.core.errors import MediaError
from mmfast.frontends.animation import image_clip, iter_animation, read_animation
from mmfast.frontends.clip import Clip as Clip
from mmfast.frontends.files import BACKENDS, iter_file, read_file
from mmfast.frontends.guard import quote
from mmfast.frontends.image import open_image
from mmfast.frontends.limits import DEFAULT_LIMITS, Limits
from mmfast.frontends.long_file_queue import DEFAULT_AHEAD, Ahead
from mmfast.frontends.picture import Frame
from mmfast.frontends.sampling import Ask, positive_rate, sample_stream
from mmfast.frontends.sequences import iter_sequence, sequence_clip
from mmfast.frontends.source import IMAGE_KINDS, Source, is_encoded, open_source


def read_video(
    media: object,
    *,
    frames: int | None = None,
    fps: float | None = None,
    times: Sequence[float] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    backend: str = "auto",
    rate: float | None = None,
) -> Clip:
    """Read some frames of a video, with the times at which they are really shown.

    Exactly one of `frames`, `fps` and `times` says which:

    * ``frames=k``: numbers ``round(linspace(0, n - 1, k))``; all n if the clip has no more.
    * ``fps=r``: the frame on screen at every 1/r s from the first frame on, each frame once.
    * ``times=[...]``: the frame on screen at each time, in the order given.

    A file's packets are listed without decoding them, then only the groups of pictures that hold
    a wanted frame are decoded. Phone rotation and mirroring are applied, edit lists followed,
    sound ignored, 10-bit colour rounded to 8 bits without tone mapping, non-square pixels kept.
    A frame that the decoder can only conceal after damage comes as concealed.

    Args:
        media: A path, bytes, a binary file object; a PIL animation; a numpy array or torch tensor
            [T, H, W, C] or [T, C, H, W] with 1, 3 or 4 channels, uint8 or float in [0, 1]; a list
            or iterator of pictures (anything `read_image` takes), or of (picture, seconds) pairs.
        frames: How many frames to spread over the clip.
        fps: How many frames to take per second.
        times: Seconds on the file's own timeline.
        limits: Size limits; checked from the header before decoding and while decoding.
        backend: ``auto`` (decord for what it reads exactly, else PyAV), ``decord`` or ``pyav``;
            both give the same frames. Image files are always read by Pillow.
        rate: Frames per second of decoded frames that come without times; 24 if not given.

    Returns:
        The frames [T, H, W, 3] uint8 with times, numbers and source facts.

    Raises:
        MediaError: The media are missing, broken, too large or of the wrong kind, or an argument
            is out of range; one line that names the value and the fix.
    """
    ask = Ask.parse(frames, fps, times)
    if backend not in BACKENDS:
        raise MediaError(f"unknown backend {quote(backend)}: choose {', '.join(BACKENDS)}")
    if is_encoded(media):
        source = open_source(media, limits)
        if source.kind in IMAGE_KINDS:
            return read_animation(source, ask, limits)
        return read_file(source, ask, limits, backend)
    if isinstance(media, Image.Image):
        return image_clip(media, ask, limits, "the animation")
    return sequence_clip(media, ask, limits, rate)


def iter_video(
    media: object,
    *,
    fps: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    rate: float | None = None,
    ahead: Ahead = DEFAULT_AHEAD,
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of a video lazily, each with its time in seconds.

    With `fps` it yields the frames that ``read_video(media, fps=...)`` gives, one frame behind
    the source; without, every frame. A long file of which few frames are wanted is decoded by
    several threads, which run ahead; all else is decoded as it is asked for and nothing is held.
    An endless iterator of frames stays endless, and a slow consumer runs into no time limit.

    Args:
        media: As for `read_video`.
        fps: How many frames to take per second.
        limits: Size limits; those on frames and duration apply to files only.
        rate: Frames per second of decoded frames that come without times; 24 if not given.
        ahead: How many decoded frames of a long file may wait.

    Yields:
        (picture [H, W, 3] uint8, seconds).

    Raises:
        MediaError: At once for a bad argument or file, later for damage inside it.
    """
    step = None if fps is None else positive_rate("fps", fps)
    if is_encoded(media):
        source = open_source(media, limits)
        if source.kind not in IMAGE_KINDS:
            return iter_file(source, limits, step, ahead)
        media = source
    pairs, tolerance = _stream(media, limits, rate)
    return sample_stream(pairs, step, tolerance)


def _stream(media: object, limits: Limits, rate: object) -> tuple[Iterator[Any], float]:
    """The frames of any media but video files in turn, and how far their times are rounded."""
    if isinstance(media, Image.Image):
        return iter_animation(media, limits, "the animation"), 5e-4
    if not isinstance(media, Source):
        return iter_sequence(media, limits, rate), 1e-6
    source = media

    def opened() -> Iterator[tuple[Frame, float]]:
        with open_image(source, limits) as image:
            yield from iter_animation(image, limits, source.name)

    return opened(), 5e-4
