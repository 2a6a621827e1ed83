"""Images and animations with Pillow, from files and arrays, with their size checked first."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from mmfast.core.errors import MediaError, warn
from mmfast.frontends.clip import Clip, Frame, Orientation, make_clip
from mmfast.frontends.headers import check_header
from mmfast.frontends.sampling import Ask, Floats
from mmfast.frontends.source import (
    DEFAULT_LIMITS,
    IMAGE_KINDS,
    Budget,
    Limits,
    MediaSource,
    is_encoded,
    open_source,
    quote,
    refusing,
)

if TYPE_CHECKING:
    from mmfast.core.trace import Trace  # which imports torch

_CHANNELS = (1, 3, 4)
_SLACK = 1e-3  # a float picture may overshoot [0, 1] by resampling noise of bf16


def is_tensor(media: object) -> bool:
    """Return True if `media` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(media, torch.Tensor)


def is_array(media: object) -> bool:
    """Return True if `media` is a numpy array or a torch tensor."""
    return isinstance(media, np.ndarray) or is_tensor(media)


_OPENED = (("av", "InputContainer"), ("decord", "VideoReader"), ("torchcodec", "VideoDecoder"))


def library_of(media: object) -> str:
    """Return the library that has opened a video (`av`, `decord`, `torchcodec`), "" for others."""
    kind = type(media)
    found = (kind.__module__.partition(".")[0], kind.__name__)
    return found[0] if found in _OPENED else ""


def decoded(media: Any) -> Any:
    """Return a frame of PyAV or decord as an upright array [H, W, 3]; anything else as it is."""
    if is_av_frame(media):
        with refusing("a frame of PyAV"):
            return Orientation.of(media).apply(media.to_ndarray(format="rgb24"))
    return media.asnumpy() if hasattr(media, "asnumpy") else media


def is_av_frame(media: object) -> bool:
    """Return True if `media` is a frame of PyAV, without importing it."""
    av = sys.modules.get("av")
    return av is not None and isinstance(media, av.VideoFrame)


def to_numpy(array: Any, name: str) -> npt.NDArray[Any]:
    """Convert an array to numpy; torch's types that numpy lacks become float32."""
    if not is_tensor(array):
        return np.asarray(array)
    try:
        host = array.detach().cpu()
        host = host.float() if host.is_floating_point() else host
        return np.asarray(host.numpy())
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise MediaError(
            f"{name} is a tensor that numpy cannot read ({str(error).splitlines()[0]}): "
            f"give a dense uint8 or float tensor"
        ) from None


def channel_axis(shape: tuple[int, ...], tensor: bool, name: str) -> int:
    """Find the channels of a picture: -1 for [..., H, W, C], -3 for [..., C, H, W].

    Where both are possible, an axis of 3 wins, then the custom of the library (torch or numpy).
    """
    axes = [axis for axis in (-1, -3) if shape[axis] in _CHANNELS]
    if not axes:
        raise MediaError(
            f"{name} has shape {list(shape)}, in which no axis can be the channels: "
            f"give [T, H, W, 3] or [T, 3, H, W] for a video, [H, W, 3] or [3, H, W] for an image"
        )
    rgb = [axis for axis in axes if shape[axis] == 3]
    preferred = -3 if tensor else -1
    choices = rgb or axes
    return preferred if preferred in choices else choices[0]


def array_picture(array: Any, name: str, limits: Limits, axis: int | None = None) -> Frame:
    """Turn a picture [H, W], [H, W, C] or [C, H, W] into RGB [H, W, 3]; float is scaled by 255."""
    shape = tuple(array.shape)
    if len(shape) not in (2, 3):
        raise MediaError(
            f"{name} has shape {list(shape)}: an image is [H, W], [H, W, 3] or [3, H, W], "
            f"a video [T, H, W, 3] or [T, 3, H, W]"
        )
    if 0 in shape:
        raise MediaError(f"{name} has shape {list(shape)}, which holds no pixel: give a picture")
    if len(shape) == 3 and axis is None:
        axis = channel_axis(shape, is_tensor(array), name)
    height, width = shape[-2:] if axis == -3 else shape[:2]
    limits.check_picture(name, width, height)
    pixels = _to_uint8(to_numpy(array, name), name)
    if axis == -3:
        pixels = pixels.transpose(1, 2, 0)
    return _to_rgb(pixels)


def _to_uint8(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array
    if not np.issubdtype(array.dtype, np.floating):
        raise MediaError(
            f"{name} has dtype {array.dtype}: give uint8 in [0, 255] or float in [0, 1]"
        )
    low, high = float(array.min()), float(array.max())  # NaN wins both
    if not np.isfinite([low, high]).all():
        raise MediaError(f"{name} holds NaN or infinite values: give float in [0, 1] or uint8")
    if low < -_SLACK or high > 1 + _SLACK:
        raise MediaError(
            f"{name} has float values from {low:g} to {high:g}: scale them to [0, 1] or give uint8"
        )
    scaled: Frame = np.rint(np.clip(array, 0, 1) * 255).astype(np.uint8)
    return scaled


def _to_rgb(pixels: npt.NDArray[np.uint8]) -> Frame:
    """Convert [H, W], [H, W, 1], [H, W, 3] or [H, W, 4] to [H, W, 3]."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[-1] == 1:
        return np.repeat(pixels, 3, axis=-1)
    if pixels.shape[-1] == 3:
        return pixels
    alpha = pixels[..., 3:].astype(np.uint16)
    over_white = pixels[..., :3] * alpha + 255 * (255 - alpha) + 127
    rgb: Frame = (over_white // 255).astype(np.uint8)
    return rgb


_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")  # elsewhere several pictures are pages, not frames
_PAGES = "{} has several pages, of which one is read; give each as an image"
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


def read_image(
    media: object, *, limits: Limits = DEFAULT_LIMITS, trace: Trace | None = None
) -> Frame:
    """Read one image as upright RGB, uint8 [H, W, 3].

    Takes a path, bytes, a binary file object, a PIL image, a frame of PyAV or decord, or a numpy
    array or torch tensor [H, W], [H, W, C] or [C, H, W] with 1, 3 or 4 channels, uint8 or float in
    [0, 1]. The EXIF orientation is applied, alpha is composited over white; of an animation comes
    the first frame and of a TIFF the first page, with a warning, which `trace` notes, or the
    current one of an open PIL image. A MediaError says that it is missing, broken, too large, or
    not an image.
    """
    return picture(media, "the image", limits, trace)


def picture(media: object, name: str, limits: Limits, trace: Trace | None = None) -> Frame:
    """Implement `read_image`; `name` stands in messages for a picture without a path."""
    media = decoded(media)
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
        raise MediaError(
            f"{source.name} is a video ({source.kind}) where a picture belongs: give one of its "
            "frames, or the video as an input of its own"
        )
    with open_image(source, limits) as image, refusing(source.name):
        moves, pages = is_animated(image), _has_pages(image)
        found = to_rgb(upright(image), source.name)
    tell = warn if trace is None else trace.warn
    if moves:
        tell(f"{source.name} is an animation, of which one frame is read; give it as a video")
    if pages:
        tell(_PAGES.format(source.name))
    return found


def _has_pages(image: Image.Image) -> bool:
    """Return True for a document; the second picture of a photo (MPO) is a preview or a depth."""
    return image.format == "TIFF" and bool(getattr(image, "is_animated", False))


def kind_of(media: object, *, limits: Limits = DEFAULT_LIMITS) -> Literal["image", "video"]:
    """Return the kind of `media`, from its content and never from the file's suffix.

    Animations, arrays of four axes, lists and iterators are videos. A file object keeps its
    position; one that cannot seek is consumed.
    """
    media = decoded(media)
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
    if is_sequence(media) or library_of(media):
        return "video"
    raise MediaError(
        f"{quote(media)} is neither an image nor a video: give a path, bytes, a file object, "
        f"a PIL image, an array, or a list or iterator of frames"
    )


def is_sequence(media: object) -> bool:
    """Return True if `media` is a list, an iterator or another ordered collection of frames."""
    return isinstance(media, Iterable) and not isinstance(media, Mapping | Set | str)


def is_animated(image: Image.Image) -> bool:
    """Return True if a PIL image is an animation."""
    return image.format in _ANIMATED and bool(getattr(image, "is_animated", False))


@contextmanager
def open_image(source: MediaSource, limits: Limits) -> Iterator[Image.Image]:
    """Open an image lazily, by the plugin of its kind: its size is checked, no pixel is decoded."""
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
    """Apply the EXIF orientation; broken EXIF data are ignored."""
    if image.format == "TIFF":
        image.load()  # which turns it, and then says that it is upright
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


_UNSET = 0.1  # seconds for a duration of 0, as browsers do; 0 frames per second cannot be shown
_STILL = 1.0  # a still image is a clip of one frame that lasts a second
_TOLERANCE = 5e-4  # durations are whole milliseconds


def read_animation(source: MediaSource, ask: Ask, limits: Limits) -> Clip:
    """Read the requested frames of an image file, animated or still."""
    with open_image(source, limits) as image:
        return image_clip(image, ask, limits, source.name)


def image_clip(image: Image.Image, ask: Ask, limits: Limits, name: str) -> Clip:
    """Read the requested frames of an open PIL image and restore its position."""
    limits.check_picture(name, *image.size)
    with refusing(name), _position_kept(image):
        times = frame_times(image, limits, name)  # [n + 1]
        end = float(times[-1])
        limits.check_duration(name, end)
        asked = ask.choose(name, times[:-1], end, _TOLERANCE)
        limits.check_decoded(name, len(asked), *image.size)
        wanted = set(asked.tolist())
        found = {i: _rgb(image, name) for i in _walk(image, limits, name) if i in wanted}
        pages = _has_pages(image)
    if pages:
        warn(_PAGES.format(name))
    frames = np.stack([found[i] for i in asked.tolist()])  # [m, H, W, 3]
    return make_clip(frames, asked, times[:-1], end, 0.0, name, "pillow")


def frame_times(image: Image.Image, limits: Limits, name: str) -> Floats:
    """Return the start of each frame and the end of the last one in seconds, [n + 1]."""
    if not is_animated(image):
        return np.array([0.0, _STILL])
    stays = []
    for _ in _walk(image, limits, name):
        image.load()  # WebP and AVIF know a frame's duration after decoding it
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
    start = image.tell()
    try:
        yield
    finally:
        if image.tell() != start:
            with suppress(Exception):  # a broken file has raised already
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
    # An animated PNG may begin with a still for old viewers, which is not part of the animation.
    first = 1 if getattr(image, "default_image", False) else 0
    for position in range(first, total):
        with refusing(name):
            image.seek(position)
        budget.frame(*image.size)
        yield position - first
