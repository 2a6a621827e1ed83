"""The frame cache on the embedded clips, through the tower of the embedded model."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor

from mmfast.models.vision.frames.cache import FrameCache

ASSETS = Path(__file__).resolve().parents[3] / "assets"
CLIPS = sorted((ASSETS / "clips").glob("*.mp4"))


@pytest.fixture(scope="module")
def model() -> Any:
    return LlavaOnevisionForConditionalGeneration.from_pretrained(ASSETS / "models/tiny-video")


@pytest.fixture(scope="module")
def clips() -> list[Tensor]:
    """Pixels `[T, 3, H, W]` of every frame, 8 a second."""
    processor = LlavaOnevisionProcessor.from_pretrained(ASSETS / "models/tiny-video")
    found = []
    for path in CLIPS:
        with av.open(str(path)) as file:
            frames = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in file.decode(video=0)]
        batch = processor.video_processor(
            [torch.stack(frames).permute(0, 3, 1, 2)], return_tensors="pt"
        )
        found.append(batch["pixel_values_videos"][0])
    return found


@torch.no_grad()
def nearness(model: Any, video: Tensor, cache: FrameCache) -> tuple[Tensor, Any]:
    """Cosine of every token of every frame with the stock tower's, `[T, n]`, and the state."""
    stock = model.model.get_video_features(video[None]).pooler_output[0, :-1]
    state, rows = cache.start(), []
    for frame in video:
        with cache.using(state):
            rows.append(model.model.get_video_features(frame[None, None]).pooler_output[0, :-1])
    near = F.cosine_similarity(torch.cat(rows), stock, dim=-1)
    return near.unflatten(0, (len(video), -1)), state


def test_a_quarter_of_the_patches_gives_the_features_of_all(
    model: Any, clips: list[Tensor]
) -> None:
    worst, means = [], []
    for video in clips:
        near, state = nearness(model, video, FrameCache(model, 0.25))
        assert state.whole == 1  # nothing but the first frame
        means.append(near[1:].mean().item())
        worst.append(near[1:].min().item())
    assert len(clips) == 6
    assert min(means) > 0.995
    assert min(worst) > 0.97


def test_every_other_frame_keeps_the_mean(model: Any, clips: list[Tensor]) -> None:
    for video in clips:
        near, _ = nearness(model, video[::2], FrameCache(model, 0.25))
        assert near[1:].mean() > 0.98


def test_a_cut_is_found_and_needed(model: Any, clips: list[Tensor]) -> None:
    """To the negative of another clip: the clips themselves share a dark background."""
    for first, second in pairwise(clips[:4]):
        video = torch.cat([first[-3:], -second[:3]])
        near, state = nearness(model, video, FrameCache(model, 0.25))
        assert state.whole == 2
        assert near.mean(1).min() > 0.98
        blind, _ = nearness(model, video, FrameCache(model, 0.25, cut=None))
        assert blind[3].mean() < 0.9  # the planted fault: no refresh at a cut
