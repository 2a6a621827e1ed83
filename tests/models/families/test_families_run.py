"""LLaVA, LLaVA-NeXT, InternVL and FastVLM: eager attention, clips in all modes, later turns."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, facts, generate, tiny
from transformers import DynamicCache

from mmfast.attach import attach

FAMILIES = ("llava", "llava_next", "internvl", "fast_vlm")
CASES = [(family, kind) for family in FAMILIES for kind in facts(family).kinds]
each = pytest.mark.parametrize(("family", "kind"), CASES)
PRUNE, INSIDE = "random:0.4", "random:0.6+fastv@llm2:0.5"


def batch(this: Tiny, kind: str) -> dict[str, Any]:
    """Three prompts of unequal length, the last one with two items."""
    texts = ["{} a", "tell me what is on {} then?", "{} and {}, same?"]
    texts = [text.replace("{}", f"{{{kind}}}") for text in texts]
    return this.inputs(texts, **this.media(kind, 4))


def run(this: Tiny, inputs: dict[str, Any], spec: str, **options: Any) -> Any:
    with attach(this.model, spec):
        return generate(this, inputs, 5, **options).sequences[:, -5:]


@pytest.mark.rest_is_slow(3)
@each
@pytest.mark.parametrize("spec", [PRUNE, INSIDE])
def test_eager_attention(family: str, kind: str, spec: str) -> None:
    this, other = tiny(family), tiny(family, attention="eager")
    inputs = batch(this, kind)
    assert torch.equal(run(other, inputs, spec), run(this, inputs, spec))


def test_clips_of_internvl_in_every_mode() -> None:
    """Frames of a clip stay one item where a prompt comes in chunks, or several times."""
    this = tiny("internvl")
    inputs = batch(this, "video")
    for spec in ("tome:7", INSIDE):
        expected = run(this, inputs, spec)
        assert torch.equal(run(this, inputs, spec, cache_implementation="static"), expected)
    text = ["on {video}, {image} what?"]
    inputs = this.inputs(text, videos=this.videos(1), images=this.images(1))
    expected = run(this, inputs, "tome:7")
    for options in ({"prefill_chunk_size": 11}, {"use_cache": False}):
        assert torch.equal(run(this, inputs, "tome:7", **options), expected)
    beams = run(this, inputs, "tome:7", num_beams=3)
    assert torch.equal(run(this, inputs, "tome:7", num_beams=3, use_cache=False), beams)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [PRUNE, INSIDE])
def test_a_later_turn_brings_an_image(family: str, spec: str) -> None:
    """The whole conversation and the new pixels; against all of it by hand."""
    this = tiny(family)
    images = this.images(2)
    first = this.inputs(["a {image}?"], images=images[:1])
    cache = DynamicCache(config=this.model.config.get_text_config())
    with attach(this.model, spec) as trace:
        out = generate(this, first, 3, past_key_values=cache)
        more = this.inputs([" and {image}?"], images=images[1:])
        ids = torch.cat([out.sequences, more["input_ids"]], 1)
        second = {**more, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        again = generate(this, second, 3, past_key_values=cache)
    whole = this.inputs(["a {image}? and {image}?"], images=images)
    prompt = oracle.embed(this, {**whole, "input_ids": ids, "attention_mask": ids >= 0})
    if spec == PRUNE:
        assert len(trace.reductions) == 2
        reductions = [(s, n, r) for n, (s, _, r) in enumerate(trace.reductions)]
        keep = oracle.kept_places(prompt, reductions)
        expected = oracle.removed(this, prompt, keep)[-1]
        torch.testing.assert_close(again.logits[0][0], expected, atol=1e-4, rtol=0)
    else:
        assert [r.n for _, _, r in trace.reductions][2] == len(prompt.items[1])


@each
def test_features_encoded_before(family: str, kind: str) -> None:
    """Features that were encoded outside `attach`: the tensors tell the layout, but for tiles."""
    this = tiny(family)
    inputs = this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1))
    output = oracle.encode(this, inputs, "image")
    rest = {k: v for k, v in inputs.items() if k not in this.facts.calls["image"]}
    given = {**rest, "mm_encoder_outputs": {"image": output}}
    whole = oracle.embed(this, inputs)
    with attach(this.model, "random:0.3") as trace:
        logits = this.model(**given).logits[0]
    if family == "internvl":  # one by one, but the same share
        tile = output.pooler_output.shape[1]
        places = whole.items[0].split(tile)
        assert len(trace.reductions) == len(places) > 1
        whole.items[:] = list(places)
    keep = oracle.kept_places(whole, trace.reductions)
    assert torch.equal(logits, oracle.removed(this, whole, keep))
