"""Tower signals against attention computed by hand and sent down the model's own feature path."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from tower_checks import (
    GRIDS,
    TEXT,
    _qwen_by_hand,
    _spread,
    _travel,
    onevision,
    pixels,
    qwen,
)
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.reduction.tower_signals import tower_signals


def _eager_siglip(model, frames, layer):
    """Attention received `[B, N, 1]` and keys `[B, N, d]` of one layer, from eager weights."""
    tower = model.model.vision_tower
    tower.set_attn_implementation("eager")
    output = tower(frames, output_attentions=True, output_hidden_states=True)
    tower.set_attn_implementation("sdpa")
    block = tower.encoder.layers[layer]
    keys = block.self_attn.k_proj(block.layer_norm1(output.hidden_states[layer - 1]))
    return output.attentions[layer].mean((1, 2))[..., None], keys.unflatten(-1, (4, 8)).mean(2)


@pytest.mark.parametrize("layer", [-1, -2])
def test_onevision_video_is_pooled_like_the_features(layer):
    model = onevision(layer)
    video = torch.randn(2, 3, 3, 20, 20)
    with tower_signals(model, adapter_for(model), {"attn", "keys"}) as signals, torch.no_grad():
        stock = model.model.get_video_features(video).pooler_output
    with torch.no_grad():
        assert torch.equal(model.model.get_video_features(video).pooler_output, stock)
        attn, keys = _eager_siglip(model, video.flatten(0, 1), layer)
    call = lambda: model.model.get_video_features(video)
    for name, values in (("attn", attn), ("keys", keys)):
        want = _travel(model, model.model, "multi_modal_projector", values, call)
        assert len(want) == signals.count("video") == 2
        for item in range(2):
            value = signals.signal(name, ("video", item))
            value = value[:, None] if name == "attn" else value
            assert value.shape[0] == 3 * 9
            torch.testing.assert_close(value, want[item], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("aspect", ["anyres_max_9", "anyres_max_1"])
def test_onevision_image_rows_are_the_packed_rows(aspect):
    model = onevision(aspect=aspect)
    sizes = torch.tensor([[33, 21], [20, 58], [13, 17]])
    base = model.model
    tiles = adapter_for(model).tile_counts(base, {"image_sizes": sizes})
    assert len(set(tiles)) > 1
    tensor = torch.randn(3, max(tiles), 3, 20, 20)
    frames = torch.cat([tensor[i, :n] for i, n in enumerate(tiles)])
    call = lambda: base.get_image_features(tensor, sizes)
    with tower_signals(model, adapter_for(model), {"attn", "keys"}) as signals, torch.no_grad():
        call()
    with torch.no_grad():
        attn, keys = _eager_siglip(model, frames, -1)
    for name, values in (("attn", attn), ("keys", keys)):
        want = _travel(model, base, "multi_modal_projector", values, call)
        for item in range(3):
            got = (
                signals.signal("attn", item)[:, None]
                if name == "attn"
                else signals.signal("keys", item)
            )
            torch.testing.assert_close(got, want[item], atol=1e-6, rtol=1e-5)


def test_onevision_several_images_in_a_prompt_have_one_tile():
    model = onevision()
    sizes, tensor = torch.tensor([[33, 21], [20, 58]]), torch.randn(2, 1, 3, 20, 20)
    with tower_signals(model, adapter_for(model), ("attn",)) as signals, torch.no_grad():
        model.model.get_image_features(tensor, sizes, batch_num_images=torch.tensor([2]))
    attn, _ = _eager_siglip(model, tensor[:, 0], -1)
    torch.testing.assert_close(signals.signal("attn", 1), attn[1, :, 0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_units_are_in_raster_order(name, kind):
    model = qwen(name)
    values = pixels(GRIDS)
    encode = lambda *args: getattr(model.model, f"get_{kind}_features")(*args)
    with tower_signals(model, adapter_for(model), {"attn", "keys"}) as signals, torch.no_grad():
        stock = encode(values, GRIDS).pooler_output
    with torch.no_grad():
        assert all(map(torch.equal, encode(values, GRIDS).pooler_output, stock))
    attn, keys = _qwen_by_hand(model, values, GRIDS)
    call = lambda: encode(values, GRIDS)
    for signal, by_hand in (("attn", attn), ("keys", keys)):
        units = by_hand.reshape(-1, 4, by_hand.shape[-1]).mean(1)
        want = _travel(model, model.model.visual, "merger", units, call)
        for item in range(2):
            got = (
                signals.signal("attn", item)[:, None]
                if signal == "attn"
                else signals.signal("keys", item)
            )
            torch.testing.assert_close(got, want[item], atol=1e-6, rtol=1e-5)
    assert signals.count(kind) == 2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_a_changed_patch_moves_its_own_token(name):
    model = qwen(name)
    frame, row, column = 1, 3, 8  # of the first video, 2 x 6 x 10 patches
    block = (row // 2) * 5 + column // 2
    place = frame * 60 + block * 4 + (row % 2) * 2 + column % 2
    results = []
    for shift in (0.0, 9.0):
        values = pixels(GRIDS)
        values[place] += shift
        with tower_signals(model, adapter_for(model), ("keys",)) as signals, torch.no_grad():
            model.model.get_video_features(values, GRIDS)
        results.append(signals.signal("keys", 0))
    moved = (results[1] - results[0]).norm(dim=-1)
    assert int(moved.argmax()) == frame * 15 + block
    assert moved[:15].max() == 0  # the other frame does not see it


def test_flash_gets_all_segments_in_one_call():
    """A registered function whose name says flash, and which honours cu_seq_lens."""
    from transformers.modeling_utils import AttentionInterface

    def fake(module, q, k, v, attention_mask, scaling=None, cu_seq_lens_q=None, **_):
        lengths = cu_seq_lens_q.diff().tolist()
        parts = zip(q.split(lengths, 2), k.split(lengths, 2), v.split(lengths, 2), strict=True)
        outs = [
            nn.functional.scaled_dot_product_attention(*part, scale=scaling).transpose(1, 2)
            for part in parts
        ]
        return torch.cat(outs, dim=1), None

    model, values = qwen("qwen2_5_vl"), pixels(GRIDS)
    attn, _ = _qwen_by_hand(model, values, GRIDS)
    with tower_signals(model, adapter_for(model), ("attn",)) as want, torch.no_grad():
        model.model.get_image_features(values, GRIDS)
    AttentionInterface.register("flash_fake", fake)
    try:
        model.model.visual.config._attn_implementation = "flash_fake"
        with tower_signals(model, adapter_for(model), ("attn",)) as got, torch.no_grad():
            model.model.get_image_features(values, GRIDS)
    finally:
        del AttentionInterface._global_mapping["flash_fake"]
    torch.testing.assert_close(got.signal("attn", 1), want.signal("attn", 1), atol=1e-6, rtol=1e-5)
    assert attn.shape[0] == GRIDS.prod(-1).sum()


def test_class_token_row_is_used_where_there_is_one():
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 20,
            "patch_size": 4,
        },
        text_config={"model_type": "qwen2", **TEXT},
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    model = _spread(LlavaOnevisionForConditionalGeneration(config))
    video = torch.randn(1, 2, 3, 20, 20)
    assert tower_of(model).class_token
    with tower_signals(model, adapter_for(model), ("attn",)) as signals, torch.no_grad():
        model.model.get_video_features(video)
        tower = model.model.vision_tower
        tower.set_attn_implementation("eager")
        weights = tower(video[0], output_attentions=True).attentions[-2]
    row = weights[:, :, 0, 1:].mean(1)
    want = model.model.apply_pooling(row[..., None]).flatten()
    torch.testing.assert_close(signals.signal("attn", 0), want, atol=1e-6, rtol=1e-5)


def test_nothing_stays_behind_and_nothing_is_hooked_without_need():
    model = onevision()
    base = model.model
    video = torch.randn(1, 1, 3, 20, 20)
    with tower_signals(model, adapter_for(model), ("x", "grid")):
        assert "get_video_features" not in base.__dict__
    boom = pytest.raises(RuntimeError, match="boom")
    with boom, tower_signals(model, adapter_for(model), ("attn",)) as signals:
        base.get_video_features(video)
        raise RuntimeError("boom")
    assert "get_video_features" not in base.__dict__
    assert "get_image_features" not in base.__dict__
    assert not any("_mmfast_gate" in module.__dict__ for module in model.modules())
    signals.clear()
    with pytest.raises(ModelError, match="no signal 'attn'"):
        signals.signal("attn", 0)
    with pytest.raises(ModelError, match="no signal 'keys'"):
        signals.signal("keys", 0)


def test_two_collectors_may_leave_in_any_order():
    model = onevision()
    first = tower_signals(model, adapter_for(model), ("attn",))
    second = tower_signals(model, adapter_for(model), ("keys",))
    one, two = first.__enter__(), second.__enter__()
    video = torch.randn(1, 1, 3, 20, 20)
    model.model.get_video_features(video)
    first.__exit__(None, None, None)
    assert one.signal("attn", 0).shape == (9,)
    assert two.signal("keys", 0).shape == (9, 8)
    two.clear()
    model.model.get_video_features(video)
    assert two.count("video") == 1
    second.__exit__(None, None, None)
    assert "get_video_features" not in model.model.__dict__


def test_threads_keep_their_own_items():
    model, wrong = onevision(), []
    adapter = adapter_for(model)
    videos = [torch.randn(1, n, 3, 20, 20) for n in (1, 2, 3, 4)]
    want = []
    for video in videos:
        with tower_signals(model, adapter, ("attn",)) as signals, torch.no_grad():
            model.model.get_video_features(video)
        want.append(signals.signal("attn", 0))
    with tower_signals(model, adapter, ("attn",)) as shared:

        def work(index):
            for _ in range(8):
                with torch.no_grad():
                    model.model.get_video_features(videos[index])
                if not torch.equal(shared.signal("attn", 0), want[index]):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_unknown_family_is_refused():
    model = SimpleNamespace(config=SimpleNamespace(model_type="blip"))
    with pytest.raises(ModelError, match=r"'blip'.*families: .*llava_onevision"):
        tower_of(model)
