"""Pipelines on tiny models of every family, and calls that do not fit a model."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import ALL_FAMILIES, Tiny, facts, generate, tiny

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError

IMAGES_ONLY = [family for family in ALL_FAMILIES if "video" not in facts(family).kinds]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}{{ place[part['type']] }}"
    "{% endif %}{% endfor %}{% endfor %}\nAnswer:"
)


def qa(this: Tiny, task: str, **options: Any) -> Any:
    """A pipeline on a tiny model, whose processor gets a chat template."""
    processor = copy.copy(this.processor)
    places = {k: this.facts.placeholder(k) for k in this.facts.kinds if k != "audio"}
    processor.chat_template = "{% set place = " + repr(places) + " %}" + TEMPLATE
    model = (this.model, processor)
    return mmfast.pipeline(task, model=model, max_new_tokens=3, **options)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_image_qa(family: str) -> None:
    this = tiny(family)
    images = [this.images(1, i, size)[0] for i, size in enumerate([(24, 24), (40, 90)])]
    pipe = qa(this, "image-qa", reduce="random:0.5", batch_size=2)
    answers = pipe(images, ["what is it?"] * 2)
    assert len(answers) == 2
    for image, answer in zip(images, answers, strict=True):
        assert answer.kept_tokens == max(1, round(answer.visual_tokens * 0.5)) > 0
        alone = qa(this, "image-qa", reduce="random:0.5")(image, "what is it?")
        assert (alone.text, alone.visual_tokens) == (answer.text, answer.visual_tokens)


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("family", [f for f in ALL_FAMILIES if f not in IMAGES_ONLY])
def test_video_qa(family: str) -> None:
    this = tiny(family)
    clip = this.videos(1, frames=4)[0]
    pipe = qa(this, "video-qa", reduce="random:0.5", frames=4)
    answer = pipe(clip, "what moves?")
    assert answer.kept_tokens == max(1, round(answer.visual_tokens * 0.5)) > 0
    assert len(answer.trace.reductions) == 1  # a clip is one item, however it is encoded


@pytest.mark.parametrize("family", IMAGES_ONLY)
def test_video_qa_names_the_families_that_take_clips(family: str) -> None:
    with pytest.raises(ModelError, match=r"takes no video; .*internvl.*qwen2_5_vl") as error:
        qa(tiny(family), "video-qa")
    assert "\n" not in str(error.value)
    assert not set(IMAGES_ONLY) & set(re.findall(r"\w+", str(error.value)))


def _hooks(this: Tiny) -> list[int]:
    modules = list(this.model.modules())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return [*hooks, *(len([k for k in m.__dict__ if "_mmfast" in k]) for m in modules)]


@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
@pytest.mark.parametrize("family", ["llava", "llava_next", "internvl", "fast_vlm"])
def test_media_that_do_not_fit_the_prompt(family: str) -> None:
    """Stock errors stay what they are, one line, and leave nothing behind."""
    this = tiny(family)
    inputs = this.inputs(["on {image} what?"], images=this.images(1))
    stock, hooks = this.model(**inputs).logits, _hooks(this)
    token = this.model.config.image_token_id
    text = this.inputs(["no image at all"])
    none = {
        **inputs,
        "input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] == token, 65),
    }
    few = {**inputs, "input_ids": inputs["input_ids"].clone()}
    few["input_ids"][0, int((few["input_ids"][0] == token).nonzero()[3])] = 65
    for wrong in (none, few):
        for spec in ("random:0.5", "tome:0.5+fastv@llm2:0.5"):
            for call in (lambda w: this.model(**w), lambda w: generate(this, w, 2)):
                with pytest.raises(ValueError, match="image") as error, attach(this.model, spec):
                    call(wrong)
                assert "\n" not in str(error.value)
    assert torch.equal(this.model(**inputs).logits, stock)
    without = {k: v for k, v in inputs.items() if not k.startswith(("pixel", "image"))}
    for calm in (text, without):  # without media nothing is reduced
        expected = this.model(**calm).logits
        with attach(this.model, "divprune:0.5+fastv@llm2:0.5") as trace:
            assert torch.equal(this.model(**calm).logits, expected)
            generate(this, calm, 2)
        assert not trace.reductions
    assert torch.equal(this.model(**inputs).logits, stock)
    assert _hooks(this) == hooks


def test_no_image_is_an_error_of_the_pipeline() -> None:
    pipe = qa(tiny("llava"), "image-qa")
    for empty in ((), np.zeros((0, 4, 3), dtype=np.uint8)):
        with pytest.raises(ValueError, match=r"image|media") as error:
            pipe(empty, "what?")
        assert "\n" not in str(error.value)
