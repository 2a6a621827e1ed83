"""Pictures come out upright and in the right colours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from media_factory import numbers_of, picture, turned, write_flat, write_video

from mmfast.frontends.video.reader import iter_video, read_video


@pytest.mark.parametrize("source", ["path", "bytes"])
@pytest.mark.parametrize(
    ("matrix", "undo"),
    [
        pytest.param((0, 1, -1, 0), lambda p: np.rot90(p, 1), id="quarter turn right"),
        pytest.param((-1, 0, 0, -1), lambda p: np.rot90(p, 2), id="half turn"),
        pytest.param((0, -1, 1, 0), lambda p: np.rot90(p, 3), id="quarter turn left"),
        pytest.param((-1, 0, 0, 1), lambda p: p[:, ::-1], id="mirrored"),
        pytest.param((1, 0, 0, -1), lambda p: p[::-1], id="upside down mirrored"),
        pytest.param((0, 1, 1, 0), lambda p: p.transpose(1, 0, 2), id="transposed"),
    ],
)
def test_rotation_metadata_is_applied(tmp_path: Path, matrix, undo, source: str) -> None:
    """The stored frames are turned so that the matrix must bring the bar code back upright."""
    height, width = undo(picture(0)).shape[:2]
    plain = tmp_path / "plain.mp4"
    write_video(plain, size=(width, height), stored=lambda n: undo(picture(n)), count=20)
    path = tmp_path / "turned.mp4"
    path.write_bytes(turned(plain.read_bytes(), *matrix))
    media = path if source == "path" else path.read_bytes()
    clip = read_video(media, frames=7)
    assert (clip.width, clip.height) == (96, 64) and clip.frames.shape[1:] == (64, 96, 3)
    assert numbers_of(clip.frames) == list(clip.indices)
    assert np.array_equal(clip.frames, read_video(media, frames=7, backend="pyav").frames)
    assert numbers_of([next(iter_video(media))[0]]) == [0]


@pytest.mark.parametrize(
    ("space", "kr", "kb"), [(1, 0.2126, 0.0722), (5, 0.299, 0.114)], ids=["709", "601"]
)
@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("backend", ["decord", "pyav"])
def test_colour_follows_matrix_and_range(
    tmp_path: Path, space: int, kr: float, kb: float, full: bool, backend: str
) -> None:
    """Against the textbook conversion, worked out here from the matrix's two constants."""
    yuv = (120, 90, 170)
    path = write_flat(tmp_path / "flat.mp4", yuv, space, 2 if full else 1)
    luma = yuv[0] if full else (yuv[0] - 16) * 255 / 219
    blue, red = ((v - 128) * (1 if full else 255 / 224) for v in yuv[1:])
    r, b = luma + 2 * (1 - kr) * red, luma + 2 * (1 - kb) * blue
    g = (luma - kr * r - kb * b) / (1 - kr - kb)
    got = read_video(path, frames=1, backend=backend).frames[0].reshape(-1, 3)
    assert np.abs(got - np.array([r, g, b])).max() <= 2
