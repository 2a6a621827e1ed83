"""Frames that are decoded already: layouts, dtypes, lists and iterators give the same clip."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
import pytest
import torch
from media_factory import numbers_of, picture
from PIL import Image

from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.video.reader import iter_video, read_video

COUNT = 10
STACK = np.stack([picture(n) for n in range(COUNT)])  # [T, H, W, 3]
CHANNELS_FIRST = STACK.transpose(0, 3, 1, 2)
MEDIA = {
    "numpy THWC": lambda: STACK,
    "numpy TCHW": lambda: CHANNELS_FIRST,
    "numpy float": lambda: STACK / 255,
    "numpy half": lambda: (STACK / 255).astype(np.float16),
    "numpy float TCHW": lambda: (CHANNELS_FIRST / 255).astype(np.float32),
    "numpy reversed view": lambda: STACK[::-1][::-1],
    "torch TCHW": lambda: torch.tensor(CHANNELS_FIRST),
    "torch THWC": lambda: torch.tensor(STACK),
    "torch float with gradient": lambda: torch.tensor(CHANNELS_FIRST / 255, requires_grad=True),
    "list of numpy": lambda: list(STACK),
    "list of PIL": lambda: [Image.fromarray(f) for f in STACK],
    "list of torch": lambda: list(torch.tensor(CHANNELS_FIRST)),
    "mixed tuple": lambda: (
        Image.fromarray(STACK[0]),
        torch.tensor(CHANNELS_FIRST[1]),
        *(STACK[2:] / 255),
    ),
    "generator": lambda: (frame for frame in STACK),
    "deque": lambda: deque(STACK),
}


@pytest.mark.parametrize("name", MEDIA)
def test_every_container_of_frames_gives_the_same_clip(name: str) -> None:
    clip = read_video(MEDIA[name](), frames=4)
    assert clip.indices == (0, 3, 6, 9) and clip.total_frames == COUNT
    assert np.array_equal(clip.frames, STACK[[0, 3, 6, 9]])
    assert clip.frames.dtype == np.uint8 and clip.backend == "array"
    assert clip.fps == 24 and clip.times == pytest.approx([i / 24 for i in clip.indices])
    assert (clip.width, clip.height) == (96, 64)
    streamed = list(iter_video(MEDIA[name]()))
    assert np.array_equal(np.stack([f for f, _ in streamed]), STACK)
    assert kind_of(MEDIA[name]()) == "video"


def test_brain_floats_round_to_the_nearest_byte() -> None:
    tensor = torch.tensor(CHANNELS_FIRST / 255).bfloat16()
    clip = read_video(tensor, frames=COUNT)
    want = (tensor.float().permute(0, 2, 3, 1) * 255).round().byte().numpy()
    assert np.array_equal(clip.frames, want)
    assert numbers_of(clip.frames) == list(range(COUNT))


def test_the_clip_does_not_share_the_caller_s_memory() -> None:
    mine = STACK.copy()
    clip, image = read_video(mine, frames=COUNT), read_image(mine[0])
    mine[:] = 0
    assert np.array_equal(clip.frames, STACK) and np.array_equal(image, STACK[0])


@pytest.mark.parametrize(
    ("shape", "tensor", "want"),
    [
        ((2, 8, 6, 3), False, (8, 6)),
        ((2, 3, 8, 6), False, (8, 6)),
        ((2, 3, 8, 3), False, (3, 8)),  # both could be: numpy has channels last
        ((2, 3, 8, 3), True, (8, 3)),  # and torch first
        ((2, 3, 8, 4), False, (8, 4)),  # three wins over four
        ((2, 4, 8, 3), True, (4, 8)),
        ((2, 1, 8, 6), True, (8, 6)),
        ((2, 8, 6, 1), True, (8, 6)),
    ],
)
def test_channels_are_found(shape: tuple[int, ...], tensor: bool, want: tuple[int, int]) -> None:
    array = np.zeros(shape, np.uint8)
    clip = read_video(torch.tensor(array) if tensor else array, frames=2)
    assert clip.frames.shape[1:3] == want
    image = read_image(torch.tensor(array[0]) if tensor else array[0])
    assert image.shape[:2] == want


def test_grey_and_alpha() -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for array in (grey, grey[..., None], grey[None]):
        assert np.array_equal(read_image(array), np.stack([grey] * 3, -1))
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[..., 0], rgba[..., 3] = 200, 51  # 20 % opaque
    assert np.abs(read_image(rgba).astype(int) - [244, 204, 204]).max() <= 1
    assert np.abs(read_image(Image.fromarray(rgba)).astype(int) - [244, 204, 204]).max() <= 1


def test_a_rate_makes_times() -> None:
    clip = read_video(STACK, fps=2, rate=4)
    assert clip.indices == (0, 2, 4, 6, 8) and clip.times == (0, 0.5, 1.0, 1.5, 2.0)
    assert (clip.fps, clip.duration) == (4, 2.5)
    assert read_video(iter(STACK), times=[0.3, 2.49], rate=4).indices == (1, 9)


def test_pairs_bring_their_own_times() -> None:
    times = [0.0, 0.1, 0.4, 0.5, 2.0, 2.1, 2.2, 3.0, 3.5, 3.6]
    for media in (list(zip(STACK, times, strict=True)), zip(STACK, times, strict=True)):
        clip = read_video(media, fps=1)
        assert clip.times == (0.0, 0.5, 2.0, 3.0) and numbers_of(clip.frames) == [0, 3, 4, 7]
        assert clip.duration == pytest.approx(3.7)
    again = read_video(iter_video(zip(STACK, times, strict=True)), times=[2.05])
    assert again.times == (2.0,) and again.indices == (4,)


def test_an_endless_stream_stays_lazy() -> None:
    drawn = []

    def camera():
        for number in range(10**9):
            drawn.append(number)
            yield picture(number % 1000), number / 30

    pairs = list(islice(iter_video(camera(), fps=3), 20))
    assert numbers_of([f for f, _ in pairs]) == list(range(0, 200, 10))
    assert [t for _, t in pairs] == pytest.approx([n / 3 for n in range(20)])
    assert len(drawn) < 200  # one frame behind, never more
