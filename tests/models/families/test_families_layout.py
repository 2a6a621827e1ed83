"""Layouts and folds of LLaVA, LLaVA-NeXT, InternVL and FastVLM against what the models produce."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, build, generate, tiny
from torch import Tensor, nn

from mmfast.attach import attach
from mmfast.models.families.adapter import Layout, adapter_for

FAMILIES = ("llava", "llava_next", "internvl", "fast_vlm")
# (height, width): square, wide, tall, larger than all tiles together, tiny, a thin strip.
SIZES = [(24, 24), (30, 70), (90, 25), (250, 240), (9, 11), (6, 60)]


def call_of(this: Tiny, inputs: dict[str, Any]) -> dict[str, Any]:
    """What `get_image_features` gets, and the prompt it was called for."""
    names = (*this.facts.calls["image"], "input_ids")
    return {name: inputs[name] for name in names if name in inputs}


def layouts_of(this: Tiny, inputs: dict[str, Any]) -> list[Layout]:
    return adapter_for(this.model).layout(this.model.base_model, "image", call_of(this, inputs))


def features(this: Tiny, inputs: dict[str, Any]) -> list[Tensor]:
    output = oracle.encode(this, inputs, "image")
    return this.facts.items(this, output, "image", inputs)


def check(this: Tiny, inputs: dict[str, Any]) -> list[Layout]:
    """Lengths, separators, grids, tiles and places of all images of one prompt."""
    layouts, found = layouts_of(this, inputs), features(this, inputs)
    assert [each.length for each in layouts] == [len(rows) for rows in found]
    token = inputs["input_ids"] == this.model.config.image_token_id
    assert int(token.sum()) == sum(each.length for each in layouts)
    for layout, rows in zip(layouts, found, strict=True):
        content, place = layout.content(), layout.place()
        assert torch.equal(content, this.facts.content(this, rows).nonzero()[:, 0])
        if layout.grid is not None:
            t, h, w = layout.grid
            assert t * h * w == len(content)
        if layout.tiles is not None:
            assert layout.grid is None
            assert len(layout.tiles) == len(content)
            assert set(layout.tiles) == set(range(max(layout.tiles) + 1))
        if place is not None:
            assert place.shape == (len(content), 3)
    return layouts


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_an_image_of_any_size(family: str, size: tuple[int, int]) -> None:
    this = tiny(family)
    inputs = this.inputs(["on {image}?"], images=this.images(1, size=size))
    (layout,) = check(this, inputs)
    base, adapter = this.model.base_model, adapter_for(this.model)
    output = oracle.encode(this, inputs, "image")
    if len(output.pooler_output) == 1:  # the tensors alone tell the same, but for the tiles
        again = adapter.recover(base, "image", output.pooler_output[0], None)
        assert isinstance(again, Layout)
        assert (again.length, again.grid) == (layout.length, layout.grid)
        assert again.separators == layout.separators


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("patch", [3, 4])
def test_images_of_wildly_different_sizes_in_one_batch(family: str, patch: int) -> None:
    this = tiny(family, patch=patch)
    images = [this.images(1, i, size)[0] for i, size in enumerate(SIZES)]
    together = this.inputs(["{image} {image}{image}, {image}{image} {image}?"], images=images)
    assert len(check(this, together)) == len(SIZES)
    texts = ["{image}{image}", "what is {image}?", "{image}, {image} and {image}"]
    batch = this.inputs(texts, images=images)
    rows = [len(each) for each in (images[:2], images[2:3], images[3:])]
    start = 0
    with attach(this.model, "random:5+tome:3") as trace:
        out = generate(this, batch, 4)
    assert sorted((i, r.m) for _, i, r in trace.reductions) == sorted(
        (i, m) for i in range(6) for m in (5, 3)
    )
    for row, count in enumerate(rows):
        alone = this.inputs([texts[row]], images=images[start : start + count])
        start += count
        with attach(this.model, "random:5+tome:3"):
            single = generate(this, alone, 4)
        assert torch.equal(out.sequences[row, -4:], single.sequences[0, -4:])


@pytest.mark.parametrize("family", ["llava_next", "internvl"])
def test_tiles_are_numbered_in_raster_order(family: str) -> None:
    """The tower sees the overview where tile 0 is, and the tiles where their numbers are."""
    this = build(family, height=48, width_px=72)
    inputs = this.inputs(["{image}"], images=this.images(1))
    (layout,) = check(this, inputs)
    assert layout.tiles is not None
    before = features(this, inputs)[0][layout.content()]
    pixels = inputs["pixel_values"]
    tiles = pixels[0] if pixels.ndim == 5 else pixels
    overview = {"llava_next": 0, "internvl": len(tiles) - 1}[family]
    numbers = [n for n in range(len(tiles)) if n != overview]
    for index in range(len(tiles)):
        kept = tiles[index].clone()
        tiles[index] = -kept
        after = features(this, inputs)[0][layout.content()]
        tiles[index] = kept
        moved = (after - before).abs().amax(-1) > 1e-6
        number = 0 if index == overview else numbers.index(index) + 1
        assert torch.equal(moved, torch.tensor(layout.tiles) == number)


@pytest.mark.parametrize("family", ["llava", "llava_next", "internvl"])
def test_fold_brings_every_patch_to_its_token(family: str) -> None:
    """A change of one patch's embedding moves only the token that `fold` names.

    The tower's attention is cut, so features depend on their own patches alone.
    """
    this = build(family, height=48, width_px=70)
    base, adapter = this.model.base_model, adapter_for(this.model)
    inputs = this.inputs(["{image}"], images=this.images(1))
    call, tower = call_of(this, inputs), base.get_encoder("image")
    for name, module in tower.named_modules():
        if name.endswith((".out_proj", ".projection_layer")):
            nn.init.zeros_(module.weight)
    (embed,) = (m for m in tower.modules() if isinstance(m, nn.Conv2d))  # [T, D, rows, columns]
    before = features(this, inputs)[0]
    (layout,) = adapter.layout(base, "image", call)
    side = this.shape.image_size or 6
    tiles = (
        sum(adapter.tile_counts(base, call)) if family != "internvl" else len(call["pixel_values"])
    )
    count = tiles * side * side
    for patch in range(0, count, max(1, count // 11)):
        tile, rest = divmod(patch, side * side)

        def change(
            module: nn.Module, args: Any, out: Tensor, tile: int = tile, rest: int = rest
        ) -> Tensor:
            out = out.clone()
            out[tile, ::2, rest // side, rest % side] += 3.0
            return out

        handle = embed.register_forward_hook(change)
        after = features(this, inputs)[0]
        handle.remove()
        moved = (after - before).abs().amax(-1)[layout.content()] > 1e-6
        values = torch.zeros(count, 2)
        values[patch] = 1.0
        (folded,) = adapter.fold(base, "image", values, call)
        assert torch.equal(folded[:, 0] > 1e-6, moved)
        assert torch.equal(folded[:, 0], folded[:, 1])


def test_fold_of_a_feature_map_is_its_raster() -> None:
    this = tiny("fast_vlm")
    base, adapter = this.model.base_model, adapter_for(this.model)
    inputs = this.inputs(["{image}{image}"], images=this.images(2))
    # A list of images in transformers 5.17, and one tensor later on.
    before = torch.stack([*oracle.encode(this, inputs, "image").pooler_output])
    cells = before.shape[0] * before.shape[1]
    for cell in (0, 7, 24, 25, cells - 1):

        def change(module: nn.Module, args: Any, out: Any, cell: int = cell) -> Any:
            image, rest = divmod(cell, 25)
            out.last_hidden_state[image, :, rest // 5, rest % 5] += 1.0
            return out

        handle = base.vision_tower.register_forward_hook(change)
        after = torch.stack([*oracle.encode(this, inputs, "image").pooler_output])
        handle.remove()
        values = torch.zeros(cells, 1)
        values[cell] = 1.0
        folded = adapter.fold(base, "image", values, call_of(this, inputs))
        moved = (after - before).abs().amax(-1) > 1e-6
        assert torch.equal(torch.stack(folded)[..., 0] > 0, moved)


def test_a_square_of_another_size_than_the_tower_expects() -> None:
    """CLIP can stretch its positions; then the raster is that of the pixels."""
    this = tiny("llava")
    adapter = adapter_for(this.model)
    call = {"pixel_values": torch.zeros(2, 3, 32, 16)}
    assert [each.grid for each in adapter.layout(this.model.model, "image", call)] == [
        (1, 8, 4)
    ] * 2
    assert adapter.recover(this.model.model, "image", torch.zeros(32, 4), None) is None


def test_a_class_token_that_the_model_keeps_is_a_separator() -> None:
    this = build("llava")
    this.model.config.vision_feature_select_strategy = "full"
    base, adapter = this.model.model, adapter_for(this.model)
    pixels = torch.zeros(1, 3, 24, 24)
    (layout,) = adapter.layout(base, "image", {"pixel_values": pixels})
    rows = base.get_image_features(pixels).pooler_output[0]
    assert layout == Layout(37, (1, 6, 6), (0,)) == adapter.recover(base, "image", rows, None)
    values = torch.arange(37.0)[:, None]
    (folded,) = adapter.fold(base, "image", values, {"pixel_values": pixels})
    assert torch.equal(folded, values[1:])


@pytest.mark.parametrize("family", ["idefics3", "smolvlm", "internvl", "lfm2_vl"])
def test_embeddings_instead_of_ids_have_the_same_layout(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(
        ["a {image} b {image}?", "a longer row {image}?"], images=this.images(3, size=(64, 130))
    )
    given = {name: value for name, value in inputs.items() if name != "input_ids"}
    given["inputs_embeds"] = this.model.get_input_embeddings()(inputs["input_ids"]).detach()
    with attach(this.model, "divprune:0.5") as trace:
        expected = generate(this, inputs, 2)
        found = generate(this, given, 2)
    with torch.no_grad(), attach(this.model, "divprune:0.5") as called:
        stock, short = this.model(**inputs).logits, this.model(**given).logits
    assert all(torch.equal(a, b) for a, b in zip(expected.logits, found.logits, strict=True))
    assert torch.equal(stock, short)
    for rows in (trace.rows, called.rows):
        half = len(rows) // 2
        assert [r.tokens_out for r in rows[:half]] == [r.tokens_out for r in rows[half:]]
