"""The frame cache: which patches it computes, when it starts over, and what it leaves behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from frame_cache_checks import features, pictures, streamed
from tiny_models import build, tiny
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError
from mmfast.frontends.changes import Refresh, changes
from mmfast.models.vision.frames.cache import FrameCache
from mmfast.models.vision.frames.state import FrameCacheState

FAMILY, KIND = "llava_onevision", "video"
THREE = pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])


def test_a_share_takes_exactly_the_most_changed() -> None:
    change = torch.tensor([0.0, 0.5, 0.1, 0.0, 0.3, 0.1, 0.0, 0.0])
    rule = Refresh(share=0.25, cut=None)
    assert rule.choose(change, 1).tolist() == [1, 4]  # type: ignore[union-attr]
    assert Refresh(share=0.375, cut=None).choose(change, 1).tolist() == [1, 2, 4]  # type: ignore[union-attr]
    assert Refresh(share=0.9, cut=None).choose(change, 1).tolist() == [1, 2, 4, 5]  # type: ignore[union-attr]
    assert Refresh(None, 0.2, None).choose(change, 1).tolist() == [1, 4]  # type: ignore[union-attr]
    assert Refresh(0.25).choose(torch.zeros(8), 1).tolist() == []  # type: ignore[union-attr]


def test_when_a_frame_is_computed_whole() -> None:
    some = torch.tensor([0.9, 0.01, 0.01, 0.01])
    assert Refresh(0.25).choose(some, 31) is not None
    assert Refresh(0.25).choose(some, 32) is None  # the interval
    assert Refresh(0.25).choose(torch.zeros(4), 99).tolist() == []  # type: ignore[union-attr]
    assert Refresh(0.25, every=None).choose(some, 10**6) is not None
    assert Refresh(0.25).choose(torch.full((4,), 0.2), 1) is None  # a cut
    assert Refresh(0.25, cut=None).choose(torch.full((4,), 0.2), 1) is not None
    assert Refresh(None, 0.1).choose(torch.full((4,), 0.2), 1) is None  # all changed


def test_change_is_relative_and_zero_where_nothing_changed() -> None:
    x = torch.randn(50, 16)
    y = x.clone()
    y[3] += 1.0
    found = changes(y, x)
    assert found[3] > 0.1
    assert found.count_nonzero() == 1
    torch.testing.assert_close(changes(8 * y, 8 * x), found)
    assert 0.7 < changes(torch.randn(50, 16), x).mean() < 1.3  # another picture
    assert changes(torch.ones(4, 2), torch.ones(4, 2)).tolist() == [0.0] * 4


@THREE
def test_a_scene_cut_is_computed_whole(family: str) -> None:
    this = tiny(family)
    frames = [*pictures(this, 3), *pictures(this, 3, seed=9)]
    stock = [features(this, KIND, [frame])[0] for frame in frames]

    def nearness(**options: Any) -> list[float]:
        cache = FrameCache(this.model, 0.25, **options)
        found = streamed(this, KIND, frames, cache, cache.start())
        pairs = zip(found, stock, strict=True)
        return [F.cosine_similarity(a[0], b, dim=-1).mean().item() for a, b in pairs]

    with_refresh, without = nearness(), nearness(cut=None)
    assert with_refresh[3] > 0.99999
    assert without[3] < with_refresh[3] - 0.005  # what the rule is there for
    assert without[:3] == with_refresh[:3]


def test_slow_drift_is_computed_once_it_has_added_up() -> None:
    """Every step is under the threshold, so a comparison of neighbours would see nothing."""
    this = tiny(FAMILY)
    ground = pictures(this, 1)[0] // 2 + 40
    frames = [(ground + 2 * t).astype(ground.dtype) for t in range(30)]
    frames = [f.copy() for f in frames]
    for frame in frames:
        frame[: len(frame) // 2] = frames[0][: len(frame) // 2]
    cache = FrameCache(this.model, threshold=0.02, cut=None, every=None)
    state = cache.start()
    streamed(this, KIND, frames[:2], cache, state)
    assert state.computed == state.patches // 2  # one step is no change
    streamed(this, KIND, frames[2:], cache, state)
    assert state.whole == 1
    assert state.patches // 30 * 1.5 < state.computed < state.patches // 3


@THREE
def test_the_state_is_bounded_and_a_value(family: str) -> None:
    this = tiny(family)
    frames = pictures(this, 12)
    cache = FrameCache(this.model)
    state = cache.start()
    streamed(this, KIND, frames[:1], cache, state)
    size = state.nbytes
    streamed(this, KIND, frames[1:6], cache, state)
    saved = state.snapshot()
    after = streamed(this, KIND, frames[6:], cache, state)
    assert state.nbytes == size
    assert state.frames == 12
    again = FrameCacheState.restore(saved)
    assert again.frames == 6
    for a, b in zip(streamed(this, KIND, frames[6:], cache, again), after, strict=True):
        assert all(map(torch.equal, a, b))
    assert again.stats() == state.stats()
    assert FrameCacheState.restore(cache.start().snapshot()).reference is None


@THREE
def test_interleaved_streams_never_touch_each_other(family: str) -> None:
    this = tiny(family)
    clips = [pictures(this, 4, seed) for seed in range(3)]
    cache = FrameCache(this.model)
    want = [streamed(this, KIND, clip, cache, cache.start()) for clip in clips]
    states = [cache.start() for _ in clips]
    for t in range(4):
        for stream in (2, 0, 1):
            found = streamed(this, KIND, [clips[stream][t]], cache, states[stream])[0]
            assert all(map(torch.equal, found, want[stream][t]))


def _parts(model: Any) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


def test_an_exception_leaves_model_and_state_as_they_were() -> None:
    this = build(FAMILY)
    cache = FrameCache(this.model)
    state = cache.start()
    a, b = pictures(this, 2)
    streamed(this, KIND, [a], cache, state)
    before, counts, reference = _parts(this.model), state.stats(), state.reference

    def fail(*_: Any) -> None:
        raise RuntimeError("boom")

    mlp = this.model.model.vision_tower.encoder.layers[-1].mlp
    handle = mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        streamed(this, KIND, [b], cache, state)
    handle.remove()
    assert state.stats() == counts and state.reference is reference
    assert _parts(this.model) == before
    want = streamed(this, KIND, [a, b], cache, cache.start())[1]
    assert all(map(torch.equal, streamed(this, KIND, [b], cache, state)[0], want))


def test_other_threads_see_the_stock_tower() -> None:
    this = tiny(FAMILY)
    a, b = pictures(this, 2)
    stock = features(this, KIND, [b])[0]
    cache, found = FrameCache(this.model), []
    state = cache.start()
    streamed(this, KIND, [a], cache, state)

    def other() -> None:
        with torch.no_grad():
            found.append(features(this, KIND, [b])[0])

    with cache.using(state):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mine = features(this, KIND, [b])[0]
    assert torch.equal(found[0], stock)
    assert not torch.equal(mine, stock)


def test_threads_inside_one_cache_keep_their_streams() -> None:
    this = tiny(FAMILY)
    clips = [pictures(this, 3, seed) for seed in range(2)]
    cache = FrameCache(this.model)
    want = [streamed(this, KIND, clip, cache, cache.start()) for clip in clips]
    found: dict[int, list[list[torch.Tensor]]] = {}
    inside = threading.Barrier(2)

    def watch(stream: int) -> None:
        with torch.no_grad(), cache.using(cache.start()):
            inside.wait(60)  # both stand around the tower now
            found[stream] = [features(this, KIND, [frame]) for frame in clips[stream]]
            inside.wait(60)

    threads = [threading.Thread(target=watch, args=(stream,)) for stream in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for stream in range(2):
        for a, b in zip(found[stream], want[stream], strict=True):
            assert all(map(torch.equal, a, b))


def test_another_size_of_frame_starts_over() -> None:
    this = tiny("qwen2_5_vl")
    cache = FrameCache(this.model)
    state = cache.start()
    frame = pictures(this, 1)[0]
    small = frame[: len(frame) // 2].copy()
    streamed(this, KIND, [frame], cache, state)
    found = streamed(this, KIND, [small], cache, state)[0]
    assert all(map(torch.equal, found, features(this, KIND, [small])))
    assert state.whole == state.frames == 2


def test_layers_that_are_read_come_out_whole() -> None:
    this = tiny("llava", depth=3)
    a, b = pictures(this, 2)
    cache = FrameCache(this.model, threshold=0.0, cut=None)
    state, base = cache.start(), this.model.base_model
    streamed(this, "image", [a], cache, state)
    pixels = this.inputs(["{image}"], images=[b])["pixel_values"]
    with cache.using(state):  # other layers than before: nothing is known of them
        early = base.get_image_features(pixels, vision_feature_layer=1).pooler_output
    stock = base.get_image_features(pixels, vision_feature_layer=1).pooler_output
    assert all(map(torch.equal, early, stock))
    with cache.using(state):
        out = base.get_image_features(pixels, output_hidden_states=True, return_dict=True)
    hidden = base.get_image_features(pixels, output_hidden_states=True, return_dict=True)
    for mine, theirs in zip(out.hidden_states, hidden.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("spec", ["tome@vit:0.5", "pixelprune@pixel:0.5"])
@pytest.mark.filterwarnings("ignore:.*has seen no prompt")
def test_other_stages_of_the_tower_are_refused(spec: str) -> None:
    this = tiny("qwen2_5_vl")
    cache = FrameCache(this.model)
    with attach(this.model, spec), pytest.raises(ModelError, match="frame cache does not work"):
        streamed(this, KIND, pictures(this, 1), cache, cache.start())


def test_what_cannot_be_cached_is_refused_in_one_line() -> None:
    with pytest.raises(ModelError, match="no blocks that a frame cache knows") as error:
        FrameCache(tiny("fast_vlm").model)
    assert "\n" not in str(error.value)
    this = tiny(FAMILY)
    for options in ({"refresh": 0.5, "threshold": 0.1}, {"refresh": 1.5}, {"every": 0}):
        with pytest.raises(MmfastError):
            FrameCache(this.model, **options)  # type: ignore[arg-type]
    for options in ({"threshold": -1.0}, {"cut": float("nan")}):
        with pytest.raises(MmfastError, match="no change"):
            FrameCache(this.model, **options)
    cache = FrameCache(this.model)
    states = [cache.start(), cache.start()]
    with cache.using(states), pytest.raises(ModelError, match="3 videos came for 2 states"):
        features(this, KIND, pictures(this, 3), videos=3)
    with (
        cache.using(cache.start()),
        pytest.raises(ModelError, match="already"),
        cache.using(cache.start()),
    ):
        pass


@THREE
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_half_precision_and_other_attention(family: str, attention: str) -> None:
    this = build(family, attention=attention)
    this.model.to(torch.bfloat16)
    frames = pictures(this, 3)
    stock = [features(this, KIND, [frame])[0].float() for frame in frames]
    cache = FrameCache(this.model, 0.4)
    found = streamed(this, KIND, frames, cache, cache.start())
    assert torch.equal(found[0][0].float(), stock[0])
    near = F.cosine_similarity(found[2][0].float(), stock[2], dim=-1).mean()
    assert near > 0.9
