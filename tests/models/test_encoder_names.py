"""Encoders of older releases: other names of arguments, planes in one piece, no control marks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import generate, tiny
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError
from mmfast.models import encoder_names
from mmfast.models.encoder_names import (
    bound_arguments,
    encode_media,
    encoder_arguments,
    features_of,
    output_of,
    planes_of,
    renamed,
    takes_features,
)
from mmfast.models.families import gemma4
from mmfast.models.families.adapter import adapter_for, tower_of
from mmfast.models.families.tower import argument
from mmfast.models.prompt import Shot, marked, media_arguments
from mmfast.models.reduction import hooks
from mmfast.models.reduction.inputs import compress
from mmfast.models.wrappers import lender_of
from mmfast.streams.reuse import media
from mmfast.streams.reuse.plan import ReusePlan
from mmfast.streams.reuse.store import ReuseStore


class OldNames:
    """The signature of LLaVA-OneVision in 5.17."""

    def get_image_features(self, pixel_values: Tensor, image_sizes: Any = None) -> Any:
        return "image", pixel_values, image_sizes

    def get_video_features(self, pixel_values: Tensor, layer: int = 1, **kwargs: Any) -> Any:
        return "video", pixel_values, layer


class NewNames(OldNames):
    """That of later releases."""

    def get_video_features(self, pixel_values_videos: Tensor, layer: int = 1, **kwargs: Any) -> Any:  # type: ignore[override]
        return "video", pixel_values_videos, layer


@pytest.mark.parametrize("kind", [OldNames, NewNames])
def test_clips_go_by_one_name(kind: Any) -> None:
    base, clip = kind(), torch.zeros(1)
    assert encoder_arguments(base, "video") == ("pixel_values_videos", "layer", "kwargs")
    assert encoder_arguments(base, "image") == ("pixel_values", "image_sizes")
    assert encode_media(base, "video", {"pixel_values_videos": clip, "layer": 2})[1:] == (clip, 2)
    assert encode_media(base, "image", {"pixel_values": clip})[:2] == ("image", clip)
    own = "pixel_values" if kind is OldNames else "pixel_values_videos"
    for args, kwargs in [((clip,), {}), ((), {own: clip})]:
        found = bound_arguments(base, "get_video_features", args, kwargs)
        assert found == {"pixel_values_videos": clip}
    found = bound_arguments(base, "get_video_features", (clip,), {}, defaults=True)
    assert found == {"pixel_values_videos": clip, "layer": 1, "kwargs": {}}
    assert bound_arguments(base, "get_image_features", (clip,), {}) == {"pixel_values": clip}


def test_a_tower_reads_the_clip_of_an_old_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llava_onevision").model
    monkeypatch.setattr(type(model.base_model), "get_video_features", OldNames.get_video_features)
    clip = torch.zeros(1, 2, 3, 4, 4)
    found = tower_of(model).bind("get_video_features", (clip,), {})
    assert found["pixel_values_videos"] is clip and "pixel_values" not in found


def test_the_newline_of_a_clip_is_a_feature_of_old_releases_too() -> None:
    this, clips = tiny("llava_onevision"), torch.zeros(2, 3, 4)
    base, output = this.model.base_model, SimpleNamespace(pooler_output=clips)
    assert features_of(OldNames(), "video", output) is clips
    old = type("OldClips", (OldNames,), {"image_newline": base.image_newline})()
    width = len(base.image_newline)
    output = SimpleNamespace(pooler_output=torch.zeros(2, 3, width))
    found = features_of(old, "video", output)
    assert found.shape == (2, 4, width) and torch.equal(found[1, 3], base.image_newline)
    assert features_of(old, "image", output) is output.pooler_output
    output.pooler_output = tuple(output.pooler_output)  # LLaVA-NeXT-Video appends none
    assert features_of(old, "video", output) is output.pooler_output
    sounds = SimpleNamespace(pooler_output=None, last_hidden_state=clips)
    assert features_of(old, "audio", sounds) is clips


def test_return_dict_is_no_argument_of_an_encoder_without_more() -> None:
    given = {"pixel_values": 1, "return_dict": True}
    found = bound_arguments(OldNames(), "get_image_features", (), given)
    assert found == {"pixel_values": 1}
    with pytest.raises(TypeError):
        bound_arguments(OldNames(), "get_image_features", (), {**given, "other": 1})


def test_clips_of_gemma4_without_counts_have_frames_by_shape() -> None:
    base = tiny("gemma4_e").model.base_model
    side = base.config.vision_config.pooling_kernel_size
    x = torch.stack(torch.meshgrid(torch.arange(2 * side), torch.arange(side), indexing="ij"), -1)
    places = x.flatten(0, 1).expand(2, 3, -1, -1)  # two clips of three frames
    counted = {"num_frames_per_video": torch.tensor([3, 3])}
    new = gemma4.layout(base, "video", {"video_position_ids": places.flatten(0, 1), **counted})
    old = gemma4.layout(base, "video", {"video_position_ids": places})
    assert new == old and [each.grid for each in old] == [(3, 1, 2)] * 2


def test_planes_are_cut_like_the_features() -> None:
    rows = torch.arange(10.0).reshape(5, 2)
    cut = (rows[:2], rows[2:])
    for plane in (rows, cut):
        (found,) = planes_of(SimpleNamespace(pooler_output=cut, deepstack_features=[plane]))
        assert all(map(torch.equal, found, cut)) and len(found) == 2
    assert planes_of(SimpleNamespace(pooler_output=rows)) == []


def test_features_need_not_be_a_field_of_the_output() -> None:
    output = output_of(BaseModelOutput, {"last_hidden_state": None, "pooler_output": [1]})
    assert type(output) is BaseModelOutput and output.pooler_output == [1]


class TakesPixels(torch.nn.Module):
    """A forward of 5.17."""

    def forward(self, input_ids: Tensor, pixel_values: Any = None, **kwargs: Any) -> None: ...


@pytest.fixture
def pixels_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import mmfast.models.reduction.inputs as module

    monkeypatch.setattr(module, "takes_features", lambda _: takes_features(TakesPixels()))
    yield


@pytest.mark.usefixtures("pixels_alone")
def test_features_go_in_embedded_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["a {video} b"], **this.media("video", 1))
    found = compress(this.model, inputs, None)
    assert "mm_encoder_outputs" not in found
    with torch.no_grad():
        stock = this.model(**inputs).logits
        ours = this.model(**{k: v for k, v in found.items() if k != "input_ids"}).logits
    assert torch.allclose(ours, stock, atol=1e-5)
    this = tiny("qwen3_vl")
    inputs = this.inputs(["a {video} b"], **this.media("video", 1))
    with pytest.raises(ModelError, match=r"takes no features in place of pixels .*5\.18"):
        compress(this.model, inputs, None)
    monkeypatch.setattr(hooks, "takes_features", lambda _: False)
    given = {"input_ids": inputs["input_ids"], "mm_encoder_outputs": {"video": SimpleNamespace()}}
    with (
        attach(this.model, "random:0.5"),
        pytest.raises(ModelError, match=r"takes no features .*5\.18"),
    ):
        this.model(**given)
    monkeypatch.setattr(media, "takes_features", lambda _: False)
    reuse = media.MediaReuse(this.model, this.processor, ReusePlan("encoder"), ReuseStore())
    with pytest.raises(ModelError, match=r"reuse='encoder' hands features .*5\.18"):
        reuse.encoded(inputs)


@pytest.mark.parametrize("cut", [0, 3])
def test_control_tokens_are_refused_where_no_processor_reads_marks(
    monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    none = type("TextKwargs", (), {"__annotations__": {}})
    monkeypatch.setattr("transformers.processing_utils.TextKwargs", none)
    processor = tiny("llava_onevision").processor
    tokenizer, token = processor.tokenizer, processor.video_token
    refusal = f"holds {token!r}, a control token"
    plain = [{"role": "user", "content": ["a video", Shot("video", np.zeros((1, 2, 2, 3)))]}]
    assert marked(tokenizer, plain, {"tools": None}) == (plain, {"tools": None}, {})
    with pytest.raises(MmfastError, match=re.escape(refusal)):
        marked(
            tokenizer, [{"role": "user", "content": ["a " + token[:cut], token[cut:] + " b"]}], {}
        )
    with pytest.raises(MmfastError, match=re.escape(refusal)):
        marked(tokenizer, plain, {"documents": [{"text": token}]})


def test_clips_of_smolvlm_are_nested_by_prompt() -> None:
    facts = {"total_num_frames": 1}
    clips = [Shot("video", np.full((1, 2, 8, 3), n, np.uint8), facts) for n in range(3)]
    picture = Shot("image", np.zeros((8, 8, 3), np.uint8))
    shots = [clips[:2], [picture], clips[2:]]
    smol = type("SmolVLMProcessor", (), {})()
    nested, flat = (media_arguments(each, shots)["videos"] for each in (smol, object()))
    assert [len(each) for each in nested] == [2, 0, 1] and len(flat) == 3
    assert all(map(np.array_equal, chain.from_iterable(nested), flat))


def test_a_wrapped_model_takes_what_its_own_takes() -> None:
    model = tiny("qwen3_vl").model
    takes = "mm_encoder_outputs" in inspect.signature(model.forward).parameters  # from 5.18 on
    assert takes_features(model) == takes_features(torch.compile(model)) == takes


@pytest.mark.filterwarnings("ignore:.*reduced nothing")
@pytest.mark.parametrize(
    "spec", [{"reduce": "tome@vit:0.5"}, {"cache": "sink:8"}, {"prefill": "sale"}]
)
def test_media_are_refused_where_chunks_would_lose_them(
    monkeypatch: pytest.MonkeyPatch, spec: dict[str, str]
) -> None:
    monkeypatch.setattr(encoder_names, "_LOSES_MEDIA", True)
    this = tiny("llava_onevision")
    media = this.inputs(["what is {video} there?"], **this.media("video", 1))
    words = this.inputs(["what is there, in words alone?"])
    with attach(this.model, **spec):
        with pytest.raises(ModelError, match=r"^prefill_chunk_size=8 loses .* 5\.23 or later$"):
            generate(this, media, prefill_chunk_size=8)
        generate(this, words, prefill_chunk_size=8)
        generate(this, media)
    assert "_prefill" not in this.model.__dict__


def test_tiles_that_one_release_of_smolvlm_cannot_cut_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this = tiny("smolvlm")
    base, call = this.model.base_model, {"pixel_values": torch.ones(1, 2, 3, 24, 24)}
    layout = adapter_for(this.model).layout
    monkeypatch.setattr("mmfast.models.families.idefics3.RELEASE", (5, 20))
    with pytest.raises(ModelError, match=r"multiple of 4 tokens.* has 9; use transformers 5\.21"):
        layout(base, "image", call)
    monkeypatch.setattr(base.config.vision_config, "patch_size", 2)
    assert [each.length for each in layout(base, "image", call)] == [36, 36]
    monkeypatch.setattr("mmfast.models.families.idefics3.RELEASE", (5, 21))
    monkeypatch.setattr(base.config.vision_config, "patch_size", 4)
    assert [each.length for each in layout(base, "image", call)] == [9, 9]


@pytest.mark.parametrize("shared", [0, 2, 3])
def test_keys_are_lent_as_configurations_of_5_22_count_them(shared: int) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    old = SimpleNamespace(layer_types=kinds, num_hidden_layers=6, num_kv_shared_layers=shared)
    want = {0: range(6), 2: [0, 1, 2, 3, 2, 3], 3: [0, 1, 2, 1, 2, 1]}
    assert [lender_of(old, layer) for layer in range(6)] == [*want[shared]]


@pytest.mark.parametrize("name", ["vision_feature_layer", "vision_feature_layers"])
def test_feature_layers_go_by_either_name(name: str) -> None:
    base = SimpleNamespace(config=SimpleNamespace(**{name: [-2, 6]}))
    assert argument(base, {}, "vision_feature_layer") == [-2, 6]
    assert argument(base, {name: 0}, "vision_feature_layer") == 0
    assert argument(SimpleNamespace(), {}, "vision_feature_layer") is None


def test_pictures_of_video_llava_are_refused_where_its_forward_has_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(self: Any, pixel_values: Any = None) -> None: ...

    def old(self: Any, pixel_values_images: Any = None) -> None: ...

    batch, clips = {"pixel_values_images": 1, "x": 2}, {"pixel_values_videos": 3}
    monkeypatch.setattr("transformers.VideoLlavaModel.forward", forward)
    assert renamed(batch) == {"pixel_values": 1, "x": 2}
    monkeypatch.setattr("transformers.VideoLlavaModel.forward", old)
    with pytest.raises(ModelError, match=r"transformers 5\.21 on"):
        renamed(batch)
    assert renamed(clips) == clips
