"""Captured keys before RoPE, and their rotation, against what stock models cache."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from tiny_models import ALL_FAMILIES, build, tiny
from torch import nn
from transformers import DynamicCache, Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.gemma3 import Gemma3TextModel
from transformers.models.llama import LlamaModel
from transformers.models.phi3 import Phi3Model
from transformers.models.qwen3 import Qwen3Model

from mmfast.core.errors import ModelError
from mmfast.models.decoder.rotary import RawCapture, Rotary, check_rotation

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
LENGTHS = (1, 2, 4, 33)  # 2 and 4 are also numbers of heads


def run(decoder: Any, n: int, axes: int, batch: int = 1, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """A cache of n random tokens at random places, negative ones too."""
    generator = torch.Generator().manual_seed(seed + n)
    weight = decoder.get_input_embeddings().weight
    embeds = torch.randn(batch, n, weight.shape[1], generator=generator).to(weight.dtype)
    places = torch.randint(-50, 4000, (axes, batch, n), generator=generator)
    cache = DynamicCache(config=decoder.config)
    with torch.no_grad():
        decoder(
            inputs_embeds=embeds,
            position_ids=places if axes > 1 else places[0],
            past_key_values=cache,
            use_cache=True,
        )
    return cache, places


def compare(decoder: Any, seed: int = 0) -> None:
    """Captured keys, rotated at once and one by one, are the cached ones bit for bit."""
    capture, rotary = RawCapture(decoder), Rotary(decoder)
    for n in LENGTHS:
        with capture.recording() as raw:
            cache, places = run(decoder, n, rotary.axes, batch=2, seed=seed)
        for layer, attention in capture.attentions.items():
            held, keys = cache.layers[layer].keys, raw.keys[layer]
            if held.shape[2] < n:  # a sliding window
                keys, places_ = keys[:, :, -held.shape[2] :], places[..., -held.shape[2] :]
            else:
                places_ = places
            assert torch.equal(rotary.rotate(attention, keys, places_), held)
            single = [rotary.rotate(attention, k, places_[:, i]) for i, k in enumerate(keys)]
            assert torch.equal(torch.stack(single), held)
            assert raw.queries[layer].shape[-2:] == raw.keys[layer].shape[-2:]
            assert raw.queries[layer].shape[1] == decoder.config.num_attention_heads
    capture.remove()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_in_both_dtypes(family: str) -> None:
    decoder = build(family).model.get_decoder()
    for dtype in (torch.float32, torch.bfloat16):
        compare(decoder.to(dtype))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Phi3Model, Phi3Config(**SIZES)),
        (Qwen3Model, Qwen3Config(**SIZES, head_dim=64)),
        (Gemma3TextModel, Gemma3TextConfig(**{**SIZES, "num_key_value_heads": 1}, head_dim=16)),
        (
            LlamaModel,
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
            ),
        ),
    ],
    ids=["fused", "wide-heads", "one-head", "scaled"],
)
def test_other_attentions(kind: Any, config: Any) -> None:
    torch.manual_seed(0)
    decoder = kind(config).eval()
    capture = RawCapture(decoder)
    check_rotation(decoder, capture, Rotary(decoder))
    capture.remove()
    compare(decoder)
    compare(decoder.to(torch.bfloat16))


def test_only_the_thread_that_asked_sees_anything() -> None:
    decoder, other = tiny("qwen2_5_vl").model.get_decoder(), tiny("qwen3_vl").model.get_decoder()
    capture = RawCapture(decoder)
    with capture.recording() as raw:
        thread = threading.Thread(target=run, args=(decoder, 3, 3))
        thread.start()
        thread.join()
        run(other, 3, 3)
        assert not raw.keys
        run(decoder, 3, 3)
        assert len(raw.keys) == len(raw.queries) == 4
    capture.remove()


def test_nested_recordings_and_nothing_left_behind() -> None:
    decoder = tiny("llava_onevision").model.get_decoder()
    capture = RawCapture(decoder)
    with capture.recording() as outer:
        with capture.recording() as inner:
            run(decoder, 2, 1)
        run(decoder, 3, 1)
    assert inner.keys[0].shape[2] == 2
    assert outer.keys[0].shape[2] == 3
    capture.remove()
    capture.remove()
    assert not any(module._forward_hooks for module in decoder.modules())


def test_a_model_that_cannot_be_read_says_so() -> None:
    with pytest.raises(ModelError, match="no layers with self_attn"):
        RawCapture(nn.Linear(2, 2))
    decoder = LlamaModel(LlamaConfig(**SIZES))
    decoder.layers[1].self_attn.key_projection = decoder.layers[1].self_attn.k_proj
    del decoder.layers[1].self_attn.k_proj
    with pytest.raises(ModelError, match="layer 1 has no k_proj or qkv_proj"):
        RawCapture(decoder)
    assert not any(module._forward_hooks for module in decoder.modules())


def test_rotary_that_changes_with_the_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    decoder = LlamaModel(LlamaConfig(**SIZES, rope_parameters=rope))
    with pytest.raises(ModelError, match="'dynamic'"):
        Rotary(decoder)
    with pytest.raises(ModelError, match="no rotary_emb"):
        Rotary(tiny("qwen3_vl").model.model)


def test_a_norm_behind_rope_is_noticed() -> None:
    decoder = build("llava_onevision").model.get_decoder()
    stock = type(decoder.layers[2].self_attn).forward

    def late(self: Any, position_embeddings: Any, **kwargs: Any) -> Any:
        return stock(self, position_embeddings=[2 * part for part in position_embeddings], **kwargs)

    decoder.layers[2].self_attn.forward = late.__get__(decoder.layers[2].self_attn)
    capture = RawCapture(decoder)
    with pytest.raises(ModelError, match="layer 2 caches keys that are not"):
        check_rotation(decoder, capture, Rotary(decoder))
    capture.remove()


def test_a_model_with_hooks_can_be_copied() -> None:
    """Copied with its hooks, it tells the copy of the capture, and the first one is as it was."""
    decoder = tiny("llava_onevision").model.get_decoder()
    capture = RawCapture(decoder)
    both = (decoder, capture)
    for twin, own in (copy.deepcopy(both), pickle.loads(pickle.dumps(both))):
        with capture.recording() as raw, own.recording() as told:
            run(twin, 3, 1)
            assert not raw.keys and len(told.keys) == 4
        own.remove()
        assert not any(module._forward_hooks for module in twin.modules())
    copy.deepcopy(decoder)  # without its capture at hand, too
    with capture.recording() as raw:
        run(decoder, 2, 1)
    assert len(raw.keys) == 4
    capture.remove()
