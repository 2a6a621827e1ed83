"""What every family promises, on every kind of media it takes."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import ALL_FAMILIES, Tiny, facts, generate, tiny

from mmfast.attach import attach

CASES = [(family, kind) for family in ALL_FAMILIES for kind in facts(family).kinds]
each = pytest.mark.parametrize(("family", "kind"), CASES)
PRUNE = "random:0.4"
INSIDE = "random:0.6+fastv@llm2:0.5"
DEEP = "random@llm2:0.4"  # the first layers are hooked by nothing
MERGE = "tome:0.4"


def prompt(this: Tiny, kind: str, text: str = "on {} what?", seed: int = 0) -> dict[str, Any]:
    return this.inputs([text.replace("{}", f"{{{kind}}}")], **this.media(kind, 1, seed))


@pytest.mark.rest_is_slow(3)
@each
def test_share_of_one_is_bit_identical(family: str, kind: str) -> None:
    this = tiny(family)
    inputs = prompt(this, kind)
    stock, tokens = this.model(**inputs).logits, generate(this, inputs, 6)
    with attach(this.model, "divprune:1.0+fastv@llm2:1.0"):
        assert torch.equal(this.model(**inputs).logits, stock)
        again = generate(this, inputs, 6)
    assert torch.equal(again.sequences, tokens.sequences)
    assert all(map(torch.equal, again.logits, tokens.logits))
    assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.rest_is_slow(3, 1)
@each
def test_pruning_equals_removal_by_hand(family: str, kind: str) -> None:
    this = tiny(family)
    inputs = prompt(this, kind)
    whole = oracle.embed(this, inputs)
    with attach(this.model, PRUNE) as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(whole, trace.reductions)
    assert len(keep) < len(whole.embeds)
    assert torch.equal(logits, oracle.removed(this, whole, keep))
    wrong = oracle.removed(this, whole, keep, contiguous=True)
    assert (logits - wrong).abs().max() > 1e-2


@pytest.mark.rest_is_slow(3)
@each
@pytest.mark.parametrize("spec", [INSIDE, MERGE])
def test_inside_and_merging_equal_the_oracle(family: str, kind: str, spec: str) -> None:
    this = tiny(family)
    with oracle.in_double(this):  # rounding of float32 differs between processors by 1e-5
        inputs = oracle.doubled(prompt(this, kind))
        whole = oracle.embed(this, inputs)
        with attach(this.model, spec) as trace:
            logits = this.model(**inputs).logits[0]
        keep = oracle.kept_places(whole, trace.reductions)
        assert len(logits) == len(keep) < len(whole.embeds)
        expected = oracle.masked(this, whole, trace.reductions)[keep]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.rest_is_slow(5)
@each
@pytest.mark.parametrize("spec", [PRUNE, INSIDE, DEEP])
def test_greedy_equals_a_recompute(family: str, kind: str, spec: str) -> None:
    this = tiny(family)
    inputs = prompt(this, kind)
    with attach(this.model, spec) as trace:
        out = generate(this, inputs, 10)
    length = inputs["input_ids"].shape[1]
    new = out.sequences[0, length:]
    whole = oracle.append(this, oracle.embed(this, inputs), new[:-1])
    logits = oracle.masked(this, whole, trace.reductions)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=0)
    logits[:, this.blocked()] = -torch.inf
    assert torch.equal(logits.argmax(-1), new)


@pytest.mark.rest_is_slow(5)
@each
@pytest.mark.parametrize("spec", [PRUNE, INSIDE])
def test_a_ragged_batch_equals_its_rows(family: str, kind: str, spec: str) -> None:
    this = tiny(family)
    texts = ["{} a", "tell me what is on {} then?", "{}{}, same?"]
    texts = [text.replace("{}", f"{{{kind}}}") for text in texts]
    media = this.media(kind, 4)
    ((name, items),) = media.items()
    batch = this.inputs(texts, **media)
    assert bool((batch["attention_mask"] == 0).any())
    with attach(this.model, spec):
        together = generate(this, batch, 5)
    parts = [items[:1], items[1:2], items[2:]]
    for row, (text, part) in enumerate(zip(texts, parts, strict=True)):
        inputs = this.inputs([text], **{name: part})
        with attach(this.model, spec):
            alone = generate(this, inputs, 5)
        new = alone.sequences[0, inputs["input_ids"].shape[1] :]
        assert torch.equal(together.sequences[row, batch["input_ids"].shape[1] :], new)
        got = torch.stack([step[row] for step in together.logits])
        torch.testing.assert_close(got, torch.cat(alone.logits), atol=1e-4, rtol=0)
