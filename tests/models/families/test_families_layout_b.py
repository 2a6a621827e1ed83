"""Layouts of Qwen2-VL, the Omni thinker, Idefics3 and SmolVLM: odd sizes, mixes, clips, sound."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, tiny

from mmfast.attach import attach
from mmfast.models.families.adapter import Layout, adapter_for

# (height, width): square, wide, tall, larger than all tiles together, tiny, a thin strip.
SIZES = [(24, 24), (30, 70), (90, 25), (150, 140), (9, 11), (8, 60)]


def layouts_of(this: Tiny, inputs: dict[str, Any], kind: str) -> list[Layout]:
    names = (*this.facts.calls[kind], "input_ids")
    call = {name: inputs[name] for name in names if name in inputs}
    return adapter_for(this.model).layout(this.model.base_model, kind, call)


def check(this: Tiny, inputs: dict[str, Any], kind: str) -> list[Layout]:
    """As many tokens as features, and as the prompt has room for."""
    layouts = layouts_of(this, inputs, kind)
    features = this.facts.items(this, oracle.encode(this, inputs, kind), kind, inputs)
    assert [each.length for each in layouts] == [len(rows) for rows in features]
    token = getattr(this.model.config, f"{kind}_token_id")
    assert int((inputs["input_ids"] == token).sum()) == sum(each.length for each in layouts)
    for layout in layouts:
        place = layout.place()
        assert place is not None
        assert place.shape == (layout.length, 3)
        assert len(torch.unique(place, dim=0)) == len(place) or layout.tiles is not None
    return layouts


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
@pytest.mark.parametrize("size", SIZES)
def test_tiles_are_those_the_processor_cut(family: str, size: tuple[int, int]) -> None:
    this = tiny(family)
    (image,) = this.images(1, size=size)
    inputs = this.inputs(["on {image}?"], images=[image])
    (layout,) = check(this, inputs, "image")
    cut = this.processor.image_processor([[image]], return_row_col_info=True, return_tensors="pt")
    rows, columns = int(cut["rows"][0][0]), int(cut["cols"][0][0])
    if rows == 0:
        assert layout == Layout(9, (1, 3, 3))
        return
    numbers = torch.tensor(layout.tiles)
    assert numbers.tolist() == sorted(numbers.tolist(), key=lambda n: n or 99)  # overview last
    assert numbers.bincount().tolist() == [9] * (rows * columns + 1)
    place = layout.place()
    assert place is not None
    for tile in range(1, rows * columns + 1):
        corner = place[numbers == tile][0].tolist()
        assert corner == [0, (tile - 1) // columns * 3, (tile - 1) % columns * 3]
    assert place[numbers == 0].amax(0).tolist() == [0, 2, 2]


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_images_of_wildly_different_sizes_in_one_batch(family: str) -> None:
    this = tiny(family)
    images = [this.images(1, i, size)[0] for i, size in enumerate(SIZES)]
    texts = ["{image} and {image}{image}", "{image}!", "none at all", "{image}, {image}"]
    inputs = this.inputs(texts, images=images)
    alone = [check(this, this.inputs(["{image}"], images=[image]), "image")[0] for image in images]
    assert layouts_of(this, inputs, "image") == alone
    assert len({each.length for each in alone}) > 1
    with attach(this.model, "random:5") as trace:
        this.model(**inputs)
    assert [r.m for _, _, r in trace.reductions] == [5] * 6  # per image, however it is cut


def test_clips_of_smolvlm_are_one_item_each() -> None:
    this = tiny("smolvlm")
    clips = [this.videos(1, i, frames)[0] for i, frames in enumerate((4, 3, 1, 1))]
    inputs = this.inputs(["{video} {video} then {video}{video}?"], videos=clips)
    layouts = check(this, inputs, "image")
    assert [each.grid for each in layouts] == [(t, 3, 3) for t in (4, 3, 1, 1)]
    inputs = this.inputs(["{video}?", "{video} or {video}{video}?"], videos=clips)
    assert layouts_of(this, inputs, "image") == layouts  # rows of pixels are clips, not prompts


def test_pictures_without_a_stamp_are_no_clip() -> None:
    this = tiny("smolvlm")
    side = (24, 24)
    this.processor.image_processor.do_image_splitting = False
    try:
        texts = ["Image 1:{image}Image 2:{image}a:b:c:{image}12:34:{image}"]
        inputs = this.inputs(texts, images=this.images(4, size=side))
    finally:
        this.processor.image_processor.do_image_splitting = True
    assert [each.grid for each in check(this, inputs, "image")] == [(1, 3, 3)] * 4


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_omni_thinker"])
def test_rasters_of_qwen(family: str) -> None:
    this = tiny(family)
    images = [this.images(1, i, size)[0] for i, size in enumerate(SIZES[:4])]
    inputs = this.inputs(["{image} {image}{image}", "{image}"], images=images)
    assert len({each.grid for each in check(this, inputs, "image")}) == 4
    videos = [this.videos(1, i, frames)[0] for i, frames in enumerate((2, 6))]
    layouts = check(this, this.inputs(["{video} {video}"], videos=videos), "video")
    assert [each.grid[0] for each in layouts if each.grid] == [1, 3]


def test_sounds_are_lines_of_tokens() -> None:
    this = tiny("qwen2_5_omni_thinker")
    seconds = (0.05, 0.2, 0.41, 1.3)
    sounds = [this.sounds(1, i, length)[0] for i, length in enumerate(seconds)]
    inputs = this.inputs(["{audio}{audio}", "{audio} and {audio}"], sounds=sounds)
    layouts = check(this, inputs, "audio")
    frames = inputs["feature_attention_mask"].sum(-1).tolist()
    assert [each.grid for each in layouts] == [((n + 1) // 4, 1, 1) for n in frames]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_omni_thinker"])
def test_layouts_from_positions_alone(family: str) -> None:
    """Features that were encoded before `attach` bring no grid."""
    this = tiny(family)
    inputs = this.inputs(["{image} {video}?"], images=this.images(1), videos=this.videos(1))
    positions = oracle.positions_of(this, inputs)
    adapter, base = adapter_for(this.model), this.model.base_model
    for kind in ("image", "video"):
        (rows,) = oracle.encode(this, inputs, kind).pooler_output
        token = inputs["input_ids"][0] == getattr(this.model.config, f"{kind}_token_id")
        (layout,) = layouts_of(this, inputs, kind)
        assert adapter.recover(base, kind, rows, positions[:, token]) == layout


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_tiles_encoded_before_attach(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["a {image} or {image}?"], images=this.images(2))
    output = oracle.encode(this, inputs, "image")
    short = {k: v for k, v in inputs.items() if not k.startswith("pixel")}
    with attach(this.model, "random:7") as trace:
        this.model(**short, mm_encoder_outputs={"image": output})
    tiles = len(output.pooler_output[0]) // 9
    assert [r.m for _, _, r in trace.reductions] == [7] * tiles  # nothing tells them apart
