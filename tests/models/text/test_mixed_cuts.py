"""Text and media of one prompt cut together, against stock layers that hide what is dropped."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, generate, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3")
WINDOW = 8
# Per spec, tokens at the end of the prompt that stay.
CUTS = {
    "fastv@llm2:0.5?tokens=all": 1,
    "fastkv@llm2:0.4?tokens=all": WINDOW,
    "gemfilter:0.5?tokens=all&positions=original": 1,
    "fastv@llm1:0.5?tokens=text": 1,
    "random:0.5+slimfer@llm1:0.6?tokens=all&block=4+random@llm3:0.7": WINDOW,
}
Cuts = list[tuple[int, Tensor]]


def ask(this: Tiny) -> dict[str, Any]:
    if "video" in this.facts.kinds:
        media = {"images": this.images(1), "videos": this.videos(1)}
        return this.inputs(["a {image} b {video} c what is it?"], **media)
    return this.inputs(["a {image} b {image} c what is it?"], images=this.images(2))


def living(prompt: oracle.Prompt, spec: str, trace: Any) -> Cuts:
    """By layer the places alive from there on; a stage acts on what is alive."""
    length, last = len(prompt.embeds), CUTS[spec]
    media = torch.zeros(length, dtype=torch.bool)
    media[torch.cat(prompt.items)] = True
    fixed = getattr(prompt, "separators", torch.zeros(length, dtype=torch.bool))
    alive, found, count = torch.ones(length, dtype=torch.bool), [], len(prompt.items)
    whole = {site for site, number, _ in trace.reductions if number >= count}
    for site, number, reduction in trace.reductions:
        if site in whole and number < count:
            mine = prompt.items[number]  # what the cut of the whole prompt meant for this item
            before = [i for i in mine.tolist() if found[-2][1][i]] if len(found) > 1 else mine
            left = alive[mine].sum()
            assert reduction.n == len(before) and reduction.m == int(left)
            continue
        able = ~media if "tokens=text" in spec else torch.ones_like(media)
        places = alive & able & ~fixed
        places[length - last :] = False
        if number < count:
            places = torch.zeros_like(alive)
            places[prompt.items[number]] = True
            places &= alive
        where = places.nonzero()[:, 0]
        assert reduction.n == len(where), (site, number)
        alive = alive.clone()
        alive[where] = False
        alive[where[reduction.keep]] = True
        found.append((0 if site == "pre" else int(site[3:]), alive))
    return found


def masked(this: Tiny, prompt: oracle.Prompt, cuts: Cuts) -> Tensor:
    """Logits `[L, V]` of a pass in which the living do not notice the others."""
    text = this.model.get_decoder()
    kinds = getattr(text.config, "layer_types", None) or ["full_attention"] * len(text.layers)
    hidden = prompt.embeds
    for index, layer in enumerate(text.layers):
        alive = torch.ones(len(hidden), dtype=torch.bool)
        for start, mask in cuts:
            if start <= index:
                alive[: len(mask)] &= mask
        hidden = oracle.through(this, layer, kinds[index], hidden, prompt, alive)
        if index < len(prompt.planes):
            hidden = hidden + prompt.planes[index]
    return this.model.lm_head(text.norm(hidden))


def separated(this: Tiny, inputs: dict[str, Any], prompt: oracle.Prompt) -> oracle.Prompt:
    """The prompt with the places of its separators: placeholders that are no content."""
    ids = inputs["input_ids"][0]
    media = torch.zeros(len(ids), dtype=torch.bool)
    for kind in this.facts.kinds:
        media |= ids == getattr(this.model.config, f"{kind}_token_id", -1)
    media[torch.cat(prompt.items)] = False
    prompt.__dict__["separators"] = media
    return prompt


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", CUTS)
def test_text_and_media_go_together(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = ask(this)
    prompt = separated(this, inputs, oracle.embed(this, inputs))
    with attach(this.model, spec) as trace:
        logits = this.model(**inputs).logits[0]
        out = generate(this, inputs, 4)
    del trace.reductions[len(trace.reductions) // 2 :]  # of generate, the same
    cuts = living(prompt, spec, trace)
    alive = cuts[-1][1]
    # Gemma's logits reach 39, where one step of float32 is 4e-6.
    torch.testing.assert_close(logits, masked(this, prompt, cuts)[alive], atol=1e-5, rtol=1e-6)
    length = len(alive)
    whole = oracle.append(this, prompt, out.sequences[0, length:-1])
    steps = masked(this, whole, cuts)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), steps, atol=1e-4, rtol=0)
    gone, media = int((~alive).sum()), int((~alive)[torch.cat(prompt.items)].sum())
    assert gone > 0 and (media > 0) == ("tokens=all" in spec)
    if spec.startswith("fastv"):
        assert gone > media  # of text, too


@pytest.mark.parametrize("family", FAMILIES[:4])
def test_a_ragged_batch_equals_its_rows(family: str) -> None:
    this = tiny(family)
    images = this.images(2)
    texts = ["{image} what is it then?", "so {image}!"]
    spec = "fastkv@llm1:0.5?tokens=all+fastv@llm3:0.6?tokens=text"
    with attach(this.model, spec) as trace:
        together = generate(this, this.inputs(texts, images=images), 4)
        alone = [
            generate(this, this.inputs([text], images=[image]), 4)
            for text, image in zip(texts, images, strict=True)
        ]
    for row, one in enumerate(alone):
        logits = torch.stack([step[row] for step in together.logits])
        torch.testing.assert_close(logits, torch.cat(one.logits), atol=1e-4, rtol=0)
    assert {site for site, _, _ in trace.reductions} == {"llm1", "llm3"}


def test_heat_maps_show_what_is_left_of_an_image() -> None:
    this = tiny("qwen2_5_vl")
    inputs = this.inputs(["{image} what?"], images=this.images(1))
    with attach(this.model, "fastv@llm1:0.5?tokens=all") as trace:
        this.model(**inputs)
    kept = next(r for _, number, r in trace.reductions if number == 0)
    assert trace.heatmap(item=0).sum() == kept.m < kept.n


def test_a_chunk_is_refused_in_one_line() -> None:
    this = tiny("llava_onevision")
    with (
        attach(this.model, "fastv@llm2:0.5?tokens=all"),
        pytest.raises(ModelError, match="leave out prefill_chunk_size"),
    ):
        generate(this, ask(this), 2, prefill_chunk_size=16)
