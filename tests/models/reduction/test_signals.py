"""Signals of the tower by block, and tiles and places of the layout, against plain computations."""

from __future__ import annotations

import pytest
import torch
from tower_checks import GRIDS, TEXT, _qwen_by_hand, _spread, _travel, onevision, pixels, qwen
from transformers import LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register, unregister
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.tiles import tile_raster
from mmfast.models.reduction.tower_signals import (
    TOWER_SIGNALS,
    from_tower,
    middle_block,
    tower_signals,
)

ALL = tuple(TOWER_SIGNALS)


def _clip(layers=8, layer=-2):
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "image_size": 20,
            "patch_size": 4,
        },
        text_config={"model_type": "qwen2", **TEXT},
        vision_feature_layer=layer,
        vision_feature_select_strategy="default",
    )
    return _spread(LlavaOnevisionForConditionalGeneration(config))


def test_class_token_and_all_queries_are_told_apart():
    model, video = _clip(), torch.randn(1, 2, 3, 20, 20)
    with tower_signals(model, adapter_for(model), ALL) as signals, torch.no_grad():
        model.model.get_video_features(video)
    tower = model.model.vision_tower
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        weights = tower(video[0], output_attentions=True).attentions
    last, middle = 6, 2  # seven used blocks: round(3 / 8 * 7) - 1
    want = {
        "attn": weights[last][:, :, 0, 1:].mean(1),
        "attn_visual": weights[last].mean((1, 2))[:, 1:],
        "attn_middle": weights[middle].mean((1, 2))[:, 1:],
        "attn_first": weights[0][:, :, 0, 1:].mean(1),
    }
    for name, rows in want.items():
        pooled = model.model.apply_pooling(rows[..., None]).flatten()
        torch.testing.assert_close(signals.signal(name, 0), pooled, atol=1e-6, rtol=1e-5)


def test_without_a_class_token_attn_is_what_all_patches_look_at():
    model, video = onevision(), torch.randn(1, 2, 3, 20, 20)
    with tower_signals(model, adapter_for(model), ALL) as signals, torch.no_grad():
        model.model.get_video_features(video)
    assert torch.equal(signals.signal("attn", 0), signals.signal("attn_visual", 0))
    tower = model.model.vision_tower
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        first = tower(video[0], output_attentions=True).attentions[0].mean((1, 2))
    want = model.model.apply_pooling(first[..., None]).flatten()
    torch.testing.assert_close(signals.signal("attn_first", 0), want, atol=1e-6, rtol=1e-5)
    assert not torch.equal(signals.signal("attn_first", 0), signals.signal("attn", 0))


@pytest.mark.parametrize(("layers", "layer", "block"), [(24, -2, 8), (24, -1, 8), (8, -1, 2)])
def test_middle_block_is_three_eighths_up(layers, layer, block):
    tower = tower_of(_clip(layers, layer))
    assert middle_block(tower, tower.last_used({})) == block


def test_middle_block_attends_over_whole_frames():
    tower = tower_of(qwen("qwen2_5_vl"))
    tower.module.fullatt_block_indexes = [7, 15, 23, 31]
    assert middle_block(tower, 31) == 15


def test_middle_of_a_windowed_tower_is_read_in_raster_order():
    """Its only full block is the last one, so middle and last are one reading."""
    model, values = qwen("qwen2_5_vl"), pixels(GRIDS)
    with tower_signals(model, adapter_for(model), ALL) as signals, torch.no_grad():
        model.model.get_image_features(values, GRIDS)
    attn, _ = _qwen_by_hand(model, values, GRIDS)
    call = lambda: model.model.get_image_features(values, GRIDS)
    want = _travel(model, model.model.visual, "merger", attn.reshape(-1, 4, 1).mean(1), call)
    for item in range(2):
        got = signals.signal("attn_middle", item)
        torch.testing.assert_close(got, want[item][:, 0], atol=1e-6, rtol=1e-5)
        first = signals.signal("attn_first", item)  # windows of 2 x 2 units
        assert first.shape == got.shape and not torch.allclose(first, got, atol=1e-3)


def test_only_what_is_needed_is_read():
    assert from_tower(("x", "attn_first", "attn", "place")) == ("attn", "attn_first")
    model = onevision()
    with tower_signals(model, adapter_for(model), ("attn_first",)) as signals, torch.no_grad():
        model.model.get_video_features(torch.randn(1, 1, 3, 20, 20))
    with pytest.raises(ModelError, match="no signal 'keys'"):
        signals.signal("keys", 0)


@pytest.mark.parametrize("aspect", ["anyres_max_9", "anyres_max_1"])
def test_tiles_and_places_of_a_mosaic(aspect):
    """A pixel reaches only its own tile, and its own token most of all."""
    model = onevision(aspect=aspect)
    base, size, side = model.model, torch.tensor([[40, 31]]), 5
    tensor = torch.randn(1, 5, 3, 20, 20)
    layout = adapter_for(model).layout(base, "image", {"image_sizes": size})[0]
    places, tiles = layout.place(), torch.tensor(layout.tiles)
    features = lambda x: torch.cat(list(base.get_image_features(x, size).pooler_output))
    with torch.no_grad():
        stock = features(tensor)[layout.content()]
        reached = []
        for tile in range(5):
            other = tensor.clone()
            other[0, tile, :, 8:12, 12:16] += 5.0  # patch (2, 3) of the tile
            moved = (features(other)[layout.content()] - stock).norm(dim=-1)
            assert set(tiles[moved == 0].tolist()) == set(range(5)) - {tile}
            reached.append(moved)
            if aspect == "anyres_max_9":
                assert torch.equal(tiles == tile, moved > 0)
    top = [places[int(moved.argmax())].tolist() for moved in reached]
    assert top[0] == [0, 2, 3]
    if aspect == "anyres_max_9":
        crop = (2 * side - int(places[tiles > 0][:, 2].max()) - 1) // 2  # columns of padding
        assert crop == 1
        corners = [(0, 0), (0, side), (side, 0), (side, side)]
        assert top[1:] == [[0, y + 2, x + 3 - crop] for y, x in corners]
    rows = places[tiles > 0]
    width, height = int(rows[:, 2].max()) + 1, int(rows[:, 1].max()) + 1
    assert rows.tolist() == [[0, y, x] for y in range(height) for x in range(width)]


def test_tiles_that_follow_each_other_whole():
    tiles, places = tile_raster((1, 2), (2, 2), overview="last")
    assert tiles == (1, 1, 1, 1, 2, 2, 2, 2, 0, 0, 0, 0)
    assert places[5].tolist() == [0, 0, 3] and places[-1].tolist() == [0, 1, 1]
    assert tile_raster((1, 2), (2, 2))[0][:5] == (0, 0, 0, 0, 1)
    assert len(tile_raster((2, 2), (3, 1), overview=None)[0]) == 12


def test_a_method_gets_what_it_needs_at_pre():
    from tiny_models import tiny

    seen = {}

    @register("_probe", needs=("x", *ALL, "tile", "place"))
    def probe(tokens, budget):
        """Keep the first tokens."""
        seen.update({name: tokens.need(name) for name in (*ALL, "tile", "place")}, n=tokens.n)
        return Reduction.prune(torch.arange(budget), tokens.n)

    try:
        for family in ("llava_onevision", "qwen2_5_vl", "qwen3_vl"):
            this = tiny(family)
            inputs = this.inputs(["{image} what?"], images=this.images(1))
            with attach(this.model, "_probe:0.5"), torch.no_grad():
                this.model(**inputs)
            assert all(len(seen[name]) == seen["n"] for name in (*ALL, "tile", "place"))
            inputs = this.inputs(["{video} what?"], videos=this.videos(1))
            with (
                pytest.raises(ModelError, match="'tile', which is missing"),
                attach(this.model, "_probe:0.5"),
                torch.no_grad(),
            ):
                this.model(**inputs)
    finally:
        unregister("_probe")
