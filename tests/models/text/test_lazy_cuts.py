"""LazyLLM on text: several cuts, batches and beams, against dense passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_layers import run, weights_of
from text_zoo import padded, prompt, text_model, written
from tiny_models import generate, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError

LENGTH, STEPS = 40, 10


def dense(model: Any, ids: Tensor, start: int, cuts: dict[int, int]) -> tuple[Tensor, list[int]]:
    """Logits `[L, V]` by masks: a token enters each part of the layers at its step, or never.

    `cuts` are the tokens to keep by layer. Also returns how many came back at each cut.
    """
    text, length = model.get_decoder(), ids.shape[1]
    hidden = text.embed_tokens(ids)
    places = text.rotary_emb(hidden, torch.arange(length)[None])
    ranked = set(range(start - 1))  # the last token of the prompt stays
    # Per step, from the prompt on, who is there.
    there = [set(range(query + 1)) for query in range(start - 1, length)]
    mask, begin, came = torch.ones(length, length).tril().bool(), 0, []
    for layer, count in [*cuts.items(), (len(text.layers), 0)]:
        for index in range(begin, layer):
            weights = weights_of(text.layers[index], hidden, mask, places)
            hidden = run(text.layers[index], hidden, mask, places)
        begin = layer
        if not count:
            break
        mask, now, after, back = torch.eye(length).bool(), set[int](), [], 0
        for query, here in zip(range(start - 1, length), there, strict=True):
            able = sorted(ranked & here)
            order = weights[query][able].topk(min(count, len(able))).indices.tolist()
            new = {able[i] for i in order} - now
            new |= {query} if query >= start else {start - 1}
            back += len(new) - 1 if query >= start else 0
            now |= new
            for token in new:
                mask[token, [i for i in now if i <= token]] = True
            after.append(set(now))
        there = after
        came.append(back)
    return model.lm_head(text.norm(hidden[0])), came


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cuts", [{2: 9}, {1: 20, 2: 9}, {1: 26, 2: 17, 3: 8}])
def test_every_step_equals_a_dense_pass(attention: str, cuts: dict[int, int]) -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    spec = "+".join(f"lazyllm@llm{layer}:{n}?tokens=text" for layer, n in cuts.items())
    model.set_attn_implementation(attention)
    try:
        with attach(model, spec) as trace:
            new, logits, out = written(model, {"input_ids": ids}, STEPS)
        model.set_attn_implementation("eager")
        whole = torch.cat([ids, new[:, :-1]], 1)
        want, came = dense(model, whole, LENGTH, cuts)
    finally:
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits[0], want[LENGTH - 1 :].float(), atol=1e-5, rtol=0)
    back = sum(row.tokens_out for row in trace.rows if row.stage == "revive")
    assert back == sum(came) and all(came)
    held = [layer.keys.shape[2] for layer in out.past_key_values.layers]
    first = LENGTH + STEPS - 1
    want_held = [first] * min(cuts)
    for (layer, n), more in zip(cuts.items(), came, strict=True):
        end = next((k for k in cuts if k > layer), 4)
        want_held += [n + STEPS + more] * (end - layer)
    assert held == want_held
    assert {int(layer.get_seq_length()) for layer in out.past_key_values.layers} == {first}


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "qwen3_moe"])
def test_a_ragged_batch_equals_its_rows(name: str) -> None:
    model, prompts = text_model(name), [prompt(LENGTH), prompt(23, 1), prompt(31, 2)]
    spec = "lazyllm@llm1:0.5?tokens=text+lazyllm@llm3:0.2?tokens=text"
    with attach(model, spec) as trace:
        new, logits, _ = written(model, padded(prompts), 8)
        rows = [row.tokens_out for row in trace.rows if row.stage == "revive"]
        alone = [written(model, {"input_ids": ids}, 8) for ids in prompts]
    assert len(rows) > 4
    for row, (mine, own, _) in enumerate(alone):
        assert torch.equal(new[row], mine[0])
        torch.testing.assert_close(logits[row], own[0], atol=1e-5, rtol=0)
    total = sum(row.tokens_out for row in trace.rows if row.stage == "revive")
    assert total == 2 * sum(rows)  # each row calls back what it calls back alone


def test_media_of_a_batch_come_back_row_by_row() -> None:
    this = tiny("llava_onevision")
    images = this.images(2)
    texts = ["{image} what is it then?", "so {image}!"]
    with attach(this.model, "lazyllm@llm1:0.5+lazyllm@llm2:0.2"):
        together = generate(this, this.inputs(texts, images=images), 6)
        alone = [
            generate(this, this.inputs([text], images=[image]), 6)
            for text, image in zip(texts, images, strict=True)
        ]
    for row, one in enumerate(alone):
        logits = torch.stack([step[row] for step in together.logits])
        torch.testing.assert_close(logits, torch.cat(one.logits), atol=1e-4, rtol=0)


def test_beams_take_their_tokens_with_them() -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    with attach(model, "lazyllm@llm2:0.2?tokens=text"):
        out = model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
        free = model.generate(ids, max_new_tokens=6, num_beams=1, do_sample=False)
        scored = [
            written(model, {"input_ids": ids}, 6, num_beams=3, early_stopping=True)[0]
            for _ in range(2)
        ]
    assert out.shape == free.shape and torch.equal(scored[0], scored[1])
    # A cache that is reordered by hand goes on as the rows it was made of.
    prompts = [prompt(LENGTH), prompt(LENGTH, 1)]
    with attach(model, "lazyllm@llm2:0.2?tokens=text"):
        cache = model(torch.cat(prompts), use_cache=True).past_key_values
        step = torch.tensor([[5], [7]])
        model(step, past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        both = model(step, past_key_values=cache).logits[:, -1]
        for row, (one, old, new) in enumerate(((1, 7, 5), (0, 5, 7))):
            own = model(prompts[one], use_cache=True).past_key_values
            model(torch.tensor([[old]]), past_key_values=own)
            want = model(torch.tensor([[new]]), past_key_values=own).logits[0, -1]
            torch.testing.assert_close(both[row], want, atol=1e-5, rtol=0)


def test_what_it_does_not_serve() -> None:
    model, both = text_model("llama"), padded([prompt(30), prompt(20, 1)])
    with attach(model, "lazyllm@llm2:0.2?tokens=text"):
        cache = model(**both, use_cache=True).past_key_values
        mask = torch.cat([both["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], 1)
        with pytest.raises(ModelError, match="one row at a time"):
            model(prompt(6).expand(2, -1), attention_mask=mask, past_key_values=cache)
    spec = "lazyllm@llm1:0.5?tokens=text+fastv@llm2:0.5?tokens=text"
    with pytest.raises(SpecError, match="put 'lazyllm' last"):
        attach(model, spec)
    # The layer in front of a cut ranks all that came, which one with a window does not hold.
    for name, layer in (("gemma2", 2), ("gemma2", 3), ("mistral_window", 2)):
        with pytest.raises(ModelError, match="sliding_attention; use fastv"):
            attach(text_model(name), f"lazyllm@llm{layer}:0.5?tokens=text")
