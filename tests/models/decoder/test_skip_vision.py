"""Skip-Vision: tokens pass feed-forward layers by, and their keys leave behind the prompt."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from dense_layers import additive, run, weights_of
from tiny_models import FAMILIES, Tiny, build, generate, mixed_prompt, tiny, video_prompt
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.bypass import Bypass
from mmfast.models.reduction.training import CHECKPOINTING

SPEC = "skip_vision@llm2:0.25"


def dense(
    eager: Tiny,
    prompt: oracle.Prompt,
    start: int,
    layer: int,
    counts: list[int],
    kept: list[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Logits `[L, V]` of one pass, and what is kept of each item: a plain loop over the layers.

    Tokens from `start` on came behind the prompt and do not see what skipped, from `layer` on.
    """
    text = eager.model.get_decoder()
    hidden, length = prompt.embeds[None], len(prompt.embeds)
    at = prompt.positions
    places = text.rotary_emb(hidden, at[None] if at.ndim == 1 else at[:, None])
    mask = torch.ones(length, length).tril().bool()
    skip = torch.zeros(length, dtype=torch.bool)
    for index, one in enumerate(text.layers):
        if index < layer:
            weights = weights_of(one, hidden, mask, places)
            hidden = run(one, hidden, mask, places)
        else:
            if index == layer:
                if kept is None:
                    kept = []
                    for item, count in zip(prompt.items, counts, strict=True):
                        score = weights[item][:, item].mean(0)
                        score[-1] = 2
                        kept.append(score.topk(count).indices.sort().values)
                for item, keep in zip(prompt.items, kept, strict=True):
                    skip[item] = True
                    skip[item[keep]] = False
                mask = mask.clone()
                mask[start:, skip] = False
            normed = one.input_layernorm(hidden)
            told = one.self_attn(normed, attention_mask=additive(mask), position_embeddings=places)[
                0
            ]
            hidden = hidden + told
            for place in range(length):
                if not skip[place]:
                    token = hidden[:, place : place + 1]
                    changed = one.mlp(one.post_attention_layernorm(token))
                    hidden = torch.cat(
                        [hidden[:, :place], token + changed, hidden[:, place + 1 :]], 1
                    )
        if index < len(prompt.planes):
            hidden = hidden + prompt.planes[index]
    assert kept is not None
    return eager.model.lm_head(text.norm(hidden[0])), kept


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["video", "mixed"])
def test_every_step_equals_a_loop_over_layers(family: str, kind: str) -> None:
    this, eager = tiny(family), tiny(family, "eager")
    inputs = {"video": video_prompt, "mixed": mixed_prompt}[kind](this)
    with attach(this.model, SPEC) as trace:
        out = generate(this, inputs, 6)
    start = inputs["input_ids"].shape[1]
    whole = oracle.append(this, oracle.embed(this, inputs), out.sequences[0, start:-1])
    counts = [round(0.25 * len(item)) for item in whole.items]
    logits, kept = dense(eager, whole, start, 2, counts)
    torch.testing.assert_close(torch.cat(out.logits), logits[start - 1 :], atol=1e-4, rtol=0)
    assert [r.keep.tolist() for _, _, r in trace.reductions] == [k.tolist() for k in kept]
    gone = sum(len(item) for item in whole.items) - sum(counts)
    layers = out.past_key_values.layers
    assert [layer.keys.shape[2] for layer in layers] == [start + 5] * 2 + [start + 5 - gone] * 2
    assert [int(layer.get_seq_length()) for layer in layers] == [start + 5] * 4
    stock = generate(this, inputs, 6)
    assert not torch.allclose(stock.logits[0], out.logits[0], atol=1e-3)


@pytest.mark.parametrize("fault", ["all run", "none leave"])
def test_the_loop_sees_a_fault(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    with attach(this.model, SPEC):
        right = torch.cat(generate(this, inputs, 4).logits)
        if fault == "all run":
            monkeypatch.setattr(Bypass, "_some", lambda s, i, stock, x: stock(x))
        else:
            monkeypatch.setattr(Bypass, "close", lambda s, cache, step, last: None)
        wrong = torch.cat(generate(this, inputs, 4).logits)
    same = 0 if fault == "all run" else 1  # the prompt itself is read as before
    assert torch.allclose(right[:same], wrong[:same], atol=1e-5)
    assert not torch.allclose(right[same:], wrong[same:], atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_ragged_batch_are_those_of_one_by_one(family: str) -> None:
    this = tiny(family)
    prompts = ["{video} and what is that?", "a {image} b {image} c?", "none"]
    whole = this.inputs(prompts, images=this.images(2), videos=this.videos(1))
    images, videos = this.images(2), this.videos(1)
    single: list[dict[str, Any]] = [{"videos": videos}, {"images": images}]
    with attach(this.model, SPEC):
        both = torch.stack(generate(this, whole, 4).logits)
        for row, media in enumerate(single):
            one = torch.stack(generate(this, this.inputs([prompts[row]], **media), 4).logits)
            torch.testing.assert_close(both[:, row], one[:, 0], atol=1e-4, rtol=0)
    stock = torch.stack(generate(this, this.inputs(prompts[2:]), 4).logits)
    torch.testing.assert_close(both[:, 2], stock[:, 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_a_prompt_in_chunks_loses_its_keys_at_its_end(family: str) -> None:
    this, eager = tiny(family), tiny(family, "eager")
    inputs = video_prompt(this)
    with attach(this.model, SPEC) as trace:
        out = generate(this, inputs, 4, prefill_chunk_size=16)
    start = inputs["input_ids"].shape[1]
    whole = oracle.append(this, oracle.embed(this, inputs), out.sequences[0, start:-1])
    parts = [r for _, _, r in trace.reductions]
    assert len(parts) > 1 and sum(r.m for r in parts) == round(0.25 * len(whole.items[0]))
    ends = torch.tensor([0, *(r.n for r in parts)]).cumsum(0)
    kept = torch.cat([r.keep + end for r, end in zip(parts, ends[:-1], strict=True)])
    logits, _ = dense(eager, whole, start, 2, [], [kept])
    torch.testing.assert_close(torch.cat(out.logits), logits[start - 1 :], atol=1e-4, rtol=0)


def test_a_later_turn_goes_on_without_what_skipped() -> None:
    this, eager = tiny("llava_onevision"), tiny("llava_onevision", "eager")
    inputs = video_prompt(this)
    more = this.inputs([" and now?"])["input_ids"]
    start = inputs["input_ids"].shape[1]
    with attach(this.model, SPEC):
        one = generate(this, inputs, 3)
        ids = torch.cat([one.sequences, more], 1)
        two = generate(this, {"input_ids": ids}, 4, past_key_values=one.past_key_values)
    whole = oracle.append(this, oracle.embed(this, inputs), two.sequences[0, start:-1])
    logits, _ = dense(eager, whole, start, 2, [round(0.25 * len(whole.items[0]))])
    torch.testing.assert_close(torch.cat(two.logits), logits[ids.shape[1] - 1 :], atol=1e-4, rtol=0)


def test_stages_before_and_behind_it() -> None:
    this = tiny("qwen2_5_vl")
    inputs = video_prompt(this)
    n = len(oracle.embed(this, inputs).items[0])
    with attach(this.model, "evs:0.5+skip_vision@llm1:0.5+fastv@llm3:0.5") as trace:
        out = generate(this, inputs, 4)
    assert [row.stage for row in trace.rows[:3]] == ["pre", "llm1", "llm3"]
    half, skipping = round(0.5 * n), round(0.5 * n) - round(0.5 * round(0.5 * n))
    held = [layer.keys.shape[2] for layer in out.past_key_values.layers]
    assert held[0] - held[1] == skipping and held[1] == held[2]
    assert held[0] == inputs["input_ids"].shape[1] + 3 - (n - half) and held[3] < held[0]
    stock = generate(this, inputs, 4)
    with attach(this.model, "skip_vision@llm2:1.0"):
        same = generate(this, inputs, 4)
    assert torch.equal(torch.cat(stock.logits), torch.cat(same.logits))
    assert "forward" not in this.model.get_decoder().layers[2].mlp.__dict__


@torch.enable_grad()
def test_a_model_learns_under_it() -> None:
    this = build("llava_onevision")
    this.model.requires_grad_(True)
    inputs = video_prompt(this)
    labels = inputs["input_ids"].clone()
    labels[:, :-4] = -100
    optimiser = torch.optim.Adam(this.model.get_decoder().parameters(), lr=3e-3)
    losses = []
    with attach(this.model.train(), SPEC):
        for _ in range(6):
            loss = this.model(**inputs, labels=labels).loss
            losses.append(float(loss.detach()))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        getattr(this.model, f"{CHECKPOINTING}_enable")()
        with pytest.raises(ModelError, match=f"{CHECKPOINTING}_disable"):
            this.model(**inputs, labels=labels)
    assert losses[-1] < 0.7 * losses[0]


def test_what_it_cannot_stand_beside_is_refused_in_one_line() -> None:
    this = tiny("llava_onevision")
    for spec, more, text in (
        (SPEC, {"cache": "snapkv:0.5"}, "drops keys when the prompt ends"),
        (SPEC, {"decode": "self:0.1"}, "drops visual keys"),
        (f"fastv@llm2:0.5+{SPEC}", {}, "alone at its layer"),
        (f"{SPEC}+skip_vision@llm3:0.5", {}, "one stage lets tokens skip"),
    ):
        with pytest.raises(SpecError, match=text) as caught:
            attach(this.model, spec, **more)
        assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="needs full attention"):
        attach(tiny("gemma3").model, SPEC)
    with (
        attach(this.model, SPEC),
        pytest.raises(ModelError, match="cannot lose entries"),
    ):
        generate(this, video_prompt(this), 2, cache_implementation="static")
