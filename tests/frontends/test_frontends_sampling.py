"""Which frames are chosen, against slow definitions, and what processors are told."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from media_factory import write_video
from transformers.video_utils import VideoMetadata

from mmfast.frontends.sampling import Ask, sample_stream
from mmfast.frontends.video.reader import read_video

TOLERANCE = 1e-6
ticks = st.lists(st.integers(1, 2000), min_size=1, max_size=40)  # milliseconds on screen
exact = settings(max_examples=150)


def shown(times: list[float], end: float, at: float) -> int:
    """The frame on screen at a time: the last one that has appeared."""
    assert at <= end + TOLERANCE
    return max([i for i, t in enumerate(times) if t <= at + TOLERANCE], default=0)


def timeline(stays: list[int]) -> tuple[list[float], float]:
    starts = [sum(stays[:i]) / 1000 for i in range(len(stays) + 1)]
    return starts[:-1], starts[-1]


@exact
@given(ticks, st.integers(1, 60))
def test_a_count_is_spread_evenly(stays: list[int], frames: int) -> None:
    times, end = timeline(stays)
    got = Ask(frames=frames).choose("x", np.array(times), end, TOLERANCE).tolist()
    n, k = len(times), min(frames, len(times))
    want = [round(Fraction(i * (n - 1), max(k - 1, 1))) for i in range(k)]  # halves to even
    assert got == want and len(set(got)) == k


@exact
@given(ticks, st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0, 7.5, 24.0, 30.0, 1000.0, 1e9]))
def test_a_rate_takes_what_is_on_screen_at_each_instant(stays: list[int], fps: float) -> None:
    times, end = timeline(stays)
    got = Ask(fps=fps).choose("x", np.array(times), end, TOLERANCE).tolist()
    if fps > 1000:
        want = set(range(len(times)))
    else:
        instants = (k / fps for k in range(int(end * fps) + 2))
        want = {shown(times, end, at) for at in instants if at < end - TOLERANCE}
    assert got == sorted(want)


@exact
@given(ticks, st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_times_take_the_frame_on_screen(stays: list[int], shares: list[float]) -> None:
    times, end = timeline(stays)
    asked = tuple(share * end for share in shares)
    got = Ask(times=asked).choose("x", np.array(times), end, TOLERANCE).tolist()
    assert got == [shown(times, end, at) for at in asked]


@exact
@given(ticks, st.sampled_from([0.5, 2.0, 7.5, 24.0, 1000.0]))
def test_a_stream_chooses_as_a_clip_does(stays: list[int], fps: float) -> None:
    """All but the last frame's stay are known to a stream; it assumes the one before."""
    stays = [*stays[:-1], stays[-2] if len(stays) > 1 else stays[-1]]
    times, end = timeline(stays)
    got = [i for i, _ in sample_stream(enumerate(times), fps, TOLERANCE)]
    assert got == Ask(fps=fps).choose("x", np.array(times), end, TOLERANCE).tolist()


UNEVEN = [Fraction(n * n + 30 * n, 1000) for n in range(48)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
@pytest.mark.parametrize("times", [None, UNEVEN, [Fraction(n, 25) + 3 for n in range(48)]])
def test_processors_are_told_the_true_times(tmp_path: Path, suffix: str, times) -> None:
    """Through transformers' own class, whose timestamps are frames_indices / fps."""
    path = write_video(tmp_path / f"clip.{suffix}", times=times)
    clip = read_video(path, frames=7)
    told = VideoMetadata(**clip.metadata())
    true = [float(times[i]) if times else i / 30 for i in clip.indices]
    tolerance = 1e-3 if times is None else 1e-6
    assert np.allclose(told.timestamps, true, atol=tolerance)
    assert told.sampled_fps == pytest.approx(7 / clip.duration, rel=0.02 if times is None else 1)
    assert (told.width, told.height) == (96, 64) and told.video_backend == "decord"
    assert max(told.frames_indices) < told.total_num_frames
    if times is None:
        assert told.fps == 30 and told.total_num_frames == 48
        assert told.frames_indices == list(clip.indices)


@pytest.mark.parametrize("times", [None, UNEVEN], ids=["even", "uneven"])
def test_qwen3_vl_writes_the_true_times(tmp_path: Path, times) -> None:
    """Its processor puts the mean of each pair of times into the prompt."""
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    clip = read_video(write_video(tmp_path / "clip.mp4", times=times), frames=8)
    told = VideoMetadata(**clip.metadata())
    stamps = Qwen3VLProcessor._calculate_timestamps(None, told.frames_indices, told.fps, 2)
    pairs = zip(clip.times[::2], clip.times[1::2], strict=True)
    assert stamps == pytest.approx([(a + b) / 2 for a, b in pairs], abs=1e-6)
