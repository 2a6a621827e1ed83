"""Relatives where they meet the server, drafts, stores of prompts and streams."""

from __future__ import annotations

import copy
from contextlib import closing

import numpy as np
import pytest
import torch
from scheduling import answers, ask, clip, image, model_of, stock
from tiny_models import RELATIVES, facts, generate, tiny

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.serve.engine.scheduler import Scheduler

families = pytest.mark.parametrize("family", RELATIVES)
SIZE = (48, 48)
SPECS: tuple[tuple[str | None, str | None], ...] = (
    (None, None), ("divprune:0.5", None), (None, "snapkv:16"), ("fastv@llm1:0.5", None),
)  # fmt: skip


@pytest.mark.rest_is_slow(3)
@families
def test_the_server_answers_as_attach_does_or_refuses_to_start(family: str) -> None:
    pair = model_of(family)
    kind = pair[0].config.model_type
    if not adapter_for(pair[0]).apart:
        with pytest.raises(ModelError, match=f"text and media of a prompt apart.*'{kind}'"):
            Scheduler(pair)
        return
    requests = [ask("text", "a b c hello", tokens=7)]
    for number, (reduce, cache) in enumerate(SPECS):
        if reduce and "fastv" in reduce and "qwen3_5" in kind:  # whose first layer is a recurrence
            reduce = "fastv@llm2:0.5"
        media, more = image(number, SIZE), {"reduce": reduce, "cache": cache}
        requests.append(ask(f"{number}", media, "what? and?", tokens=7, **more))
    if "video" in facts(family).kinds:
        requests.append(ask("clip", clip(1, size=SIZE), "what?", tokens=7))
    expected = []
    for request in requests:
        with attach(pair[0], request.options.reduce, request.options.cache):
            expected.append(stock(pair, request))
    with closing(Scheduler(pair, chunk=48, memory="200MB")) as engine:
        assert [text for text, _ in answers(engine, requests)] == expected


@pytest.mark.rest_is_slow(3, 1)
@families
def test_drafts_change_no_token(family: str) -> None:
    this = tiny(family)
    (kind, *_) = this.facts.kinds
    inputs = this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1, 0))
    want = generate(this, inputs, 10, repetition_penalty=1.3)
    for spec in ("self:0.5", "recycle?adapt=false"):
        try:
            with attach(this.model, decode=spec) as trace:
                found = generate(this, inputs, 10, repetition_penalty=1.3)
        except MmfastError as error:
            assert "\n" not in str(error)
            continue
        assert torch.equal(found.sequences, want.sequences), spec
        assert [row for row in trace.rows if row.stage == "draft"]


@pytest.mark.rest_is_slow(3, 2)
@families
def test_steps_by_hand_stand_where_generate_has_them(family: str) -> None:
    this = tiny(family)
    (kind, *_) = this.facts.kinds
    inputs = this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1, 0))
    with attach(this.model, "random:0.4"), torch.no_grad():
        want = generate(this, inputs, 4)
        out = this.model(**inputs, use_cache=True)
        for step, logits in enumerate(want.logits):
            torch.testing.assert_close(out.logits[:, -1], logits, atol=1e-4, rtol=0)
            token = want.sequences[:, inputs["input_ids"].shape[1] + step, None]
            out = this.model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)


@pytest.mark.rest_is_slow(3)
@families
def test_what_is_kept_of_prompts_changes_no_answer(family: str) -> None:
    pair = model_of(family)
    pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    questions = ("what is it?", "what is it? and why?")
    plain = mmfast.pipeline("image-qa", model=copy.copy(pair), max_new_tokens=6)
    want = [plain(pixels, question).text for question in questions]
    for mode in ("encoder", "prefix"):
        try:
            pipe = mmfast.pipeline("image-qa", model=copy.copy(pair), max_new_tokens=6, reuse=mode)
            assert [pipe(pixels, question).text for question in questions] == want, mode
        except MmfastError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("family", RELATIVES)
def test_streams_name_the_families_that_watch_and_the_other_way(family: str) -> None:
    this = tiny(family)
    told = "that do: .*qwen3_vl; use .*'" + ("video" if "video" in this.facts.kinds else "image")
    with pytest.raises(ModelError, match=told) as error:
        mmfast.pipeline("video-stream", (this.model, this.processor))
    assert "\n" not in str(error.value) and "gemma4," not in str(error.value)
