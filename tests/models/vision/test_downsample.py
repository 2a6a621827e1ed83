"""Pictures at a lower resolution: the stock model on the smaller picture, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import model_oracle as oracle
import numpy as np
import oracles
import pytest
import torch
from tiny_models import ALL_FAMILIES, Tiny, generate, tiny
from torchvision.transforms.v2 import functional as tvF

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.spec import count
from mmfast.models.reduction.inputs import compress
from mmfast.models.vision import pixel

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni_thinker")
UNIT = 8  # pixels of a token's side in the tiny models
PROMPT = "{image} what? {video}, say."


def shrunk(picture: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The picture or clip of so many tokens, by the processor's own interpolation."""
    channels_first = torch.from_numpy(np.moveaxis(picture, -1, -3).copy())
    bicubic = tvF.InterpolationMode.BICUBIC
    small = tvF.resize(channels_first, [rows * UNIT, columns * UNIT], bicubic, antialias=True)
    return np.moveaxis(small.numpy(), -3, -1).copy()


def fitted(picture: np.ndarray, budget: int | float) -> np.ndarray:
    frames = 1 if picture.ndim == 3 else math.ceil(len(picture) / 2)
    grid = (frames, picture.shape[-3] // UNIT, picture.shape[-2] // UNIT)
    wanted = count(budget, math.prod(grid))
    assert wanted is not None
    return shrunk(picture, *oracles.smaller(grid, wanted)[1:])


def both(family: str, budget: int | float) -> tuple[Tiny, dict[str, Any], dict[str, Any]]:
    """A model, a prompt of a picture and a clip, and the same of the smaller ones."""
    this = tiny(family)
    media = {"images": this.images(1), "videos": this.videos(1)}
    small = {name: [fitted(each, budget) for each in items] for name, items in media.items()}
    return this, this.inputs([PROMPT], **media), this.inputs([PROMPT], **small)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [0.5, 0.25, 0.1, 7, 34])
def test_logits_are_those_of_the_smaller_picture(family: str, budget: int | float) -> None:
    this, inputs, small = both(family, budget)
    with torch.no_grad():
        want = this.model(**small).logits
        with attach(this.model, f"downsample@pixel:{budget}") as trace:
            got = this.model(**inputs).logits
    assert torch.equal(got, want)
    for site, item, reduction in trace.reductions:
        n = (35, 70)[item]
        assert site == "pixel" and reduction.n == n and reduction.m <= count(budget, n)
        reduction.check()
        assert bool((reduction.owner >= 0).all())  # every place is part of the smaller picture
    with torch.no_grad():
        assert torch.equal(this.model(**inputs).logits, this.model(**inputs).logits)
    assert not {"get_rope_index", "forward"} & set(this.model.base_model.visual.__dict__)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_batches_chunks_and_reduced_inputs(family: str) -> None:
    this, spec = tiny(family), "downsample:0.3"
    prompts = ["{image} what?", "well now, {image} and {image}, what are they?"]
    images = this.images(3)
    inputs = this.inputs(prompts, images=images)
    small = this.inputs(prompts, images=[fitted(image, 0.3) for image in images])
    stock = generate(this, small, 6)
    with attach(this.model, spec):
        whole = generate(this, inputs, 6)
    with attach(this.model, spec):
        chunked = generate(this, inputs, 6, prefill_chunk_size=9)
    short = generate(this, compress(this.model, inputs, spec), 6)
    for other in (whole, short):
        assert torch.equal(other.sequences[:, -6:], stock.sequences[:, -6:])
        assert all(map(torch.equal, other.logits, stock.logits))
    assert torch.equal(chunked.sequences, whole.sequences)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stage", ["evs:0.5", "visionzip:0.5", "divprune:0.4+fastv@llm2:0.5"])
def test_later_stages_see_the_smaller_picture(family: str, stage: str) -> None:
    this, inputs, small = both(family, 0.4)
    with torch.no_grad():
        with attach(this.model, stage) as alone:
            want = this.model(**small).logits
        with attach(this.model, f"downsample:0.4+{stage}") as trace:
            got = this.model(**inputs).logits
    assert torch.equal(got, want)
    later = [r.keep.tolist() for site, _, r in trace.reductions if site != "pixel"]
    assert later == [r.keep.tolist() for _, _, r in alone.reductions]


def test_a_picture_that_the_processor_resized_first() -> None:
    this = tiny("qwen2_5_vl")
    (image,) = this.images(1, size=(43, 61))
    inputs = this.inputs(["{image}?"], images=[image])
    seen = shrunk(image, *(inputs["image_grid_thw"][0, 1:] // 2).tolist())
    small = this.inputs(["{image}?"], images=[fitted(seen, 0.3)])
    with attach(this.model, "downsample:0.3"), torch.no_grad():
        got = this.model(**inputs).logits
    assert torch.equal(got, this.model(**small).logits)


def test_numbers_that_are_no_picture_of_8_bits() -> None:
    this, inputs, small = both("qwen3_vl", 0.3)
    noise = {k: torch.randn_like(v) if "pixel" in k else v for k, v in inputs.items()}
    with attach(this.model, "downsample:0.3"), torch.no_grad():
        logits = this.model(**noise).logits
    assert logits.shape == this.model(**small).logits.shape and bool(logits.isfinite().all())


def test_half_precision_recovers_the_picture() -> None:
    levels = torch.randint(0, 256, (2, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(v) * 255 for v in pixel._NORMS[0])
    frames = tvF.normalize(levels.float(), mean.tolist(), std.tolist())
    exact = pixel.resized(frames, (8, 8))
    for dtype, most in ((torch.float16, 1e-3), (torch.bfloat16, 2e-2)):
        half = pixel.resized(frames.to(dtype), (8, 8))
        assert half.dtype == dtype and float((half.float() - exact).abs().mean()) < most


@pytest.mark.parametrize("family", [*FAMILIES, "llava_onevision", "llava_next", "internvl"])
def test_a_share_of_one_is_bit_identical(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image} what?"], images=this.images(1))
    stock = generate(this, inputs, 4)
    with attach(this.model, "downsample:1.0"):
        other = generate(this, inputs, 4)
    assert torch.equal(other.sequences, stock.sequences)
    assert all(map(torch.equal, other.logits, stock.logits))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_of_the_whole_picture_would_be_seen(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, inputs, small = both(family, 0.25)
    monkeypatch.setattr(
        pixel._PixelStage, "positions", lambda self, stock, *args, **kwargs: stock(*args, **kwargs)
    )
    with attach(this.model, "downsample:0.25"), torch.no_grad():
        assert not torch.equal(this.model(**inputs).logits, this.model(**small).logits)


@pytest.mark.parametrize("budget", [0.5, 0.25, 9])
def test_frames_of_fixed_size_are_interpolated(budget: int | float) -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["{video}?"], videos=this.videos(1))
    with attach(this.model, f"downsample@pixel:{budget}") as trace, torch.no_grad():
        logits = this.model(**inputs).logits[0]
    ((site, _, reduction),) = trace.reductions
    grid = (4, 3, 3)
    wanted = count(budget, 36)
    assert wanted is not None and site == "pre"
    answer = oracles.downsample(oracles.Item(np.zeros((36, 1)), grid=grid), wanted)
    assert reduction.keep.tolist() == answer.keep and reduction.m <= wanted
    prompt = oracle.embed(this, inputs)
    (places,) = prompt.items
    features = torch.from_numpy(answer.matrix).float() @ prompt.embeds[places]
    keep = oracle.kept_places(prompt, [("pre", 0, reduction)])
    prompt.embeds[places[reduction.keep]] = features
    torch.testing.assert_close(logits, oracle.removed(this, prompt, keep), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llava_onevision", "llava_next", "internvl"])
def test_tiles_go_first_and_the_overview_last(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image}?"], images=this.images(1, size=(40, 120)))
    with attach(this.model, "random:1.0") as trace, torch.no_grad():
        this.model(**inputs)
    for share in (0.5, 0.25, 0.1):
        with attach(this.model, f"downsample:{share}") as trace, torch.no_grad():
            assert bool(this.model(**inputs).logits.isfinite().all())
        ((_, _, reduction),) = trace.reductions
        tile = trace.views[0].tile
        assert 0 < reduction.m <= count(share, reduction.n)
        if tile is not None and bool((tile > 0).any()):
            overview = int((tile == 0).sum())
            kept = tile[reduction.keep] == 0
            if reduction.m > overview:
                assert int(kept.sum()) == overview
            elif count(share, reduction.n) <= overview:
                assert bool(kept.all())


def test_what_cannot_be_done_says_so_in_a_line() -> None:
    for family in set(ALL_FAMILIES) - {*FAMILIES, "llava_onevision", "llava_next", "internvl"}:
        with pytest.raises(ModelError, match=rf"not possible in '{family}'.*@pre") as caught:
            attach(tiny(family).model, "downsample:0.25").__enter__()
        assert "\n" not in str(caught.value)
    this = tiny("qwen3_vl")
    clip = this.inputs(["{video}?"], videos=this.videos(1))
    few = pytest.raises(SpecError, match="less than one token to each of 2 frames")
    with few, attach(this.model, "downsample:1"), torch.no_grad():
        this.model(**clip)
    for spec in ("downsample:0.5+pixelprune", "pixelprune+downsample:0.5"):
        with pytest.raises(SpecError, match="resizes the picture"):
            attach(this.model, spec).__enter__()
    with (
        pytest.raises(SpecError, match="full rasters"),
        attach(this.model, "evs:0.3+downsample@pre:0.5"),
        torch.no_grad(),
    ):
        this.model(**clip)
