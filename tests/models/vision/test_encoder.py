"""The faster vision tower against the stock one, and that it leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from encoder_checks import CLOSE, features, ragged
from tiny_base import by_name
from tiny_models import ALL_FAMILIES, build, facts, generate, tiny, video_prompt
from tower_checks import GRIDS, onevision, pixels, qwen

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import MmfastError, SpecError
from mmfast.models.families.adapter import tower_of
from mmfast.models.families.tower import SEGMENTS, attention_of
from mmfast.models.loading import load
from mmfast.models.vision.acceleration import check_encoder, fast_encoder

KINDS = [(f, kind) for f in ALL_FAMILIES for kind in facts(f).kinds if kind != "audio"]
each = pytest.mark.parametrize(("family", "kind"), KINDS)


def traces(model: Any) -> Any:
    """Everything of a model that a context could have left changed."""
    modules = {name: sorted(module.__dict__) for name, module in model.named_modules()}
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return modules, configs, hooks


@pytest.mark.rest_is_slow(3)
@each
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_features_are_those_of_the_stock_tower(family: str, kind: str, attention: str) -> None:
    this = tiny(family, attention=attention)
    call = ragged(this, kind)
    expected, before = features(this, kind, call), traces(this.model)
    with fast_encoder(this.model, "fast"):
        found = features(this, kind, call)
        # A tower of convolutions alone has no patches, attention or blocks: it stays as it is.
        assert (traces(this.model) == before) == (family == "fast_vlm")
    assert traces(this.model) == before
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(features(this, kind, call), expected)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_segments_of_packed_towers_change_no_bit(name: str, monkeypatch: Any) -> None:
    """Windows together are the same numbers; only the patch embedding sums in another order."""
    monkeypatch.setattr("mmfast.models.vision.acceleration.patch_convolutions", lambda _: [])
    model = qwen(name)
    call = {"pixel_values_videos": pixels(GRIDS), "video_grid_thw": GRIDS}
    expected, calls = features(model, "video", call), []
    stock = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return stock(*args, **kwargs)

    with fast_encoder(model, "fast"):
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        assert torch.equal(features(model, "video", call), expected)
    together = len(calls)
    calls.clear()
    features(model, "video", call)
    assert sum(calls) == len(calls) > together  # the stock tower calls once per segment


def test_eager_becomes_sdpa_and_flash_is_left_alone() -> None:
    model = onevision()
    config = attention_of(tower_of(model).blocks[0]).config
    for before, inside in (("eager", "sdpa"), ("sdpa", "sdpa"), ("flash_attention_2", None)):
        config._attn_implementation = before
        with fast_encoder(model, "fast"):
            assert config._attn_implementation == (inside or before)
        assert config._attn_implementation == before
    packed = qwen("qwen3_vl")
    config = attention_of(tower_of(packed).blocks[0]).config
    with fast_encoder(packed, "fast"):
        assert config._attn_implementation == SEGMENTS
        assert packed.config.get_text_config()._attn_implementation == "sdpa"


@pytest.mark.parametrize("layer", [-1, -2, [-3, -2], 1])
def test_blocks_that_no_feature_needs_do_not_run(layer: Any) -> None:
    model = onevision()
    if isinstance(layer, list):
        width = model.model.multi_modal_projector.linear_1.in_features
        model.model.multi_modal_projector.linear_1 = torch.nn.Linear(2 * width, 32)
    call = {"pixel_values_videos": torch.randn(2, 2, 3, 20, 20), "vision_feature_layer": layer}
    blocks = tower_of(model).blocks
    ran: list[int] = []
    for index, block in enumerate(blocks):
        block.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    expected = features(model, "video", call)
    assert ran == [0, 1, 2]
    ran.clear()
    with fast_encoder(model, "fast"):
        torch.testing.assert_close(features(model, "video", call), expected, **CLOSE)
        assert ran == list(range(3))[: max(layer) % 4 if isinstance(layer, list) else layer % 4]
        ran.clear()
        model.model.vision_tower(call["pixel_values_videos"][0])  # called by itself, it is whole
        assert ran == [0, 1, 2]


def test_hidden_states_that_are_asked_for_are_all_computed() -> None:
    model = onevision(-2)
    call = {"pixel_values_videos": torch.randn(1, 2, 3, 20, 20), "output_hidden_states": True}
    call = by_name(model.model.get_video_features, call)
    expected = model.model.get_video_features(**call).hidden_states
    with fast_encoder(model, "fast"):
        found = model.model.get_video_features(**call).hidden_states
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    "spec", [None, "divprune:0.5", "visionzip:0.5", "tome@vit:0.5", "tome@vit:0.5+visionzip:0.5"]
)
def test_answers_under_attach(family: str, spec: str | None) -> None:
    """Reduction reads the same signals and merges the same patches in the faster tower."""
    this = tiny(family)
    inputs = video_prompt(this)
    with attach(this.model, spec) as stock:
        expected = generate(this, inputs, 3)
    before = traces(this.model)
    with attach(this.model, spec, encoder="fast") as trace:
        found = generate(this, inputs, 3)
    assert traces(this.model) == before
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.logits[0], expected.logits[0], atol=1e-3, rtol=1e-3)
    for one, other in zip(trace.reductions, stock.reductions, strict=True):
        assert one[:2] == other[:2]
        assert torch.equal(one[2].keep, other[2].keep)


def test_without_the_option_nothing_is_touched() -> None:
    this = tiny("qwen2_5_vl")
    before = traces(this.model)
    with attach(this.model):
        assert traces(this.model) == before
    with fast_encoder(this.model, None):
        assert traces(this.model) == before


def test_an_error_inside_restores_the_model() -> None:
    this = build("qwen2_5_vl")
    before = traces(this.model)
    with pytest.raises(RuntimeError, match="stop"), attach(this.model, encoder="fast"):
        raise RuntimeError("stop")
    assert traces(this.model) == before


def test_pipeline_passes_the_option_on(clip_path: Any) -> None:
    pair: Any = load(None, None, "auto")
    model, seen = pair[0], list[bool]()
    stock = mmfast.pipeline("video-qa", pair, frames=2, max_new_tokens=3)
    quick = mmfast.pipeline("video-qa", pair, frames=2, max_new_tokens=3, encoder="fast")
    conv = model.model.vision_tower.embeddings.patch_embedding
    block = tower_of(model).blocks[0]
    handle = block.register_forward_hook(lambda *_: seen.append("forward" in conv.__dict__))
    try:
        answers = [pipe(clip_path, "what?").text for pipe in (stock, quick)]
        streamed = "".join(quick.stream(clip_path, "what?"))
    finally:
        handle.remove()
    assert answers[0] == answers[1] == streamed.strip()
    assert seen == [False, True, True]


def test_wrong_options_are_told_in_one_line() -> None:
    with pytest.raises(
        SpecError, match=r"unknown encoder 'quick'; choices: compile, fast"
    ) as error:
        mmfast.pipeline("video-qa", "no/such/checkpoint", encoder="quick")
    assert "\n" not in str(error.value)
    with pytest.raises(MmfastError, match="tower is on cpu; use encoder='compile'"):
        check_encoder("graph", torch.device("cpu"))
    this = tiny("llava_onevision")
    with pytest.raises(SpecError, match=r"'tome@vit:0\.5' makes each another"):
        attach(this.model, "tome@vit:0.5", encoder="graph").__enter__()
    with pytest.raises(MmfastError, match="encoder='graph' records CUDA graphs"):
        attach(this.model, encoder="graph").__enter__()


def test_compiling_without_a_compiler_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr("mmfast.models.vision.acceleration.shutil.which", lambda _: None)
    with pytest.raises(MmfastError, match=r"needs a C\+\+ compiler on the CPU; install g\+\+"):
        check_encoder("compile", torch.device("cpu"))
