"""Calls of users of transformers that a shortened prompt serves rightly, or refuses in one line."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from attach_runs import logits_close
from text_zoo import prompt, text_model
from tiny_models import Tiny, build, generate, tiny, video_prompt
from torch import Tensor

import mmfast
from mmfast.core.errors import ModelError

CUT = "random:0.4"
BOTH = f"{CUT}+fastv@llm2:0.5"
TEXT_CUT = "fastv@llm2:0.5?tokens=all"


def refused(match: str) -> Any:
    """An error of one line."""
    return pytest.raises(ModelError, match=rf"\A[^\n]*{match}[^\n]*\Z")


def ask(family: str) -> tuple[Tiny, dict[str, Any]]:
    this = tiny(family)
    if "video" in this.facts.kinds:
        return this, video_prompt(this)
    return this, this.inputs(["on {image} what?"], images=this.images(1))


def logits(model: Any, inputs: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**{**inputs, **more}).logits
    return found


@pytest.mark.parametrize("options", [{"cache": "snapkv:8"}, {"reduce": TEXT_CUT}, {"attn": "sdpa"}])
def test_continuous_batching_is_refused(options: dict[str, str]) -> None:
    """Its loop logs errors of the model and returns answers without a token."""
    model, before = text_model("llama"), dict(text_model("llama").__dict__)
    with mmfast.attach(model, **options) as trace:
        trace.calls = 1  # nothing to be warned of
        for ask_for in (
            lambda: model.generate_batch([[1, 2, 3]]),
            lambda: model.init_continuous_batching(),
        ):
            with refused(r"does not act in generate_batch"):
                ask_for()
    assert dict(model.__dict__).keys() == before.keys()


@pytest.mark.parametrize("record", ["export", "strict", "trace"])
def test_what_records_one_choice_for_all_is_refused(record: str) -> None:
    this, inputs = ask("llava_onevision")
    fixed = {k: v for k, v in inputs.items() if k != "input_ids"} | {"use_cache": False}

    def run(ids: Tensor) -> Any:
        return this.model(input_ids=ids, return_dict=False, **fixed)[0]

    with mmfast.attach(this.model, BOTH), torch.no_grad():
        with refused("would keep the choice of tokens of one prompt"):
            if record == "trace":
                torch.jit.trace(run, (inputs["input_ids"],), check_trace=False)
            else:
                given = {**fixed, "input_ids": inputs["input_ids"]}
                torch.export.export(this.model, (), kwargs=given, strict=record == "strict")
        short = logits(this.model, inputs)
    assert short.shape[1] < inputs["input_ids"].shape[1]


def square(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


@pytest.mark.parametrize("family", ["llava_onevision", "gemma3"])
@pytest.mark.parametrize("options", [{"reduce": BOTH}, {"cache": "snapkv:8"}], ids=str)
def test_a_mask_of_the_callers_own_is_refused(family: str, options: dict[str, str]) -> None:
    """The mask of the tokens that are left would show what it hides."""
    this, inputs = ask(family)
    length = inputs["input_ids"].shape[1]
    parted, asked = square(length), square(length)
    parted[..., 20:, 2:4] = False  # hidden from later tokens
    asked[..., -1, 2] = False  # and from the last one alone
    shifts = torch.zeros(parted.shape).masked_fill(~parted, torch.finfo(torch.float32).min)
    with mmfast.attach(this.model, **options):
        for mask in (parted, asked, shifts, {"full_attention": parted}):
            if isinstance(mask, dict) and family == "gemma3":
                mask |= {"sliding_attention": parted}
            with refused("hides more than padding"):
                logits(this.model, inputs, attention_mask=mask)
    with mmfast.attach(this.model, "random:1.0"):  # nothing goes: stock
        found = logits(this.model, inputs, attention_mask=parted)
    assert torch.equal(found, logits(this.model, inputs, attention_mask=parted))


@pytest.mark.parametrize("family", ["llava_onevision", "gemma3"])
def test_a_mask_that_stock_code_makes_serves(family: str) -> None:
    this, inputs = ask(family)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with mmfast.attach(this.model, BOTH):
        whole = logits(this.model, inputs)
        if family == "llava_onevision":  # pictures of Gemma 3 see forward
            found = logits(this.model, inputs, attention_mask=square(ids.shape[1]))
            assert torch.equal(found, whole)
        options = {"max_new_tokens": 3, "do_sample": False}
        steps = this.model.generate(**inputs, **options)
        static = this.model.generate(**inputs, **options, cache_implementation="static")
    assert torch.equal(static, steps) and bool(mask.all())


def test_chunks_of_a_static_cache_see_forward_as_others_do() -> None:
    """`generate` makes their masks itself, and a cut makes them anew."""
    this = tiny("paligemma")
    inputs = this.inputs(["on {image} what?"], images=this.images(1))
    with mmfast.attach(this.model, CUT):
        dynamic, static = (
            generate(this, inputs, 2, prefill_chunk_size=9, **more)
            for more in ({}, {"cache_implementation": "static"})
        )
    logits_close(dynamic, static)


def test_packed_sequences_are_refused() -> None:
    """Stock code parts them by positions where there is neither mask nor cache."""
    this, inputs = ask("llava_onevision")
    length = inputs["input_ids"].shape[1]
    positions = torch.cat([torch.arange(3), torch.arange(length - 3)])[None]
    packed = {"attention_mask": None, "position_ids": positions, "use_cache": False}
    stock = logits(this.model, inputs, **packed)
    alone = {**inputs, "input_ids": inputs["input_ids"][:, 3:], "attention_mask": None}
    rest = logits(this.model, alone, use_cache=False)
    torch.testing.assert_close(stock[:, 3:], rest, atol=1e-5, rtol=0)  # they do not meet
    with mmfast.attach(this.model, BOTH), refused("parts packed sequences"):
        logits(this.model, inputs, **packed)
    with mmfast.attach(this.model, CUT):
        plain = logits(this.model, inputs)
        counted = {"attention_mask": None, "position_ids": torch.arange(length)[None]}
        assert torch.equal(logits(this.model, inputs, **counted, use_cache=False), plain)


def classifier() -> tuple[Tiny, Any]:
    """A classifier of prompts with pictures, and a model whose head is the same."""
    from transformers import Gemma3ForSequenceClassification

    this = build("gemma3")
    this.model.config.num_labels = 3
    torch.manual_seed(0)
    model = Gemma3ForSequenceClassification(this.model.config).eval()
    model.model = this.model.model
    this.model.lm_head = model.score
    return this, model


def test_a_classifier_reads_the_last_token_that_is_left() -> None:
    """Stock code looks for it at its place in the whole prompt."""
    this, model = classifier()
    prompts, images = ["on {image} what?", "a {image}", "so what of {image} then?"], this.images(3)
    together = this.inputs(prompts, images=images)
    with mmfast.attach(model, CUT):
        found = logits(model, together)
        loss = model(**together, labels=torch.tensor([0, 1, 2])).loss
    expected = torch.nn.functional.cross_entropy(found, torch.tensor([0, 1, 2]))
    torch.testing.assert_close(loss, expected)
    pad = model.config.get_text_config().pad_token_id
    for row, (text, image) in enumerate(zip(prompts, images, strict=True)):
        inputs = this.inputs([text], images=[image])
        right = {k: torch.nn.functional.pad(v, (0, 5)) for k, v in inputs.items() if v.ndim == 2}
        right["input_ids"][:, -5:] = pad
        with mmfast.attach(model, CUT) as trace:
            one = logits(model, inputs)
            padded = logits(model, {**inputs, **right})
        whole = oracle.embed(this, inputs)
        keep = oracle.kept_places(whole, trace.reductions[:1])
        assert len(keep) < len(whole.embeds)
        by_hand = oracle.removed(this, whole, keep)[-1]
        for each in (one[0], padded[0], found[row]):
            torch.testing.assert_close(each, by_hand, atol=1e-6, rtol=1e-5)
    stock = logits(model, inputs)
    with mmfast.attach(model, "random:1.0"):
        assert torch.equal(logits(model, inputs), stock)


def text_head(kind: str) -> Any:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 64}
    config = transformers.LlamaConfig(num_attention_heads=4, num_labels=3, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    return getattr(transformers, f"LlamaFor{kind}")(config).eval()


def test_a_classifier_of_text_reads_the_last_token_that_is_left() -> None:
    model, ids = text_head("SequenceClassification"), torch.arange(1, 41)[None]
    with torch.no_grad():
        with mmfast.attach(model, TEXT_CUT):
            found = model(ids).logits
        with mmfast.attach(model.model, TEXT_CUT):
            states = model.model(ids).last_hidden_state
        torch.testing.assert_close(found, model.score(states[:, -1]))
    assert states.shape[1] < ids.shape[1]


@pytest.mark.parametrize("kind", ["TokenClassification", "QuestionAnswering"])
def test_heads_that_answer_by_place_are_refused(kind: str) -> None:
    model, ids = text_head(kind), torch.arange(1, 41)[None]
    with torch.no_grad():
        stock = model(ids)[0]
        with refused(f"LlamaFor{kind} answers at places of the whole prompt"):
            mmfast.attach(model, TEXT_CUT)
        with mmfast.attach(model, cache="snapkv:12"):
            assert torch.equal(model(ids)[0], stock)


@pytest.mark.parametrize(
    "options",
    [{"reduce": "fastv@llm2:0.5"}, {"reduce": "visionzip:0.5"}, {"cache": "snapkv:8"}],
    ids=str,
)
def test_heads_of_one_process_choose_nothing(options: dict[str, str]) -> None:
    """Each process of tensor parallelism would keep other tokens, and they would wait or mix."""
    this = build("llava_onevision")
    this.model._tp_size = 2
    with refused(r"each of 2 tensor-parallel processes has its own heads"):
        mmfast.attach(this.model, **options)
    inputs = video_prompt(this)
    for able in ({"reduce": "divprune:0.5"}, {"cache": "sink:2+window:8"}):
        with mmfast.attach(this.model, **able) as trace:
            this.model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert trace.rows


@pytest.mark.parametrize("where", ["argument", "config"])
@pytest.mark.parametrize("options", [{"cache": "snapkv:6"}, {"reduce": TEXT_CUT}], ids=str)
def test_a_negative_prompt_is_refused(
    options: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was thinned in the middle of the answer, when it had become as long as the prompt."""
    model, given = text_model("llama"), {"guidance_scale": 1.5, "max_new_tokens": 2}
    if where == "config":
        monkeypatch.setattr(model.generation_config, "guidance_scale", given.pop("guidance_scale"))
    with mmfast.attach(model, **options) as trace:
        trace.calls = 1  # nothing to be warned of
        with refused("guidance_scale=1.5 reads a second prompt"):
            model.generate(prompt(20), negative_prompt_ids=prompt(15, 1), **given)


def test_guidance_beside_media_that_are_reduced_is_stock() -> None:
    this, inputs = ask("llava_onevision")
    options = {"guidance_scale": 1.5, "max_new_tokens": 4, "do_sample": False}
    stock = this.model.generate(**inputs, **options)
    with mmfast.attach(this.model, "random:1.0"):
        assert torch.equal(this.model.generate(**inputs, **options), stock)
    with mmfast.attach(this.model, CUT) as trace:
        this.model.generate(**inputs, **options)
    assert [row.stage for row in trace.rows] == ["pre"] and not trace.notes


def test_media_that_a_caller_merges_himself_are_noted() -> None:
    """He has encoded them while attached, and the prompt comes without."""
    this, inputs = ask("llava_onevision")
    embeds = this.model.get_input_embeddings()(inputs["input_ids"])
    with mmfast.attach(this.model, CUT) as trace, torch.no_grad():
        this.model.base_model.get_video_features(inputs["pixel_values_videos"])
        with pytest.warns(UserWarning, match="inputs_embeds came without pixels"):
            this.model(inputs_embeds=embeds)
    assert trace.notes and not trace.rows
