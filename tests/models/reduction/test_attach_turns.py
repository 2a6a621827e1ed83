"""Later turns of a conversation: a second video, text after somebody else's turn."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from attach_turns import second_turn
from tiny_models import FAMILIES, Tiny, generate, tiny, video_prompt
from transformers import DynamicCache, StaticCache

from mmfast.attach import attach
from mmfast.models import encoder_names
from mmfast.models.cache_name import CACHE

SPEC = "random:0.4+fastv@llm2:0.5"


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("style", ["features", "positions"])
@pytest.mark.parametrize(
    "spec", ["random:0.4", "fastv@llm2:0.5", "tome:0.4+random@llm2:0.5", "pyramiddrop:0.4"]
)
def test_a_second_video_in_a_later_turn(family: str, style: str, spec: str) -> None:
    """Equal to one pass over the whole conversation in which the same tokens are hidden."""
    this, model = tiny(family), tiny(family).model
    if style == "features" and this.facts.rope and encoder_names._LOSES_MEDIA:
        pytest.skip("before 5.23 stock generate gives a later turn other positions there")
    first = this.inputs(["on {video} what?"], videos=this.videos(1))
    with attach(model, spec) as trace:
        one = generate(this, first, 5)
        cache, turn = one.past_key_values, len(trace.reductions)
        whole, part = second_turn(this, first, one.sequences, seed=9)
        positions = oracle.positions_of(this, whole)
        if style == "features":  # all ids and grids, features of the new video only
            given = {k: v for k, v in whole.items() if k != "pixel_values_videos"}
            given["mm_encoder_outputs"] = {"video": oracle.encode(this, part, "video")}
            if family == "llava_onevision":
                given.pop("mm_token_type_ids", None)
        else:  # the last token is not in the cache yet: feed it again with the new ones
            ids = torch.cat([one.sequences[:, -1:], part["input_ids"]], 1)
            now = positions[..., -ids.shape[1] :]
            text = torch.arange(len(whole["input_ids"][0]))[-ids.shape[1] :]
            given = {k: v for k, v in part.items() if k not in ("attention_mask",)}
            given |= {"input_ids": ids, "attention_mask": whole["attention_mask"]}
            given["position_ids"] = (
                now[None] if now.ndim == 1 else torch.cat([text[None], now])[:, None]
            )
            given.pop("mm_token_type_ids", None)
        two = generate(this, given, 5, past_key_values=cache)
    prompt = oracle.embed(this, whole)
    second = [(site, number + 1, r) for site, number, r in trace.reductions[turn:]]
    new = two.sequences[0, given["input_ids"].shape[1] :]
    reductions = [*trace.reductions[:turn], *second]
    logits = oracle.masked(this, oracle.append(this, prompt, new[:-1]), reductions)
    expected = logits[whole["input_ids"].shape[1] - 1 :]
    torch.testing.assert_close(torch.cat(two.logits), expected, atol=1e-4, rtol=0)
    length = whole["input_ids"].shape[1] + 4
    assert all(int(layer.get_seq_length()) == length for layer in cache.layers)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_text_turns_after_another_conversation_keep_their_positions(family: str) -> None:
    """Stock models would give the first conversation the second one's M-RoPE offset."""
    this = tiny(family)
    asks = [this.inputs(["{video}?"], videos=this.videos(1, frames=n)) for n in (8, 2)]
    more = this.inputs([" and now?"])["input_ids"]

    def turn(out: Any) -> Any:
        ids = torch.cat([out.sequences, more], 1)
        return generate(this, {"input_ids": ids}, 4, past_key_values=out.past_key_values)

    with attach(this.model, "random:0.5"):
        alone = turn(generate(this, asks[0], 4)).sequences
        first = generate(this, asks[0], 4)
        turn(generate(this, asks[1], 4))
        mixed = turn(first).sequences
    assert torch.equal(mixed, alone)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_padded_batch_takes_a_second_video(family: str, attention: str) -> None:
    """Both turns of a ragged batch equal the turns of single rows."""
    this = tiny(family, attention)
    videos, seconds = this.videos(2), this.videos(2, 40)
    prompts, follow = ["{video} a", "what is {video} then?"], [" and {video}?", " {video}"]

    def talk(rows: list[int]) -> Any:
        first = this.inputs([prompts[r] for r in rows], videos=[videos[r] for r in rows])
        with attach(this.model, SPEC):
            out = generate(this, first, 3)
            part = this.inputs([follow[r] for r in rows], videos=[seconds[r] for r in rows])
            ids = torch.cat([out.sequences[:, -1:], part["input_ids"]], 1)
            old = torch.nn.functional.pad(first["attention_mask"], (0, 3), value=1)
            mask = torch.cat([old, part["attention_mask"]], 1)
            positions = _positions(this, first, part, mask)
            given = {k: v for k, v in part.items() if k != "mm_token_type_ids"}
            given |= {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
            return generate(this, given, 4, past_key_values=out.past_key_values)

    together = talk([0, 1])
    for row in (0, 1):
        alone = talk([row])
        assert torch.equal(together.sequences[row, -4:], alone.sequences[0, -4:])
        a = torch.stack([step[row] for step in together.logits])
        b = torch.stack([step[0] for step in alone.logits])
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def _positions(this: Tiny, first: Any, part: Any, mask: Any) -> torch.Tensor:
    """Positions of the last answer token and the new turn, row by row, by hand."""
    length = part["input_ids"].shape[1] + 1
    text = (mask.cumsum(-1) - 1).clamp_min(0)[:, -length:]
    if this.family == "llava_onevision":
        return text
    base = this.model.model

    def rope(inputs: Any) -> Any:
        names = ("video_grid_thw", "mm_token_type_ids", "attention_mask", "second_per_grid_ts")
        return base.get_rope_index(
            inputs["input_ids"], **{k: inputs[k] for k in names if k in inputs}
        )

    before, after = rope(first)[0], rope(part)[0]
    start = before.amax((0, 2)) + 3  # three answer tokens; the last is fed again
    fed = (start).expand(3, -1)[..., None]
    new = after + start[None, :, None] + 1
    new = new.masked_fill(part["attention_mask"][None] == 0, 0)
    return torch.cat([text[None], torch.cat([fed, new], -1)])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_takes_a_second_video(family: str) -> None:
    this = tiny(family)
    first = this.inputs(["on {video} what?"], videos=this.videos(1))
    answers = []
    for cache in (None, StaticCache(this.model.config, 500)):
        with attach(this.model, SPEC):
            out = generate(this, first, 4, **({} if cache is None else {"past_key_values": cache}))
            whole, part = second_turn(this, first, out.sequences, seed=3)
            given = {k: v for k, v in whole.items() if k != "pixel_values_videos"}
            given["mm_encoder_outputs"] = {"video": oracle.encode(this, part, "video")}
            answers.append(generate(this, given, 4, past_key_values=out.past_key_values))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    first, second = (torch.stack(answer.logits) for answer in answers)
    torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def test_a_turn_under_attention_sums_follows_one_under_another_policy() -> None:
    """A policy that reads everything and evicts nothing leaves the next turn as a stock one does.

    Its notes lack the sums that h2o reads; those begin with the prompt of the second turn.
    """
    this = tiny("llava_onevision")
    found = []
    for first in (None, "retrieve:99"):
        cache = DynamicCache(config=this.model.config)
        with attach(this.model, cache=first):
            told = generate(this, video_prompt(this), 4, **{CACHE: cache}).sequences
        ids = torch.cat([told, this.inputs([" and what?"])["input_ids"]], 1)
        with attach(this.model, cache="h2o:0.5") as trace:
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            out = generate(this, inputs, 4, **{CACHE: cache})
        found.append((out.sequences, trace.rows[-1].tokens_in, trace.rows[-1].tokens_out))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert found[1][2] < found[1][1]
