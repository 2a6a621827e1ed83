"""KV policies on what the encoder of T5, BART, Whisper and their kin has read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from encoder_decoder_zoo import NAMES, SOUND, encoder_decoder, hiding, inputs_of, places, written

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.kv.encoded import cross_attention

TEXTS = [name for name in NAMES if name not in SOUND]
SHARES = [f"{name}:0.25" for name in ("knorm", "keydiff", "h2o", "lagkv", "leverage", "curdkv")]
SPECS = [*SHARES, "snapkv:0.25?window=1", "tova:0.25", "sink:2+window:6", "random:0.25"]


def cross(cache: Any) -> Any:
    return cache.cross_attention_cache.layers


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_left_equals_hiding_the_rest(name: str, spec: str) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name, 2)
    stock, _, whole = written(model, inputs)
    with attach(model, cache=spec) as trace:
        new, logits, cache = written(model, inputs)
    marks = places(cross(cache), cross(whole))
    n, m = cross(whole)[0].keys.shape[2], cross(cache)[0].keys.shape[2]
    assert m < n and all(bool((each.sum(-1) == m).all()) for each in marks)
    with hiding(model, marks):
        _, want, _ = written(model, inputs, new=new)
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)
    assert trace.rows[0].tokens_in == 2 * n and trace.rows[0].tokens_out == 2 * m
    assert trace.rows[0].peak_bytes == sum(2 * layer.keys.nbytes for layer in cross(cache))
    _, before, _ = written(model, inputs, new=new)
    assert torch.equal(written(model, inputs)[0], stock)
    assert (before[:, 1:] - logits[:, 1:]).abs().max() > 1e-3  # what is gone was missed
    assert torch.allclose(before[:, 0], logits[:, 0], atol=1e-5)  # the first pass sees all


@pytest.mark.parametrize("name", NAMES)
def test_a_share_of_one_is_the_stock_model(name: str) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name, 2)
    _, stock, _ = written(model, inputs)
    for spec in ("snapkv:1.0", "knorm:1.0", "window:4096"):
        with attach(model, cache=spec) as trace:
            assert torch.equal(written(model, inputs)[1], stock)
        assert trace.rows[0].tokens_in == trace.rows[0].tokens_out and trace.calls == 5


@pytest.mark.parametrize("name", NAMES)
def test_policies_choose_as_their_papers_say(name: str) -> None:
    """Short keys; and what the decoder's prompt of three attends to, by stock eager weights."""
    model, inputs = encoder_decoder(name), inputs_of(name)
    whole = cross(written(model, inputs)[2])
    with attach(model, cache="knorm:7"):
        marks = places(cross(written(model, inputs)[2]), whole)
    for mark, layer in zip(marks, whole, strict=True):
        short = layer.keys.double().norm(dim=-1).argsort(-1)[..., :7]
        assert torch.equal(mark, torch.zeros_like(mark).scatter(-1, short, True))
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids = {"decoder_input_ids": torch.arange(2, 5)[None]}
    with torch.no_grad():
        told = model(**inputs, **ids, output_attentions=True).cross_attentions
    model.set_attn_implementation(own)
    with attach(model, cache="snapkv:9?window=3&kernel=1"):
        marks = places(cross(written(model, inputs)[2]), whole)
    for mark, seen in zip(marks, told, strict=True):
        votes = seen.sum(2).unflatten(1, (mark.shape[1], -1)).mean(2)
        best = votes[..., :-3].topk(6).indices
        want = torch.zeros_like(mark).scatter(-1, best, True)
        want[..., -3:] = True
        assert torch.equal(mark, want)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("spec", ["knorm:0.25", "snapkv:9?window=1", "sink:2+window:6"])
def test_a_ragged_batch_equals_its_rows(name: str, spec: str) -> None:
    model, rows, lengths = encoder_decoder(name), inputs_of(name, 3)["input_ids"], (40, 22, 33)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    with attach(model, cache=spec):
        new, logits, _ = written(model, {"input_ids": rows * mask, "attention_mask": mask.long()})
        for number, length in enumerate(lengths):
            ids = rows[number : number + 1, :length]
            mine, alone, _ = written(model, {"input_ids": ids})
            assert torch.equal(mine, new[number : number + 1])
            torch.testing.assert_close(alone[0], logits[number], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "best"), [("t5", 2), ("bart", 1), ("whisper", 1)])
def test_beams_equal_hiding_the_rest(name: str, best: int) -> None:
    model, inputs = encoder_decoder(name), inputs_of(name, 2)
    given = {**inputs, "num_beams": 3, "num_return_sequences": best, "max_new_tokens": 6}
    if name == "whisper":
        given["decoder_input_ids"] = torch.full((2, 1), 2)
    whole = cross(written(model, inputs, 1, 1)[2])
    with attach(model, cache="knorm:0.2") as trace:
        found = model.generate(**given)
        left = cross(written(model, inputs, 1, 1)[2])
    assert trace.rows[0].tokens_in == 6 * whole[0].keys.shape[2]
    marks = [each.repeat_interleave(3, 0) for each in places(left, whole)]
    first = [True] * len(cross_attention(model))

    def once(index: int, hook: Any) -> Any:
        def run(*args: Any) -> Any:
            begun, first[index] = first[index], False
            return None if begun else hook(*args)

        return run

    with hiding(model, marks, begin=-1):  # prompts of one token: told apart by their number
        for index, module in cross_attention(model).items():
            key, hook = next(iter(module._forward_pre_hooks.items()))
            module._forward_pre_hooks[key] = once(index, hook)
        want = model.generate(**given)
    assert torch.equal(found, want)


def test_drafts_of_another_model_change_nothing() -> None:
    model, inputs = encoder_decoder("t5"), inputs_of("t5")
    draft = copy.deepcopy(model)
    given = {**inputs, "max_new_tokens": 8, "do_sample": False}
    with attach(model, cache="knorm:0.25") as trace:
        plain = model.generate(**given)
        assert torch.equal(model.generate(**given, assistant_model=draft), plain)
    assert [row.tokens_out for row in trace.rows] == [10, 10]


@pytest.mark.slow
def test_a_compiled_model_is_thinned() -> None:
    model, inputs = encoder_decoder("bart"), inputs_of("bart")
    with attach(model, cache="knorm:0.25"):
        plain = written(model, inputs)[1]
    compiled = torch.compile(model, backend="eager")
    with attach(compiled, cache="knorm:0.25") as trace:
        found = written(compiled, inputs)[1]
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    assert trace.rows[0].tokens_out == 10


REFUSED = {
    "quest:0.1": "nothing follows",
    "quant:4": "policies that can, .*snapkv",
    "snapkv:0.5+quant:4": "quant",
    "kvzip:0.5": "kvzip",
    "pyramidkv:0.5": "pyramidkv",
    "snapkv:0.5?every=4": "every=4",
    "zipcache:0.5": "zipcache",
    "retrieve:4": "retrieve",
}


@pytest.mark.parametrize("spec", [*REFUSED])
def test_other_policies_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(SpecError, match=REFUSED[spec]) as told:
        attach(encoder_decoder("t5"), cache=spec)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "given", [{"reduce": "evs:0.5"}, {"reduce": "auto"}, {"decode": "recycle"}, {"encoder": "fast"}]
)
def test_other_options_are_refused_in_one_line(given: dict[str, str]) -> None:
    with pytest.raises(ModelError, match=r"an encoder-decoder.*cache='snapkv:0.25'"):
        attach(encoder_decoder("whisper"), cache="knorm:0.5", **given)
    assert not any(m._forward_pre_hooks for m in encoder_decoder("whisper").modules())


def test_what_cannot_be_thinned_says_so() -> None:
    model, inputs = encoder_decoder("t5"), inputs_of("t5")
    with attach(model, cache="knorm:0.5") as trace, pytest.warns(UserWarning, match="use_cache"):
        model(**inputs, decoder_input_ids=torch.tensor([[2, 3]]), use_cache=False)
    assert not trace.rows and len(trace.notes) == 1
    given = {**inputs, "max_new_tokens": 3, "do_sample": False}
    with attach(model, cache="knorm:0.5"), pytest.raises(ModelError, match="StaticLayer"):
        model.generate(**given, cache_implementation="static")
    with attach(model, cache="knorm:0.5"), pytest.raises(ModelError, match="output_attentions"):
        model.generate(**given, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("name", ["t5", "whisper", "bart"])
@pytest.mark.parametrize("what", ["decoder", "layer", "attention"])
def test_parts_that_are_replaced_are_told_of(name: str, what: str) -> None:
    model, inputs = copy.deepcopy(encoder_decoder(name)), inputs_of(name)
    part = {"decoder": model.get_decoder(), "attention": cross_attention(model)[1]}
    lists = (m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList))
    part["layer"] = next(lists)[1]
    path = next(each for each, module in model.named_modules() if module is part[what])
    with attach(model, cache="knorm:0.5"):
        written(model, inputs)
        model.set_submodule(path, copy.deepcopy(part[what]))
        with pytest.raises(
            ModelError, match=r"decoder layer \d of .* replaced after attach"
        ) as told:
            written(model, inputs)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_refused(strict: bool) -> None:
    model, inputs = encoder_decoder("t5"), inputs_of("t5")
    given = {**inputs, "decoder_input_ids": torch.tensor([[2, 3]]), "use_cache": False}
    with pytest.raises(ModelError, match="detach first, and exp"), attach(model, cache="knorm:0.5"):
        torch.export.export(model, (), kwargs=given, strict=strict)


def test_a_stage_that_forgot_the_padding_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: padding counts as entries."""
    every = "mmfast.models.kv.encoded._real"
    monkeypatch.setattr(every, lambda _, key, __: [torch.arange(key.shape[2])] * len(key))
    with pytest.raises(AssertionError):
        test_a_ragged_batch_equals_its_rows("bart", "knorm:0.25")
