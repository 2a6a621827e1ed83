"""LLaVA with further vision towers: SigLIP, Pixtral, and CLIP with several layers in use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_base import finish
from transformers import LlavaConfig, LlavaForConditionalGeneration

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.reduction.tower_signals import tower_signals

TEXT = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}
TOWERS = {
    "siglip": ({"model_type": "siglip_vision_model", "vision_use_head": False}, -2, "full"),
    "pixtral": ({"model_type": "pixtral"}, -1, "full"),
    "clip": ({"model_type": "clip_vision_model"}, [-2, -3], "default"),
}
SIZES = torch.tensor([[24, 12], [16, 20]])  # only Pixtral takes images as they are


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A model with two images in its prompt."""
    vision, layer, strategy = TOWERS[name]
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config={**vision, **VISION},
        text_config=TEXT,
        image_token_index=60,
        vision_feature_layer=layer,
        vision_feature_select_strategy=strategy,
    )
    model = finish(LlavaForConditionalGeneration(config))
    call: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 24, 24)}
    if name == "pixtral":
        call["image_sizes"] = SIZES
    ids = [1]
    for layout in adapter_for(model).layout(model.model, "image", call):
        ids += [60] * layout.length + [2]
    return model, {"input_ids": torch.tensor([[*ids, 3, 4]]), **call}


@pytest.mark.parametrize("name", TOWERS)
def test_layouts_and_reductions(name: str) -> None:
    model, inputs = model_of(name)
    grids = [(1, 6, 3), (1, 4, 5)] if name == "pixtral" else [(1, 6, 6)] * 2
    call = {k: v for k, v in inputs.items() if k != "input_ids"}
    layouts = adapter_for(model).layout(model.model, "image", call)
    assert [each.grid for each in layouts] == grids
    unnamed = {"kwargs": call.copy(), "pixel_values": call["pixel_values"]}  # as 5.17 binds it
    unnamed = adapter_for(model).layout(model.model, "image", unnamed)
    assert [each.grid for each in unnamed] == grids
    stock = model(**inputs).logits
    features = model.model.get_image_features(**call).pooler_output
    assert [len(rows) for rows in features] == [each.length for each in layouts]
    with attach(model, "visionzip:1.0"):
        assert torch.equal(model(**inputs).logits, stock)
    with attach(model, "visionzip:8+divprune:0.5") as trace:
        logits = model(**inputs).logits
    text = int((inputs["input_ids"] != 60).sum())
    assert logits.shape[1] == text + 2 * 4
    assert [r.m for _, _, r in trace.reductions] == [8, 4, 8, 4]


def test_pixtral_attends_within_an_image() -> None:
    """Attention and keys of an image in a batch are those of the image alone."""
    model, inputs = model_of("pixtral")
    adapter, base = adapter_for(model), model.model
    pixels = inputs["pixel_values"]
    with tower_signals(model, adapter, {"attn", "keys"}) as signals:
        base.get_image_features(pixels, image_sizes=SIZES)
        together = [(signals.signal("attn", i), signals.signal("keys", i)) for i in range(2)]
        for i, (attn, keys) in enumerate(together):
            base.get_image_features(pixels[i : i + 1], image_sizes=SIZES[i : i + 1])
            share = len(attn) / sum(len(a) for a, _ in together)  # of all queries
            torch.testing.assert_close(
                attn, signals.signal("attn", 0) * share, atol=1e-6, rtol=1e-5
            )
            torch.testing.assert_close(keys, signals.signal("keys", 0), atol=1e-6, rtol=1e-5)


def test_the_last_of_several_layers_is_read() -> None:
    model, _ = model_of("clip")
    assert tower_of(model).last_used({}) == 1
    assert tower_of(model).class_token


@pytest.mark.parametrize(
    ("name", "why"), [("pixtral", "PixtralAttentionLayer"), ("clip", "several layers are used")]
)
def test_merging_inside_is_refused_in_one_line(name: str, why: str) -> None:
    model, _ = model_of(name)
    with pytest.raises(SpecError, match=why) as error, attach(model, "tome@vit:0.5"):
        pass
    assert "\n" not in str(error.value)
