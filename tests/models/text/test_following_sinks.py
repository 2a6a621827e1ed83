"""Sinks that follow the window, against stock steps on keys that are rotated anew at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from text_zoo import padded, prompt, text_model, written
from tiny_models import tiny
from torch import Tensor
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.rotary import RawCapture, Rotary
from mmfast.models.kv.sinks import FollowingSinks
from mmfast.models.wrappers import decoder_of

SPEC, SINKS, WINDOW = "sink:3?positions=new+window:9", 3, 9
NAMES = ["llama", "qwen2", "qwen3", "phi3", "smollm3", "olmo2", "granite"]


def streaming(model: Any, ids: Tensor, steps: Tensor) -> Tensor:
    """StreamingLLM by hand: keys before RoPE, kept by place, and rotated to their place."""
    capture, rotary = RawCapture(decoder_of(model)), Rotary(decoder_of(model))
    found, raws, values = [], dict[int, Tensor](), dict[int, Tensor]()
    try:
        for number in range(1 + steps.shape[1]):
            cache = DynamicCache(config=model.config)
            for index, raw in raws.items():
                gone = max(0, raw.shape[2] - SINKS - WINDOW)
                kept = [each for each in range(raw.shape[2]) if not SINKS <= each < SINKS + gone]
                raws[index], values[index] = raw[:, :, kept], values[index][:, :, kept]
                places = torch.arange(len(kept))[None]
                keys = raws[index]
                if getattr(capture.attentions[index], "use_rope", True):  # not in all of SmolLM3
                    keys = rotary.rotate(capture.attentions[index], keys, places)
                cache.update(keys, values[index], index)
            new = ids if number == 0 else steps[:, number - 1 : number]
            past = raws[0].shape[2] if raws else 0
            at = torch.arange(past, past + new.shape[1])[None]
            with torch.no_grad(), capture.recording() as raw:
                out = model(new, position_ids=at, use_cache=True, **{CACHE: cache})
            found.append(out.logits[0, -1])
            for index, layer in enumerate(cache.layers):
                mine = raw.keys[index]
                raws[index] = torch.cat([raws[index], mine], 2) if index in raws else mine
                values[index] = layer.values
    finally:
        capture.remove()
    return torch.stack(found).float()


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_streaming_llm(name: str) -> None:
    model, ids = text_model(name), prompt(20)
    with attach(model, cache=SPEC):
        new, logits, _ = written(model, {"input_ids": ids}, 16)
    want = streaming(model, ids, new[:, :-1])
    torch.testing.assert_close(logits[0], want, atol=2e-5, rtol=1e-4)
    with attach(model, cache=SPEC.replace("?positions=new", "")):
        _, original, _ = written(model, {"input_ids": ids}, 16)
    assert (original[0, 3:] - want[3:]).abs().max() > 1e-3  # far sinks are another thing


def test_nothing_moves_before_something_leaves() -> None:
    model, ids = text_model("llama"), prompt(20)
    stock = written(model, {"input_ids": ids}, 8)[1]
    with attach(model, cache="sink:3?positions=new+window:90"):
        assert torch.equal(written(model, {"input_ids": ids}, 8)[1], stock)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_ragged_batch_equals_its_rows(name: str) -> None:
    model, prompts = text_model(name), [prompt(20), prompt(11, 1), prompt(30, 2)]
    with attach(model, cache=SPEC):
        new, logits, _ = written(model, padded(prompts), 10)
        for number, ids in enumerate(prompts):
            mine, alone, _ = written(model, {"input_ids": ids}, 10)
            assert torch.equal(mine[0], new[number])
            torch.testing.assert_close(alone[0], logits[number], atol=2e-5, rtol=1e-4)


def test_a_second_turn_goes_on_with_positions_inside_the_cache() -> None:
    """Sinks and a window alone decide: what left long ago has no say in any distance."""
    model = text_model("llama")
    model.config.eos_token_id = None
    with torch.no_grad(), attach(model, cache=SPEC):
        cache = DynamicCache(config=model.config)
        for seed, length in ((0, 20), (1, 5), (2, 7)):
            out = model(prompt(length, seed), use_cache=True, **{CACHE: cache})
        layer = cache.layers[0]
        model(prompt(1, 3), use_cache=True, **{CACHE: cache})
    # Turned by what has left, whose number is that of all tokens without those that are held.
    sinks = FollowingSinks(model, {0: model.model.layers[0].self_attn}, SINKS)
    first = layer.per_row["sinks"][0]
    gone = torch.tensor([[32 - SINKS - WINDOW]])
    want = sinks._turned(first[None], gone, 0)[0]
    torch.testing.assert_close(layer.keys[0, :, :SINKS], want)
    assert out.logits.shape[1] == 7


def test_beams_are_those_of_rows_one_by_one() -> None:
    model, ids = text_model("llama"), prompt(20)
    given = {"max_new_tokens": 12, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    with attach(model, cache=SPEC):
        once = model.generate(ids, **given)
        twice = model.generate(ids.repeat(2, 1), **given)
    assert torch.equal(twice[0], once[0]) and torch.equal(twice[1], once[0])


def test_scaled_embeddings_are_not_scaled_twice() -> None:
    """Angles of YaRN carry a factor, which a turned key has already."""
    model = text_model("llama")
    rotary = Rotary(decoder_of(model))
    sinks = FollowingSinks(model, {0: model.model.layers[0].self_attn}, 2)
    keys = torch.randn(1, 2, 2, model.config.hidden_size // model.config.num_attention_heads)
    module: Any = decoder_of(model).rotary_emb
    before = module.attention_scaling
    try:
        module.attention_scaling = 1.3
        at = [rotary.rotate(sinks._modules[0], keys, torch.arange(2)[None] + n) for n in (0, 7)]
        turned = sinks._turned(at[0], torch.tensor([[7]]), 0)
    finally:
        module.attention_scaling = before
    torch.testing.assert_close(turned, at[1], atol=1e-5, rtol=1e-5)


REFUSED = {
    "sink:4?positions=new": "before one window",
    "sink:0.1?positions=new+window:9": "a number of sinks",
    "sink:4?positions=new+window:9+snapkv:0.5": "before one window",
    "sink:4?positions=new+window:9+quant:4": "before one window",
    "sink:4?positions=old+window:9": "new, original",
}


@pytest.mark.parametrize("spec", [*REFUSED])
def test_other_plans_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[spec]) as told:
        plan_cache(spec)
    assert "\n" not in str(told.value)


def test_models_and_stages_beside_it_are_refused() -> None:
    model = text_model("llama")
    with pytest.raises(SpecError, match="leaves others"):
        attach(model, "fastkv:0.5?tokens=all", cache=SPEC)
    with pytest.raises(SpecError, match="positions=new"):
        attach(model, cache=SPEC, decode="recycle")
    with pytest.raises(ModelError, match="rotary"):
        attach(text_model("gpt2"), cache=SPEC)
    family = tiny("qwen2_5_vl")
    with pytest.raises(ModelError, match="frames, rows and columns"):
        attach(family.model, cache=SPEC)
    given = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    with attach(model, cache=SPEC), pytest.raises(ModelError, match="leave out positions=new"):
        model.generate(prompt(20), prompt_lookup_num_tokens=3, **given)
