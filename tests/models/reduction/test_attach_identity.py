"""Keep share 1.0 leaves a model bit-identical: logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch
from tiny_models import FAMILIES, generate, tiny

from mmfast.attach import attach

PROMPTS = ["{video} a", "what is {video} then?", "{video}", "a rather long question on {video}!"]
STAGES = ("random:1.0", "fastv@llm2:1.0", "divprune:1.0+random@llm1:1.0+fastv@llm3:1.0")


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("spec", STAGES)
def test_identity(family: str, batch: int, spec: str) -> None:
    this = tiny(family)
    inputs = this.inputs(PROMPTS[:batch], videos=this.videos(batch))
    assert bool((inputs["attention_mask"] == 0).any()) == (batch > 1)
    with torch.no_grad():
        stock, tokens = this.model(**inputs).logits, generate(this, inputs)
        with attach(this.model, spec):
            assert torch.equal(this.model(**inputs).logits, stock)
            again = generate(this, inputs)
    assert torch.equal(again.sequences, tokens.sequences)
    assert all(map(torch.equal, again.logits, tokens.logits))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 4])
def test_identity_of_equal_lengths_and_eager(family: str, batch: int) -> None:
    this = tiny(family, "eager")
    inputs = this.inputs(["{image} a?"] * batch, images=this.images(batch))
    with torch.no_grad():
        stock = this.model(**inputs).logits
        with attach(this.model, "divprune:1.0+fastv@llm2:1.0"):
            assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_count_of_all_tokens_is_the_identity_too(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{video} a"], videos=this.videos(1))
    with attach(this.model, "random:0.5") as trace:
        generate(this, inputs, 1)
    n = trace.rows[0].tokens_in
    with torch.no_grad():
        stock = this.model(**inputs).logits
        with attach(this.model, f"random:{n}") as trace:
            assert torch.equal(this.model(**inputs).logits, stock)
    assert [(row.stage, row.tokens_in, row.tokens_out) for row in trace.rows] == [("pre", n, n)]
    assert trace.reductions == []


@pytest.mark.parametrize("family", FAMILIES)
def test_text_only_prompts_just_run(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["no media here", "nor here"])
    stock = generate(this, inputs)
    with attach(this.model, "random:0.25+fastv@llm2:0.5") as trace:
        with pytest.warns(UserWarning, match="reduced nothing: the prompt has no image"):
            found = generate(this, inputs).sequences
        assert torch.equal(found, stock.sequences)
    assert trace.rows == [] and trace.reductions == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_generated_placeholder_is_text(family: str) -> None:
    this = tiny(family)
    model, inputs = this.model, this.inputs(["{video} a"], videos=this.videos(1))
    placeholder = torch.tensor([[model.config.video_token_id]])
    with torch.no_grad(), attach(model, "random:0.5+fastv@llm2:0.5") as trace:
        out = generate(this, inputs, 2)
        seen = len(trace.reductions)
        cache, length = out.past_key_values, out.past_key_values.get_seq_length()
        position = torch.full((4, 1, 1), 500) if family != "llava_onevision" else None
        more = {"position_ids": position} if position is not None else {}
        model(input_ids=placeholder, past_key_values=cache, **more)
    assert len(trace.reductions) == seen
    assert cache.get_seq_length() == length + 1
