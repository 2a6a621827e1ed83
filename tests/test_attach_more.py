"""Corners: several media and beams, text rows in a visual batch, copied caches, compiled decode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_attach_generate import PROMPTS, SPEC, logits_close, new, one, run
from test_attach_sessions import second_turn
from tiny_models import FAMILIES, Tiny, build, generate, tiny
from transformers import CompileConfig, StaticCache

from mmfast.attach import attach


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 13])
def test_several_media_per_row_with_beams(family: str, chunk: int | None) -> None:
    this = tiny(family)
    images = [*this.images(2), *this.images(2, 5, (30, 44))]
    videos, options = this.videos(2), {"num_beams": 2, "tokens": 4}
    prompts = ["{image} a {video} {image}?", "on {image} {image} and {video}"]
    inputs = this.inputs(prompts, images=images, videos=videos)
    options |= {"prefill_chunk_size": chunk} if chunk else {}
    spec = "tome:0.4" if chunk else "tome:0.4+fastv@llm2:0.5"
    together = new(run(this, inputs, spec, **options), inputs)
    for row, prompt in enumerate(prompts):
        media = {"images": images[2 * row : 2 * row + 2], "videos": videos[row : row + 1]}
        single = this.inputs([prompt], **media)
        assert torch.equal(together[row], new(run(this, single, spec, **options), single)[0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_without_media_in_a_visual_batch(family: str, attention: str) -> None:
    this = tiny(family, attention)
    inputs = this.inputs(["{video}?", "only text here"], videos=this.videos(1))
    together = new(run(this, inputs), inputs)
    visual = this.inputs(["{video}?"], videos=this.videos(1))
    text = this.inputs(["only text here"])
    assert torch.equal(together[0], new(run(this, visual), visual)[0])
    assert torch.equal(together[1], new(run(this, text), text)[0])


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
            features = this.model.model.get_video_features
            names = ("pixel_values_videos", "video_grid_thw")
            call = {k: part[k] for k in names if k in part}
            given["mm_encoder_outputs"] = {"video": features(**call, return_dict=True)}
            answers.append(generate(this, given, 4, past_key_values=out.past_key_values))
    assert torch.equal(answers[0].sequences, answers[1].sequences)
    logits_close(*answers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", SPEC])
def test_a_copied_cache_branches(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = one(this)
    with attach(this.model, spec):
        first = generate(this, inputs, 2)
        branch = copy.deepcopy(first.past_key_values)
        given = {"input_ids": first.sequences}
        a = generate(this, given, 4, past_key_values=first.past_key_values)
        b = generate(this, given, 4, past_key_values=branch)
    assert torch.equal(a.sequences, b.sequences)
    logits_close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_leaving(family: str) -> None:
    """A cache reduced before the LLM needs no hook any more."""
    this = tiny(family)
    inputs = one(this)
    with attach(this.model, "random:0.4"):
        whole = generate(this, inputs, 8)
        first = generate(this, inputs, 4)
    given = {"input_ids": first.sequences}
    rest = generate(this, given, 4, past_key_values=first.past_key_values)
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_attach_continues_an_old_cache(family: str) -> None:
    this = tiny(family, "eager")
    inputs = one(this)
    with attach(this.model, SPEC):
        whole = generate(this, inputs, 8)
        first = generate(this, inputs, 4)
    with attach(this.model, "tome:0.5+random@llm1:0.5"):
        given = {"input_ids": first.sequences}
        rest = generate(this, given, 4, past_key_values=first.past_key_values)
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_cache(family: str) -> None:
    this = tiny(family)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    out = run(this, one(this), "random:0.4", tokens=4, **options)
    exact = run(this, one(this), "random:0.4", tokens=4)
    assert torch.stack(out.logits).shape == torch.stack(exact.logits).shape
    torch.testing.assert_close(out.logits[0], exact.logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_several_answers(family: str) -> None:
    this = tiny(family)
    options = {"do_sample": True, "num_return_sequences": 3, "tokens": 5}
    answers = []
    for cache in (True, False):
        torch.manual_seed(5)
        answers.append(run(this, one(this), "random:0.4", use_cache=cache, **options).sequences)
    assert len(answers[0]) == 3
    assert torch.equal(*answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_decode_is_one_graph(family: str, batch: int) -> None:
    from torch._dynamo.utils import counters

    this = build(family)
    inputs = this.inputs(PROMPTS[:batch], videos=this.videos(batch))
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    eager = run(this, inputs)
    compiled = run(this, inputs, cache_implementation="static", compile_config=config)
    assert torch.equal(compiled.sequences, eager.sequences)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_a_compiled_prefill_is_reduced_too() -> None:
    this = build("llava_onevision")
    inputs = one(this)
    torch._dynamo.reset()
    with attach(this.model, SPEC):
        expected = this.model(**inputs).logits
        assert torch.equal(torch.compile(this.model, backend="eager")(**inputs).logits, expected)
