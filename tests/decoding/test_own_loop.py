"""A caller's own loop of decode steps under `decode=`, which drafts nothing: it says so, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from text_zoo import prompt, text_model
from tiny_models import generate, tiny

from mmfast.attach import attach
from mmfast.models.cache_name import CACHE, returned_cache

SAID = r"drafted nothing in a loop of single tokens.*call that, or leave out decode="


def steps(model: Any, ids: Any, count: int, **media: Any) -> None:
    out = model(input_ids=ids, use_cache=True, **media)
    for _ in range(count):
        new = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=new, use_cache=True, **{CACHE: returned_cache(out)})


@pytest.mark.parametrize("decode", ["recycle", "lookup"])
def test_a_loop_of_single_tokens_is_warned_of_once(decode: str) -> None:
    model = text_model("llama")
    with attach(model, decode=decode) as trace:
        with pytest.warns(UserWarning, match=SAID) as told:
            steps(model, prompt(8), 4)
        steps(model, prompt(8), 4)  # pytest turns a second warning into an error
    assert len(told) == 1
    assert [note for note in trace.notes if "loop of single tokens" in note] == [
        str(told[0].message)
    ]


def test_a_loop_around_a_model_of_pictures_is_warned_of_too() -> None:
    this = tiny("qwen2_5_vl")
    inputs = this.inputs(["on {image} what?"], **this.media("image", 1, 0))
    with attach(this.model, decode="recycle"), pytest.warns(UserWarning, match=SAID):
        steps(this.model, inputs.pop("input_ids"), 2, **inputs)


def test_generate_and_scores_of_one_token_are_no_loop() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["on {image} what?"], **this.media("image", 1, 0))
    model, ids = text_model("llama"), prompt(8)
    with attach(this.model, decode="recycle") as trace:
        generate(this, inputs, 6)
    assert not [note for note in trace.notes if "loop" in note]
    with attach(model, decode="recycle") as trace:
        for _ in range(3):  # each scores one token behind a prompt
            steps(model, ids, 1)
            model.generate(ids, max_new_tokens=4, do_sample=False)
    assert not trace.notes


def test_a_compiled_loop_is_warned_of_too() -> None:
    model = text_model("llama")
    with attach(model, decode="recycle"), pytest.warns(UserWarning, match=SAID):
        steps(torch.compile(model, backend="eager"), prompt(8), 4)


def test_a_cache_of_old_releases_is_refused_as_by_the_stock_model() -> None:
    model, ids, told = text_model("llama"), prompt(8), list[str]()
    for decode in ("none", "recycle"):
        with attach(model, decode=decode), pytest.raises(Exception, match=r".") as error:
            model(input_ids=ids[:, :1], use_cache=True, **{CACHE: ((ids, ids),)})
        told.append(f"{type(error.value).__name__}: {error.value}")
    assert told[0] == told[1]
