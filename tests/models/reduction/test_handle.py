"""The handle of `attach`: installed at once, exactly undone, never copied, never silently idle."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from tiny_models import build, generate, tiny

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError


def ask(family: str = "llava_onevision") -> Any:
    this = tiny(family)
    return this, this.inputs(["on {video} what?"], videos=this.videos(1))


def logits(model: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**inputs).logits
    return found


def state(model: Any) -> list[Any]:
    """What a model holds beside its weights: instance attributes and hooks of all modules."""
    return [
        (
            name,
            sorted(module.__dict__),
            list(module._forward_hooks),
            list(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ]


def test_active_at_once_and_detached() -> None:
    this, inputs = ask()
    stock, before = logits(this.model, inputs), state(this.model)
    handle = mmfast.attach(this.model, "random:0.25+fastv@llm2:0.5")
    short = logits(this.model, inputs)
    assert short.shape[1] < stock.shape[1]
    assert handle.attached and [row.stage for row in handle.trace.rows] == ["pre", "llm2"]
    handle.detach()
    handle.detach()
    assert not handle.attached
    assert state(this.model) == before
    assert torch.equal(logits(this.model, inputs), stock)
    with attach(this.model, "random:0.25+fastv@llm2:0.5"):
        assert torch.equal(logits(this.model, inputs), short)


@pytest.mark.parametrize("options", [{"reduce": "nope:0.5"}, {"cache": "nope:5"}, {"encoder": "x"}])
def test_checked_at_once(options: dict[str, str]) -> None:
    this, _ = ask()
    before = state(this.model)
    with pytest.raises(SpecError):
        attach(this.model, **options)
    assert state(this.model) == before


def test_its_repr() -> None:
    this, inputs = ask()
    with attach(this.model, "random:0.25", cache="snapkv:16") as trace:
        logits(this.model, inputs)
        assert trace.calls == 1
    handle = attach(this.model, "random:0.25", cache="snapkv:16")
    logits(this.model, inputs)
    logits(this.model, inputs)
    assert "random:0.25, cache snapkv:16 on LlavaOnevision" in repr(handle)
    assert "attached, 2 calls seen" in repr(handle)
    handle.detach()
    assert "detached" in repr(handle)
    with pytest.raises(ModelError, match="was detached"), handle:
        pass


def test_nothing_to_attach_is_nothing() -> None:
    this, inputs = ask()
    before = state(this.model)
    with attach(this.model) as trace:
        assert state(this.model) == before
        logits(this.model, inputs)
    assert not trace.rows


def test_a_handle_that_saw_no_prompt_warns_when_collected() -> None:
    this, inputs = ask()
    with pytest.warns(UserWarning, match=r"'random:0\.25' on LlavaOne.*has seen no prompt"):
        with attach(this.model, "random:0.25"):
            pass
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = attach(this.model, "random:0.25")
        logits(this.model, inputs)
        handle.detach()
        del handle
        gc.collect()
        with pytest.raises(KeyError), attach(this.model, "random:0.25"):
            raise KeyError  # the caller has an error of his own


def test_a_handle_that_is_lost_leaves_the_model_attached_until_the_next() -> None:
    this, inputs = ask()
    stock, before = logits(this.model, inputs), state(this.model)
    with pytest.warns(UserWarning, match="stays attached: keep the handle"):
        attach(this.model, "random:0.25")
        gc.collect()
    assert logits(this.model, inputs).shape[1] < stock.shape[1]
    with attach(this.model, "random:0.5") as trace:
        with pytest.raises(ModelError, match=r"attached already, with 'random:0\.5'"):
            attach(this.model, "random:0.25")
        logits(this.model, inputs)
    assert [row.stage for row in trace.rows] == ["pre"]
    assert state(this.model) == before
    assert torch.equal(logits(this.model, inputs), stock)


def test_two_at_once_are_refused() -> None:
    this, inputs = ask()
    handle = attach(this.model, "random:0.25")
    with pytest.raises(ModelError, match=r"attached already, with 'random:0\.25'"):
        attach(this.model, "random:0.5")
    logits(this.model, inputs)
    handle.detach()


@pytest.mark.parametrize("part", ["model", "base"])
def test_copies_are_refused_while_attached(part: str) -> None:
    this = build("llava_onevision")
    inputs = this.inputs(["on {video} what?"], videos=this.videos(1))
    stock, model = logits(this.model, inputs), this.model
    held = model if part == "model" else model.base_model
    with attach(model, "random:0.25+fastv@llm2:0.5", cache="snapkv:16"):
        for way in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(ModelError, match="detach first"):
                way(torch.nn.ModuleList([held]))
        logits(model, inputs)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(logits(copy.deepcopy(model), inputs), stock)
    model.load_state_dict(weights)


def text_prompt(this: Any) -> Any:
    return this.processor.tokenizer("what is it?", return_tensors="pt")


@pytest.mark.parametrize("spec", ["random:0.5", "fastv@llm2:0.5", "tome@vit:0.5"])
def test_a_prompt_without_media_is_noted_once(spec: str) -> None:
    this, inputs = ask()
    with attach(this.model, spec) as trace:
        with pytest.warns(UserWarning, match="reduced nothing: the prompt has no image, video"):
            logits(this.model, text_prompt(this))
        logits(this.model, text_prompt(this))  # no second warning: warnings are errors here
        logits(this.model, inputs)
    assert len(trace.notes) == 1
    assert trace.to_dict()["notes"] == trace.notes and trace.notes[0] in str(trace)


def test_merged_embeddings_without_pixels_are_noted() -> None:
    this, inputs = ask()
    with attach(this.model, "random:0.5") as trace:
        embeds = this.model.get_input_embeddings()(inputs["input_ids"])
        with pytest.warns(UserWarning, match="inputs_embeds came without pixels"):
            logits(this.model, {"inputs_embeds": embeds})
    assert not trace.rows and trace.notes


def test_placeholders_without_pixels_are_noted() -> None:
    this, inputs = ask()
    with attach(this.model, "random:0.5"), pytest.warns(UserWarning, match="video placeholders"):
        logits(this.model, {"input_ids": inputs["input_ids"]})


@pytest.mark.parametrize("chunk", [None, 4])
def test_prompts_with_media_and_later_turns_are_not_noted(chunk: int | None) -> None:
    this, _ = ask()
    inputs = this.inputs(["a very long question in front of {video} what?"], videos=this.videos(1))
    with attach(this.model, "random:0.5") as trace:
        options = {} if chunk is None else {"prefill_chunk_size": chunk}
        out = this.model.generate(
            **inputs, **options, max_new_tokens=3, return_dict_in_generate=True, do_sample=False
        )
        more = text_prompt(this)["input_ids"]
        with torch.no_grad():
            this.model(input_ids=more, past_key_values=out.past_key_values)
    assert trace.rows and not trace.notes


def test_the_identity_notes_nothing() -> None:
    this, _ = ask()
    with attach(this.model, "random:1.0") as trace:
        logits(this.model, text_prompt(this))
    assert not trace.notes


def test_a_part_of_an_attached_model_is_not_attached_again() -> None:
    this, inputs = ask("qwen2_5_vl")
    text = this.model.get_decoder()
    with attach(this.model, "random:0.4"):
        short = logits(this.model, inputs)
        with pytest.raises(ModelError, match=r"a model around or inside this .*TextModel is att"):
            attach(text, cache="snapkv:0.5")
        assert torch.equal(logits(this.model, inputs), short)
    handle = attach(text, cache="snapkv:0.5")
    handle.trace.calls = 1  # nothing to be warned of
    with pytest.raises(ModelError, match=r"inside this .* attached already, with 'cache snapkv:0"):
        attach(this.model, "random:0.4")
    handle.detach()
    lost = attach(text, cache="snapkv:0.5")
    lost.trace.calls = 1
    del lost
    with attach(this.model, "random:0.4"):  # what was collected is detached first
        assert torch.equal(logits(this.model, inputs), short)


@pytest.mark.parametrize("name", ["layer 2", "attention", "text model", "vision tower", "block 1"])
def test_a_part_that_is_replaced_while_attached_is_refused(name: str) -> None:
    """Nothing would act in the new one, or only some of it."""
    this, other = build("qwen2_5_vl"), build("qwen2_5_vl", seed=1).model.model
    inputs = ask("qwen2_5_vl")[1]
    base, spec = this.model.model, "random:0.4+fastv@llm2:0.5"
    with attach(this.model, spec):
        logits(this.model, inputs)
        text, tower = base.language_model, base.visual
        if name == "layer 2":
            text.layers[2] = other.language_model.layers[2]
        elif name == "attention":
            text.layers[2].self_attn = other.language_model.layers[2].self_attn
        elif name == "text model":
            base.language_model = other.language_model
        elif name == "vision tower":
            base.visual = other.visual
        else:
            tower.blocks[1] = other.visual.blocks[1]
        with pytest.raises(ModelError, match=f"{name} of .* replaced after attach") as found:
            logits(this.model, inputs)
        assert "\n" not in str(found.value)
    with attach(this.model, spec):
        assert logits(this.model, inputs).shape[1] < inputs["input_ids"].shape[1]


def test_a_part_may_be_wrapped_or_left_out_while_attached() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    this, inputs = build("qwen2_5_vl"), ask("qwen2_5_vl")[1]
    layers = this.model.get_decoder().layers
    with attach(this.model, "fastv@llm2:0.5"):
        short = logits(this.model, inputs)
        layers[2] = checkpoint_wrapper(layers[2])
        assert torch.equal(logits(this.model, inputs), short)
        del layers[3]
        this.model.config.get_text_config().num_hidden_layers = 3
        less = logits(this.model, inputs)
        assert less.shape == short.shape and not torch.equal(less, short)


@pytest.mark.parametrize(
    "asked",
    [
        {"reduce": "divprune:0.6+fastv@llm2:0.5", "cache": "snapkv:0.5"},
        {"reduce": "visionzip:0.4"},
        {"cache": "quest:0.5"},
        {"decode": "lookup"},
        {"decode": "self:0.3"},
    ],
    ids=str,
)
def test_a_default_device_is_that_of_the_caller_alone(asked: Any) -> None:
    """Stock models run under any: what is made beside them must not lie there."""
    this, inputs = ask()
    with attach(this.model, **asked):
        want = generate(this, inputs, 4).sequences
    try:
        torch.set_default_device("meta")
        with attach(this.model, **asked):
            found = generate(this, inputs, 4).sequences
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, want)
