"""Animated GIF, WebP, PNG and AVIF as clips, each frame with its own duration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
from PIL import Image

from mmfast.frontends.clip import Clip, make_clip
from mmfast.frontends.guard import refusing
from mmfast.frontends.image import is_animated, open_image, to_rgb, upright
from mmfast.frontends.limits import Budget, Limits
from mmfast.frontends.picture import Frame
from mmfast.frontends.sampling import Ask, Floats
from mmfast.frontends.source import Source

_UNSET = 0.1  # seconds for a duration of 0, as browsers do; 0 frames per second cannot be shown
_STILL = 1.0  # a still image is a clip of one frame that lasts a second
_TOLERANCE = 5e-4  # durations are whole milliseconds


def read_animation(source: Source, ask: Ask, limits: Limits) -> Clip:
    """Read the frames asked for from an image file, animated or still."""
    with open_image(source, limits) as image:
        return image_clip(image, ask, limits, source.name)


def image_clip(image: Image.Image, ask: Ask, limits: Limits, name: str) -> Clip:
    """Read the frames asked for from an open PIL image and put its position back."""
    limits.check_picture(name, *image.size)
    with refusing(name), _position_kept(image):
        times = frame_times(image, limits, name)  # [n + 1]
        end = float(times[-1])
        limits.check_duration(name, end)
        asked = ask.choose(name, times[:-1], end, _TOLERANCE)
        limits.check_decoded(name, len(asked), *image.size)
        wanted = set(asked.tolist())
        found = {i: _rgb(image, name) for i in _walk(image, limits, name) if i in wanted}
    frames = np.stack([found[i] for i in asked.tolist()])  # [m, H, W, 3]
    return make_clip(frames, asked, times[:-1], end, 0.0, name, "pillow")


def frame_times(image: Image.Image, limits: Limits, name: str) -> Floats:
    """When each frame appears and when the last one ends, in seconds, [n + 1]."""
    if not is_animated(image):
        return np.array([0.0, _STILL])
    stays = []
    for _ in _walk(image, limits, name):
        image.load()  # WebP and AVIF tell a frame's duration when they decode it
        stays.append(float(image.info.get("duration") or 0) / 1000 or _UNSET)
    return np.concatenate([[0.0], np.cumsum(stays)])


def iter_animation(image: Image.Image, limits: Limits, name: str) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of an open image one by one, with their times."""
    with _position_kept(image):
        with refusing(name):
            times = frame_times(image, limits, name)
        for i in _walk(image, limits.untimed(), name):
            with refusing(name):
                rgb = _rgb(image, name)
            yield rgb, float(times[i])


@contextmanager
def _position_kept(image: Image.Image) -> Iterator[None]:
    """Put an animation back to the frame at which the caller left it."""
    start = image.tell()
    try:
        yield
    finally:
        if image.tell() != start:
            with suppress(Exception):  # a broken file has said so already
                image.seek(start)


def _rgb(image: Image.Image, name: str) -> Frame:
    return to_rgb(image if is_animated(image) else upright(image), name)


def _walk(image: Image.Image, limits: Limits, name: str) -> Iterator[int]:
    """Step through the frames of an animation, numbered from 0, within the budget."""
    if not is_animated(image):
        yield 0
        return
    budget = Budget(limits, name)
    total = int(getattr(image, "n_frames", 1))
    limits.check_frames(name, total)
    # An animated PNG may begin with a still for old viewers, which is no part of the animation.
    first = 1 if getattr(image, "default_image", False) else 0
    for position in range(first, total):
        with refusing(name):
            image.seek(position)
        budget.frame(*image.size)
        yield position - first
