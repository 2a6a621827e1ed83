"""Images: Pillow with the decoder fixed by the file's magic and the size checked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from PIL import Image

from mmfast.core.errors import MediaError
from mmfast.frontends.guard import quote, refusing
from mmfast.frontends.headers import check_header
from mmfast.frontends.limits import DEFAULT_LIMITS, Limits
from mmfast.frontends.picture import Frame
from mmfast.frontends.pixels import array_picture, is_array
from mmfast.frontends.source import IMAGE_KINDS, Source, is_encoded, open_source

_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")  # elsewhere several pictures are pages, not frames
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(media: object, *, limits: Limits = DEFAULT_LIMITS) -> Frame:
    """Read one image as upright RGB.

    Takes a path, bytes, a binary file object, a PIL image, or a numpy array or torch tensor
    [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, uint8 or float in [0, 1]. The EXIF
    orientation is applied, alpha is composited over white; of an animation comes the first frame,
    or the current one of an open PIL image.

    Returns:
        uint8 [H, W, 3].

    Raises:
        MediaError: The input is missing, broken, too large, or not an image.
    """
    return picture(media, "the image", limits)


def picture(media: object, name: str, limits: Limits) -> Frame:
    """Do the work of `read_image`; `name` is what messages call a picture without a path."""
    if is_array(media):
        return np.array(array_picture(media, name, limits))
    if isinstance(media, Image.Image):
        limits.check_picture(name, *media.size)
        with refusing(name):
            return to_rgb(upright(media), name)
    if not is_encoded(media):
        raise MediaError(
            f"{name} cannot be of type {type(media).__name__}: give a path, bytes, a file object, "
            f"a PIL image, a numpy array or a torch tensor"
        )
    source = open_source(media, limits)
    if source.kind not in IMAGE_KINDS:
        raise MediaError(f"{source.name} is a video ({source.kind}): read it with read_video")
    with open_image(source, limits) as image, refusing(source.name):
        return to_rgb(upright(image), source.name)


def kind_of(media: object, *, limits: Limits = DEFAULT_LIMITS) -> Literal["image", "video"]:
    """Say what `media` is, from its content and never from the file's suffix.

    Animations, arrays of four axes, lists and iterators are videos. A file object keeps its
    position; one that cannot seek is used up.

    Raises:
        MediaError: It is neither, or cannot be opened.
    """
    if is_array(media):
        return "video" if getattr(media, "ndim", 0) > 3 else "image"
    if isinstance(media, Image.Image):
        return "video" if is_animated(media) else "image"
    if is_encoded(media):
        source = open_source(media, limits)
        if source.kind not in IMAGE_KINDS:
            return "video"
        with open_image(source, limits) as image:
            return "video" if is_animated(image) else "image"
    if is_sequence(media):
        return "video"
    raise MediaError(
        f"{quote(media)} is neither an image nor a video: give a path, bytes, a file object, "
        f"a PIL image, an array, or a list or iterator of frames"
    )


def is_sequence(media: object) -> bool:
    """Say whether `media` is a list, an iterator or another ordered collection of frames."""
    return isinstance(media, Iterable) and not isinstance(media, Mapping | Set | str)


def is_animated(image: Image.Image) -> bool:
    """Say whether a PIL image is an animation."""
    return image.format in _ANIMATED and bool(getattr(image, "is_animated", False))


@contextmanager
def open_image(source: Source, limits: Limits) -> Iterator[Image.Image]:
    """Open an image lazily: its header is read and its size checked, no pixel is decoded.

    `Image.open` would try every plugin, and only warns about a bomb; here the plugin is the one
    for the sniffed kind and the limit is ours.
    """
    check_header(source)
    name = IMAGE_KINDS[source.kind]
    Image.preinit()
    if name not in Image.OPEN:
        Image.init()
    if name not in Image.OPEN:
        raise MediaError(f"this Pillow has no {name} reader for {source.name}: convert it to PNG")
    with source.open() as file:
        factory: Any = Image.OPEN[name][0]
        with refusing(source.name, "opened"):
            image: Image.Image = factory(file, "")
        limits.check_picture(source.name, *image.size)
        yield image


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; broken EXIF data count as none."""
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Pillow raises many kinds on garbage, also its own warnings made errors
        turn = None
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image, name: str) -> Frame:
    """Convert any PIL image to RGB [H, W, 3], alpha composited over white."""
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)
        return np.repeat(grey[..., None], 3, axis=-1)
    if image.mode in ("I", "F"):
        raise MediaError(f"{name} has {image.mode} pixels of 32 bits: scale them to 8 bits first")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    return np.array(image.convert("RGB"))
