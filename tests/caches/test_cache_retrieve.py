"""Reading a part of the cache: equal to hiding the rest, and the part is the one it should be."""

from __future__ import annotations

from typing import Any

import cache_oracle
import model_oracle as oracle
import pytest
import torch
from cache_questions import frames, kinds_of, raw
from cache_runs import MORE, close, new, rows, run
from tiny_models import ALL_FAMILIES, FAMILIES, Tiny, generate, storing, tiny

from mmfast.attach import attach
from mmfast.core.errors import SpecError

SPECS = ("rekv:1", "resv:0.3?radius=3", "sink:2+window:9+retrieve:1", "rekv:1+quant:8?residual=4")


def ask(this: Tiny) -> dict[str, Any]:
    """A clip, or three pictures in a row."""
    if "video" in this.facts.kinds:
        return this.inputs(["on {video} what?"], videos=this.videos(1))
    return this.inputs(["on {image} {image} {image} what?"], images=this.images(3))


def read(cache: Any, index: int, n: int) -> torch.Tensor:
    """What a layer reads of the first `n` tokens in each KV head, `[Hkv, n]`."""
    layer = cache.layers[index]
    mine = layer.notes.get("read", layer.notes["kind"] >= 0)[0, 0, :n]
    return mine.expand(layer.keys.shape[1], -1)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("spec", SPECS[:3])
def test_decoding_equals_hiding_what_is_not_read(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    with attach(this.model, cache=spec) as trace:
        out = generate(this, inputs, 5)
    walk = cache_oracle.Walk(this, prompt)
    visible = {i: read(out.past_key_values, i, length) for i in walk.full}
    if spec == SPECS[0]:
        assert any(not seen.all() for seen in visible.values())
    logits = [walk.logits]
    logits += [walk.step(t, visible) for t in out.sequences[0, length:-1].tolist()]
    torch.testing.assert_close(torch.stack(logits), torch.cat(out.logits), atol=2e-5, rtol=0)
    mean = sum(int(seen[0].sum()) for seen in visible.values()) / len(visible)
    assert trace.rows[0].tokens_out == round(mean)
    layers = [out.past_key_values.layers[i] for i in walk.full]
    assert all(layer.keys.shape[2] == length + 4 for layer in layers)  # nothing leaves


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_sees_planted_faults(family: str) -> None:
    """Another frame, and an entry that is read one place off."""
    this = tiny(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    out = run(this, inputs, "rekv:1", tokens=3)
    visual = torch.zeros(length, dtype=torch.bool)
    visual[torch.cat(prompt.items)] = True
    for fault in (lambda seen: seen ^ visual, lambda seen: seen.roll(1, 1)):
        walk = cache_oracle.Walk(this, prompt)
        wrong = {i: fault(read(out.past_key_values, i, length)) for i in walk.full}
        logits = [walk.step(t, wrong) for t in out.sequences[0, length:-1].tolist()]
        assert (torch.stack(logits) - torch.cat(out.logits[1:])).abs().max() > 1e-3


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_all_blocks_are_the_whole_cache(family: str) -> None:
    this = tiny(family)
    inputs = ask(this)
    stock = generate(this, inputs, 4)
    for spec in ("rekv:99", "resv:1.0?limit=0", "window:9999+retrieve:1"):
        out = run(this, inputs, spec, tokens=4)
        assert torch.equal(torch.stack(out.logits), torch.stack(stock.logits)), spec


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3", "llava"])
def test_the_frames_of_the_largest_product_are_read(family: str) -> None:
    """ReKV by hand: mean query of the text behind the clip, mean key of each frame."""
    this = tiny(family)
    inputs = ask(this)
    prompt, length = oracle.embed(this, inputs), inputs["input_ids"].shape[1]
    out = run(this, inputs, "rekv:1", tokens=1)
    kinds, blocks = kinds_of(this, inputs, prompt), frames(this, inputs, prompt)
    last = max(i for i, kind in enumerate(kinds) if kind == 1)
    for index in cache_oracle.Walk(this, prompt).full:
        query, key = raw(this, inputs, index)
        mean = query[:, last + 1 :].mean(1).unflatten(0, (len(key), -1)).sum(1)  # [Hkv, d]
        score = [float((mean * key[:, block].mean(1)).sum()) for block in blocks]
        best = blocks[max(range(len(blocks)), key=score.__getitem__)].tolist()
        expected = [kind != 1 or i in best for i, kind in enumerate(kinds)]
        assert read(out.past_key_values, index, length)[0].tolist() == expected


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", SPECS)
def test_ragged_batches_beams_and_chunks(family: str, spec: str) -> None:
    this = storing(family, spec)
    batch = rows(this, [0, 1, 2])
    together = run(this, batch, spec, tokens=5)
    beams = new(run(this, batch, spec, tokens=4, num_beams=2), batch)
    for row in range(3):
        single = rows(this, [row])
        alone = run(this, single, spec, tokens=5)
        close(together, alone, row)
        assert torch.equal(
            beams[row], new(run(this, single, spec, tokens=4, num_beams=2), single)[0]
        )
        if row == 1 and family != "gemma3":
            close(run(this, single, spec, tokens=5, prefill_chunk_size=7), alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_question_reads_what_it_wants_itself(family: str) -> None:
    """Its tokens see the text and the frames that their own queries choose."""
    this = tiny(family)
    inputs = ask(this)
    length, more = inputs["input_ids"].shape[1], this.inputs([" and that thing?"])["input_ids"]
    walk = cache_oracle.Walk(this, oracle.embed(this, inputs))
    with attach(this.model, cache="rekv:1"):
        one = generate(this, inputs, 3)
        first = {i: read(one.past_key_values, i, length) for i in walk.full}
        ids = torch.cat([one.sequences, more], 1)
        two = generate(this, {"input_ids": ids}, 1, past_key_values=one.past_key_values)
    second = {i: read(two.past_key_values, i, length) for i in walk.full}
    for step, token in enumerate(ids[0, length:].tolist()):
        walk.step(token, first if step < 2 else second)
    torch.testing.assert_close(walk.logits, two.logits[0][0], atol=2e-5, rtol=0)


def test_what_does_not_go_together_is_refused() -> None:
    this = tiny("llava_onevision")
    with (
        pytest.raises(SpecError, match="would find again"),
        attach(this.model, cache="snapkv:9+rekv:2"),
    ):
        pass
