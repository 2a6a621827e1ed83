"""Still images and animations."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from media_factory import number_of, numbers_of, picture, png_of_size, write_animation
from PIL import Image, ImageOps

from mmfast.core.errors import MediaError
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.source import Limits
from mmfast.frontends.video.reader import iter_video, read_video

STAYS = [50, 120, 70, 400, 30, 200]  # milliseconds
STARTS = [0.0, 0.05, 0.17, 0.24, 0.64, 0.67]


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["png", "bmp", "tiff", "gif", "webp"])
def test_lossless_kinds_come_back_exactly(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "wrong-suffix.dat"  # the content decides
    options = {"lossless": True} if kind == "webp" else {}
    path.write_bytes(encoded(Image.fromarray(picture(37)), kind, **options))
    data = path.read_bytes()
    for media in (path, str(path), data, bytearray(data), io.BytesIO(data)):
        assert np.array_equal(read_image(media), picture(37))
    with path.open("rb") as file:
        assert np.array_equal(read_image(file), read_image(file))  # its position is put back
    assert kind_of(path) == "image"
    clip = read_video(path, frames=8)  # a still is a clip of one frame
    assert numbers_of(clip.frames) == [37] and clip.times == (0.0,) and clip.fps == 1


@pytest.mark.parametrize("kind", ["png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", [3, 6, 7, 8])
def test_exif_orientation_is_applied_once(orientation: int, kind: str) -> None:
    """Pillow itself turns some kinds while it reads their pixels."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = np.zeros((6, 9, 3), np.uint8)
    stored[0, 0] = 255
    more: dict[str, Any] = {"lossless": True} if kind == "webp" else {}
    data = encoded(Image.fromarray(stored), kind, exif=exif, **more)
    turned = {3: np.rot90(stored, 2), 6: np.rot90(stored, 3), 8: np.rot90(stored)}
    turned[7] = np.rot90(stored, 2).transpose(1, 0, 2)
    for given in (data, Image.open(io.BytesIO(data))):
        assert np.array_equal(read_image(given), turned[orientation])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(orientation: int) -> None:
    """Pillow's own transposition is the oracle; the bar code says that it is upright."""
    upright = Image.fromarray(picture(21))
    exif = Image.Exif()
    exif[0x0112] = orientation
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the inverse of each turn, as Pillow counts
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(back[orientation]))
    data = encoded(stored, "png", exif=exif.tobytes())
    assert np.array_equal(read_image(data), picture(21))
    assert np.array_equal(read_image(Image.open(io.BytesIO(data))), picture(21))
    assert np.array_equal(
        read_image(data), np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    )


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "YCbCr", "1", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    grey = Image.fromarray(np.where(picture(9)[..., 0] > 127, 255, 0).astype(np.uint8))
    want = np.repeat(np.asarray(grey)[..., None], 3, axis=-1)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    else:
        image = (grey.convert("RGB") if mode == "CMYK" else grey).convert(mode)
    assert np.abs(read_image(image).astype(int) - want).max() <= 1


def test_transparency_shows_white() -> None:
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    palette = clear.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    for data in (encoded(clear, "png"), encoded(palette, "gif"), encoded(clear, "webp")):
        assert (read_image(data) == 255).all()


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_an_animation_is_a_video_with_its_own_times(tmp_path: Path, kind: str) -> None:
    path = write_animation(tmp_path / f"a.{kind}", STAYS)
    opened = Image.open(io.BytesIO(path.read_bytes()))
    assert kind_of(path) == "video" and kind_of(opened) == "video"
    for media in (path, path.read_bytes(), opened):
        clip = read_video(media, frames=100)
        assert numbers_of(clip.frames) == list(range(6)) and clip.backend == "pillow"
        assert clip.times == pytest.approx(STARTS) and clip.duration == pytest.approx(0.87)
        assert clip.total_frames == 6 and clip.fps == pytest.approx(5 / 0.67)
        asked = read_video(media, times=[0.66, 0.16, 0.87, 0.2])
        assert asked.indices == (4, 1, 5, 2) and numbers_of(asked.frames) == [4, 1, 5, 2]
        assert read_video(media, fps=5).indices == (0, 2, 3, 5)  # on screen at 0, .2, .4, .6, .8
        pairs = list(iter_video(media))
        assert numbers_of([f for f, _ in pairs]) == list(range(6))
        assert [t for _, t in pairs] == pytest.approx(STARTS)
        if media is opened:  # its current one
            assert number_of(read_image(media)) == 0
            continue
        with pytest.warns(UserWarning, match="is an animation, of which one frame is read") as told:
            assert number_of(read_image(media)) == 0
        assert len(told) == 1


def test_a_pil_animation_keeps_its_position(tmp_path: Path) -> None:
    with Image.open(write_animation(tmp_path / "a.gif", STAYS)) as image:
        image.seek(3)
        read_video(image, frames=2)
        assert image.tell() == 3


def test_a_duration_of_zero_counts_as_a_tenth(tmp_path: Path) -> None:
    """As browsers do; written by hand because Pillow drops a duration of 0."""
    data = write_animation(tmp_path / "a.gif", [10] * 4).read_bytes()
    still = re.sub(rb"(\x21\xf9\x04.)\x01\x00", rb"\1\0\0", data, flags=re.DOTALL)
    assert read_video(still, frames=4).times == pytest.approx((0, 0.1, 0.2, 0.3))


def test_a_photo_of_several_pages_is_an_image(tmp_path: Path) -> None:
    pages = [Image.fromarray(picture(n)) for n in (5, 6)]
    pages[0].save(tmp_path / "pages.tiff", save_all=True, append_images=pages[1:])
    assert kind_of(tmp_path / "pages.tiff") == "image"
    with pytest.warns(UserWarning, match="pages.tiff' has several pages, of which one") as told:
        assert number_of(read_image(tmp_path / "pages.tiff")) == 5
        assert len(read_video(tmp_path / "pages.tiff", frames=4)) == 1
    assert len(told) == 2
    pages[0].save(tmp_path / "page.tiff")
    assert number_of(read_image(tmp_path / "page.tiff")) == 5


def test_image_limits(tmp_path: Path) -> None:
    assert read_image(Image.new("RGB", (100, 50)), limits=Limits(pixels=5000)).shape == (50, 100, 3)
    for media in (Image.new("RGB", (100, 51)), png_of_size(100, 51), np.zeros((51, 100, 3))):
        with pytest.raises(MediaError, match="100x51 = 5,100 pixels"):
            read_image(media, limits=Limits(pixels=5000))
    path = write_animation(tmp_path / "a.gif", STAYS)
    for limits in (Limits(frames=5), Limits(duration=0.8), Limits(decoded_bytes=5 * 96 * 64 * 3)):
        with pytest.raises(MediaError):
            read_video(path, frames=6, limits=limits)


def test_heic_is_named(tmp_path: Path) -> None:
    path = tmp_path / "photo.heic"
    path.write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    with pytest.raises(MediaError, match=r"HEIC image.*convert it to JPEG"):
        kind_of(path)
