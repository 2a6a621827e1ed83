"""A small model that writes alone while it is sure, beside a loop without caches (BiLD)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_models import tiny as text_model
from tiny_models import Tiny, build, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.decoding.speculation import plan_decode
from mmfast.models.decoder import speculation

LENGTH = 8


def _words(ids: list[int]) -> dict[str, Any]:
    return {"input_ids": torch.tensor([ids])}


@pytest.mark.parametrize(("fallback", "rollback", "most"), [(0.0, 3.3, 4), (0.2, 4.0, 8)])
def test_tokens_are_those_of_a_loop_without_caches_for_text(
    fallback: float, rollback: float, most: int, tmp_path: Path
) -> None:
    large, little = text_model("llama", num_hidden_layers=3), text_model("llama", seed=4, scale=9.0)
    little.save_pretrained(tmp_path)
    spec = f"bild:{tmp_path}?fallback={fallback}&rollback={rollback}&most={most}"
    sums = [0, 0]
    for inputs in (_words([3, 4, 5, 9]), _words([7, 2, 8, 1])):
        want = _slowly(little, large, inputs, fallback, rollback, most)
        with attach(large, decode=spec) as trace:
            found = large.generate(**inputs, max_new_tokens=LENGTH, do_sample=False)
        assert found[0, 4:].tolist() == want
        (row,) = [row for row in trace.rows if row.stage == "draft"]
        sums = [sums[0] + row.tokens_in, sums[1] + row.tokens_out]
    assert sums[0] >= sums[1] > 0 and (fallback or sums[0] > sums[1])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model that says nearly the same, and its folder."""
    home, near = tmp_path_factory.mktemp("small"), build("llava_onevision")
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in near.model.parameters():
            weight += 0.15 * weight.std() * torch.randn_like(weight)
    near.model.save_pretrained(home)
    return near.model, home


def _asked(this: Tiny) -> dict[str, Any]:
    return this.inputs(["on {video} what?"], **this.media("video", 1, 0))


def _behind(model: Any, inputs: dict[str, Any], said: list[int]) -> torch.Tensor:
    ids = torch.cat([inputs["input_ids"], torch.tensor([said], dtype=torch.long)], 1)
    with torch.no_grad():
        given = {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        logits = model(**given).logits[0]
    return logits[inputs["input_ids"].shape[1] - 1 :].softmax(-1)


def _slowly(
    small: Any, large: Any, inputs: dict[str, Any], fallback: float, rollback: float, most: int
) -> list[int]:
    """Hand-over and taking back as the paper tells them, every step on the whole text."""
    said = [int(_behind(large, inputs, [])[-1].argmax())]
    while len(said) < LENGTH:
        mine = list(said)
        while len(mine) - len(said) < min(most, LENGTH - len(said) - 1):
            p = _behind(small, inputs, mine)[-1]
            if float(p.max()) < fallback:
                break
            mine.append(int(p.argmax()))
        p = _behind(large, inputs, mine)
        for place in range(len(said), len(mine)):
            if -math.log(float(p[place, mine[place]])) > rollback:
                mine = mine[:place]
                break
        said = [*mine, int(p[len(mine)].argmax())]
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fallback", "rollback", "most"),
    [(0.0, 4.4, 4), (0.03, 4.6, 8)],
)
def test_tokens_are_those_of_a_loop_without_caches(
    fallback: float, rollback: float, most: int, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, (small, home) = tiny("llava_onevision"), pair
    inputs = _asked(this)
    want = _slowly(small, this.model, inputs, fallback, rollback, most)
    spec = f"bild:{home}?fallback={fallback}&rollback={rollback}&most={most}"
    start = inputs["input_ids"].shape[1]
    with attach(this.model, decode=spec) as trace:
        found = generate(this, inputs, LENGTH).sequences[0, start:].tolist()
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    assert found == want and row.tokens_out and (fallback or row.tokens_out < row.tokens_in)
    # A rule that takes back what is likely must show.
    stock = speculation.accept_close
    monkeypatch.setattr(
        speculation, "accept_close", lambda d, logits, most, n: stock(d, -logits, most, n)
    )
    with attach(this.model, decode=spec):
        assert generate(this, inputs, LENGTH).sequences[0, start:].tolist() != want


@pytest.mark.slow
def test_a_strict_rollback_leaves_the_words_of_the_model(pair: Any) -> None:
    this, (_, home) = tiny("llava_onevision"), pair
    inputs = this.inputs(["a {video} b", "{video} c?"], **this.media("video", 2, 0))
    want = generate(this, inputs, LENGTH).sequences
    with attach(this.model, decode=f"bild:{home}?fallback=0&rollback=0.69"):
        assert torch.equal(generate(this, inputs, LENGTH).sequences, want)
    with attach(this.model, decode=f"bild:{home}?fallback=0&rollback=99"):
        assert not torch.equal(generate(this, inputs, LENGTH).sequences, want)
        with pytest.raises(ModelError, match="likeliest tokens of both"):
            this.model.generate(**inputs, max_new_tokens=2, do_sample=True)


def test_its_spec_has_knobs_of_its_own() -> None:
    plan = plan_decode("bild:small?fallback=0.5&rollback=2&most=9")
    assert plan is not None and (plan.least, plan.rollback, plan.most) == (0.5, 2.0, 9)
    assert not plan.adapt and plan.runs_model and plan_decode("draft:small").rollback is None
    plan = plan_decode("bild:small")
    assert plan is not None and (plan.least, plan.rollback, plan.most) == (0.6, 3.0, 16)
    for text, words in (
        ("bild", "names no model"),
        ("bild:x?least=0.3", "unknown knob"),
        ("bild:x?fallback=2", "no probability"),
        ("bild:x?rollback=-1", "below 0"),
    ):
        with pytest.raises(SpecError, match=words):
            plan_decode(text)
