"""The frame cache under camera motion: where patches come from, and when reuse is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from frame_cache_checks import features, pictures, streamed
from tiny_models import tiny
from torch import Tensor
from torch.nn import functional as F

from mmfast.bench.suites import camera
from mmfast.core.errors import MmfastError
from mmfast.frontends.changes import global_shift
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.frames import cache as frame_cache
from mmfast.models.vision.frames.cache import FrameCache, Payoff
from mmfast.models.vision.frames.motion import Move, PatchRaster, by_frame
from mmfast.models.vision.frames.state import FrameCacheState, ReuseLimits

FAMILY, KIND, SIDE, PATCH = "llava_onevision", "video", 96, 8


@pytest.fixture
def any_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tower is too small for the cache."""
    monkeypatch.setattr(frame_cache, "LEAST_WORK", 0)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(embedded_path("tiny-video"), "cpu", "float32")[0]


def shots(motion: str, count: int) -> list[np.ndarray]:
    stream: Iterator[np.ndarray] = camera.shots(motion, SIDE, PATCH)
    return [next(stream) for _ in range(count)]


@torch.no_grad()
def watched(model: Any, frames: list[np.ndarray], cache: FrameCache, each: int = 1) -> Any:
    """Cosine of every frame's features with the stock tower's, and the state."""
    state, found = cache.start(), list[Tensor]()
    for at in range(0, len(frames), each):
        pixels = camera.pixels_of(np.stack(frames[at : at + each]))
        exact = by_frame(model.model.get_video_features(pixels).pooler_output, each)
        with cache.using(state):
            near = by_frame(model.model.get_video_features(pixels).pooler_output, each)
        pairs = zip(exact or [], near or [], strict=True)
        found += [F.cosine_similarity(a, b, dim=-1).mean() for a, b in pairs]
    return torch.stack(found), state


def slow_shift(now: Tensor, before: Tensor, most: int) -> tuple[int, int]:
    """The shift with the least mean difference where both pictures overlap, all of them tried."""
    found = {}
    height, width = now.shape
    for down in range(-most, most + 1):
        for right in range(-most, most + 1):
            rows = [y for y in range(height) if 0 <= y - down < height]
            columns = [x for x in range(width) if 0 <= x - right < width]
            new = now[rows][:, columns]
            old = before[[y - down for y in rows]][:, [x - right for x in columns]]
            found[down, right] = float((new - old).abs().mean())
    return min(found, key=lambda key: found[key])


@pytest.mark.parametrize("seed", range(6))
def test_a_shift_equals_that_of_a_search_over_all(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    world = F.avg_pool2d(torch.rand(1, 1, 120, 130, generator=gen), 3, 1)[0, 0]
    down, right = (int(torch.randint(-9, 10, (1,), generator=gen)) for _ in range(2))
    before = world[30:78, 30:90]
    now = world[30 - down : 78 - down, 30 - right : 90 - right]
    now = now + 0.01 * torch.randn(now.shape, generator=gen)
    assert global_shift(now, before) == slow_shift(now, before, 9) == (down, right)


def test_other_and_equal_pictures_have_not_moved() -> None:
    a, b = torch.rand(2, 64, 64)
    assert global_shift(a, b) == global_shift(a, a) == (0, 0)
    assert global_shift(a, torch.rand(64, 32)) == (0, 0)


@pytest.mark.parametrize(("down", "right"), [(0, 1), (-2, 0), (1, -1), (9, 0)])
def test_patches_come_from_where_the_picture_was(down: int, right: int) -> None:
    raster = PatchRaster.of(torch.zeros(33, 41), 1 + 4 * 5, 1)
    assert raster == PatchRaster(4, 5, 8, 1)
    move = raster.move(down, right, (0, 0), "cpu")
    assert move.sources is not None and move.sources[0] == 0
    new = []
    for row in range(4):
        for column in range(5):
            place, y, x = 1 + row * 5 + column, row - down, column - right
            if 0 <= y < 4 and 0 <= x < 5:
                assert move.sources[place] == 1 + y * 5 + x
            else:
                new.append(place)
    assert move.new.tolist() == new
    assert PatchRaster.of(torch.zeros(33, 41), 7, 0) is None


def test_a_move_changes_features_as_the_flat_picture_says() -> None:
    content, places = torch.randn(6, 4), torch.randn(6, 4)
    move = Move(torch.tensor([1, 2, 3, 4, 5, 0]), torch.tensor([5]), (0, -1))
    moved = move.carried(content + places, places + 3.0)
    torch.testing.assert_close(moved[:5], (content[1:] + places[:5]))


def test_limits_follow_the_error_that_was_measured() -> None:
    limits = ReuseLimits().measured(0.0, 1, 0.0, 0.98)
    assert limits.frames == 2 and limits.change == pytest.approx(0.02)  # twofold at most
    limits = ReuseLimits(8, 0.05).measured(0.004, 4, 0.03, 0.98)  # half of what is allowed
    assert limits.frames == 5 and limits.change == pytest.approx(0.06)
    limits = ReuseLimits(8, 0.05).measured(0.016, 4, 0.04, 0.98)  # twice what is allowed
    assert limits.frames == 2 and limits.change == pytest.approx(0.02)
    assert limits.allow(2, 0.01) and not limits.allow(3, 0.01) and not limits.allow(1, 0.03)
    assert ReuseLimits().measured(0.5, 1, 0.1, 0.98).frames == 0
    pauses = []
    for _ in range(6):
        limits = limits.after(saved=False)
        pauses.append(limits.pause)
    assert pauses == [0, 1, 3, 7, 8, 8]
    assert limits.after(saved=True).failures == 0


def test_the_clock_rests_a_cache_that_is_slower() -> None:
    payoff = Payoff()
    for _ in range(3):
        assert payoff.rests
        payoff.note(1.0, 10, cached=False)
    for _ in range(20):
        assert not payoff.rests
        payoff.note(0.9, 10, cached=True)
    for _ in range(Payoff.WINDOW):
        payoff.note(1.2, 10, cached=True)
    assert payoff.rests
    for _ in range(Payoff.REST):
        payoff.note(1.0, 10, cached=False)
    assert not payoff.rests


def test_a_timed_cache_stands_aside_where_its_passes_take_as_long(
    model: Any, any_tower: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pass is timed and noted with its patches, whether it was reuse or the stock tower."""
    cache, noted, note = FrameCache(model, goal=0.5, timed=True), list[Any](), Payoff.note

    def kept(self: Payoff, seconds: float, patches: int, cached: bool) -> None:
        noted.append((seconds, patches, cached))
        note(self, seconds, patches, cached)

    monkeypatch.setattr(frame_cache, "settled", partial(next, count()))  # a second each time
    monkeypatch.setattr(Payoff, "note", kept)
    frames = shots("static", 1) * (Payoff.FIRST + Payoff.WINDOW + 4)
    watched(model, frames, cache)
    assert {(seconds, patches) for seconds, patches, _ in noted} == {(1, (SIDE // PATCH) ** 2)}
    used = [cached for *_, cached in noted]
    assert used[: Payoff.FIRST] == [False] * Payoff.FIRST
    assert sum(used) == Payoff.WINDOW and not any(used[-3:])
    assert cache.payoff is not None and cache.payoff.rests


@pytest.mark.usefixtures("any_tower")
@pytest.mark.parametrize("motion", ["pan 4 px", "pan a patch", "zoom"])
def test_the_goal_is_kept_on_the_embedded_model(model: Any, motion: str) -> None:
    near, state = watched(model, shots(motion, 30), FrameCache(model, 0.25, goal=0.98))
    assert near.min() > 0.98
    assert state.computed < 0.9 * state.patches
    assert state.frames == 30 and state.whole < 30


@pytest.mark.usefixtures("any_tower")
def test_moved_patches_save_what_no_comparison_in_place_can(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = shots("pan a patch", 24)
    cache = FrameCache(model, 0.25, goal=0.98)
    _, moved = watched(model, frames, cache)
    assert moved.flat is not None
    # The planted fault: positions are not corrected, so errors are large, and that is noticed.
    monkeypatch.setattr(Move, "carried", lambda self, old, flat: old[self.at()])
    monkeypatch.setattr(Move, "at", _at, raising=False)
    near, wrong = watched(model, frames, cache)
    assert near.min() > 0.98
    assert wrong.computed > 1.2 * moved.computed


def _at(move: Move) -> Any:
    return slice(None) if move.sources is None else move.sources


@pytest.mark.usefixtures("any_tower")
def test_where_reuse_keeps_no_goal_all_is_computed(model: Any) -> None:
    near, state = watched(model, shots("shake", 16), FrameCache(model, 0.25, goal=0.99999))
    assert state.computed == state.patches and state.whole == 16
    assert near.min() > 0.99999
    assert state.limits.failures > 1


def test_a_small_tower_is_left_alone() -> None:
    this = tiny(FAMILY)
    frames = pictures(this, 5)
    cache = FrameCache(this.model, 0.25, goal=0.5)
    state = cache.start()
    found = streamed(this, KIND, frames, cache, state)
    for a, frame in zip(found, frames, strict=True):
        assert all(map(torch.equal, a, features(this, KIND, [frame])))
    assert state.reference is None and state.small
    assert state.stats()["computed"] == state.patches == 5 * state.patches // state.frames


@pytest.mark.usefixtures("any_tower")
@pytest.mark.parametrize("family", ["llava_onevision", "llava", "qwen2_5_vl"])
def test_a_stream_goes_on_from_its_snapshot(family: str) -> None:
    this = tiny(family)
    kind = "image" if family == "llava" else "video"
    frames = pictures(this, 10)
    cache = FrameCache(this.model, 0.25, goal=0.5)
    state = cache.start()
    streamed(this, kind, frames[:5], cache, state)
    assert state.computed < state.patches
    again = FrameCacheState.restore(state.snapshot())
    assert again.limits == state.limits
    want = streamed(this, kind, frames[5:], cache, state)
    for a, b in zip(streamed(this, kind, frames[5:], cache, again), want, strict=True):
        assert all(map(torch.equal, a, b))
    assert again.stats() == state.stats()


@pytest.mark.usefixtures("any_tower")
def test_a_cut_is_computed_whole_and_leaves_the_limits(model: Any) -> None:
    still = shots("static", 12)
    cache = FrameCache(model, 0.25, goal=0.98)
    negative = [(255 - frame).astype(np.uint8) for frame in still]
    near, state = watched(model, still + negative[:1], cache)
    limits = state.limits
    assert near[-1] > 0.99999 and limits.frames > 1
    _, before = watched(model, still, cache)
    assert before.limits == limits and state.whole == before.whole + 1


@pytest.mark.usefixtures("any_tower")
def test_streams_in_one_pass_learn_for_themselves(model: Any) -> None:
    clips = [shots("static", 8), shots("shake", 8)]
    cache = FrameCache(model, 0.25, goal=0.98)
    states = [cache.start(), cache.start()]
    with torch.no_grad():
        for pair in zip(*clips, strict=True):
            pixels = torch.cat([camera.pixels_of(frame[None]) for frame in pair])
            with cache.using(states):
                model.model.get_video_features(pixels)
    assert states[0].whole < states[1].whole
    assert states[0].limits != states[1].limits


def test_features_are_split_by_frame() -> None:
    rows = torch.arange(14.0).reshape(7, 2)
    two = by_frame(rows[None], 3)
    assert two is not None and [each.tolist() for each in two] == [
        rows[i : i + 2].tolist() for i in (0, 2, 4)
    ]
    assert by_frame([rows, rows], 3) is None
    assert by_frame(rows, 7) is None


def test_what_makes_no_goal_is_refused_in_one_line() -> None:
    this = tiny(FAMILY)
    for goal in (0.0, 1.0, float("nan")):
        with pytest.raises(MmfastError, match="no cosine to keep"):
            FrameCache(this.model, goal=goal)
    with pytest.raises(MmfastError, match="acts under a goal alone"):
        FrameCache(this.model, timed=True)
    with pytest.raises(MmfastError, match="no motion 'spin'"):
        next(camera.shots("spin", SIDE, PATCH))


def test_a_row_tells_quality_and_time(model: Any) -> None:
    tower = camera.TOWERS["tiny-video"]._replace(calls=3, each=2)
    row = camera.motion_row("tiny-video", tower, (model, SIDE, PATCH), "pan 4 px", timed=False)
    assert row["cosine"] == pytest.approx(1.0) and row["computed"] == 1.0  # a small tower
    assert row["frames"] == 6 and row["ratio"] > 0 and row["noise"] >= 0
    assert row["cosine_first_frame"] < row["cosine"]
