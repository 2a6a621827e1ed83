"""The frame cache on every tower it knows, against stock and against a slow version with hooks."""

from __future__ import annotations

import pytest
import torch
from frame_cache_checks import CASES, SlowCache, features, first_inputs, pictures, streamed
from tiny_models import tiny
from torch import Tensor

from mmfast.frontends.changes import changes
from mmfast.models.families.adapter import tower_of
from mmfast.models.vision.frames.cache import FrameCache

each = pytest.mark.parametrize(("family", "kind"), CASES)
# Frames that bring a padding mask are computed whole; this one's tower always gets one.
PADDED = ("lfm2_vl",)
partly = pytest.mark.parametrize(("family", "kind"), [c for c in CASES if c[0] not in PADDED])


@pytest.mark.rest_is_slow(3)
@each
def test_refresh_of_one_and_whole_frames_are_bit_identical(family: str, kind: str) -> None:
    this = tiny(family)
    frames = pictures(this, 3)
    stock = [features(this, kind, [frame]) for frame in frames]
    whole, every = FrameCache(this.model, 1.0), FrameCache(this.model, 0.25, every=2)
    for a, b in zip(streamed(this, kind, frames, whole, whole.start()), stock, strict=True):
        assert all(map(torch.equal, a, b))
    second = streamed(this, kind, frames, every, every.start())
    for number in (0, 2):
        assert all(map(torch.equal, second[number], stock[number]))
    assert all(map(torch.equal, features(this, kind, frames[:1]), stock[0]))


@partly
def test_an_equal_frame_is_the_reference_bit_for_bit(family: str, kind: str) -> None:
    this = tiny(family)
    a, b = pictures(this, 2)
    cache = FrameCache(this.model, threshold=0.0, cut=None)
    found = streamed(this, kind, [a, a, b, b, b], cache, cache.start())
    for earlier, later in [(0, 1), (2, 3), (3, 4)]:
        assert all(map(torch.equal, found[earlier], found[later]))
    assert not torch.equal(found[1][0], found[2][0])


@partly
def test_changed_patches_equal_the_slow_version(family: str, kind: str) -> None:
    this = tiny(family)
    cache = FrameCache(this.model, threshold=0.05, cut=None)
    state, slow, known = cache.start(), SlowCache(this), None
    for frame in pictures(this, 4):
        x = first_inputs(this, kind, frame)
        if known is not None:
            assert state.reference is not None
            slow.fresh = _changed(
                x, known, state.reference.layout, tower_of(this.model).class_token
            )
            known = torch.where(slow.fresh[:, None], x, known)
        known = x if known is None else known
        got, want = streamed(this, kind, [frame], cache, state)[0], slow.encode(kind, frame)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert state.whole == 1
    assert state.patches > state.computed * 1.4


def _changed(x: Tensor, known: Tensor, layout: tuple[int, ...], class_token: bool) -> Tensor:
    content = torch.ones(len(x), dtype=torch.bool)
    if class_token:
        content[:: layout[0] // layout[1]] = False
    fresh = content.clone()
    fresh[content] = changes(x[content], known[content]) > 0.05
    return fresh | ~content


@partly
def test_many_frames_at_once_equal_one_by_one(family: str, kind: str) -> None:
    this = tiny(family)
    frames = pictures(this, 5)
    for options in ({}, {"every": 3}, {"fixed": True}, {"threshold": 0.05}):
        cache = FrameCache(this.model, **options)
        alone, together = cache.start(), cache.start()
        want = streamed(this, kind, frames, cache, alone)
        with cache.using(together):
            first = features(this, kind, frames[:2])
        with cache.using(together):  # videos that follow each other are one stream
            rest = features(this, kind, frames[2:], videos=3)
        for plane, (a, b) in enumerate(zip(first, rest, strict=True)):
            one_by_one = torch.cat([each[plane] for each in want])
            torch.testing.assert_close(torch.cat([a, b]), one_by_one, rtol=1e-5, atol=1e-5)
        assert alone.stats() == together.stats()


@partly
def test_streams_in_one_pass_equal_alone(family: str, kind: str) -> None:
    this = tiny(family)
    clips = [pictures(this, 4, seed) for seed in range(3)]
    cache = FrameCache(this.model)
    alone = [cache.start() for _ in clips]
    want = [
        streamed(this, kind, clip, cache, state) for clip, state in zip(clips, alone, strict=True)
    ]
    states = [cache.start() for _ in clips]
    # The streams are out of step: the first one is two frames ahead.
    streamed(this, kind, clips[0][:2], cache, states[0])
    for t in range(2):
        now = [clips[0][t + 2], clips[1][t], clips[2][t]]
        with cache.using(states):
            found = features(this, kind, now, videos=3)
        for stream, ahead in enumerate((2, 0, 0)):
            for plane, wanted in zip(found, want[stream][t + ahead], strict=True):
                mine = plane.chunk(3)[stream]
                torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
