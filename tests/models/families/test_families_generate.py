"""Every family in every mode of stock `generate`, with tokens removed before and inside the LLM."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_base import PIXELS
from tiny_models import ALL_FAMILIES, Tiny, facts, generate, tiny
from transformers import CompileConfig, StaticCache

from mmfast.attach import attach
from mmfast.models import encoder_names
from mmfast.models.cache_name import RELEASE
from mmfast.models.families.prompt_ids import prompt_ids

SPEC = "random:0.4+random@llm2:0.5"
EARLY = "random:0.4"
families = pytest.mark.parametrize("family", ALL_FAMILIES)

# Modes against plain greedy decoding. A chunk has no way to know what a later one will bring, so
# inside the LLM only budgets are kept under chunked prefill.
MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "static": (SPEC, {"cache_implementation": "static"}),
    "static inside": ("random@llm2:0.4", {"cache_implementation": "static"}),
    "chunked": (EARLY, {"prefill_chunk_size": 9}),
    "lookup": (SPEC, {"prompt_lookup_num_tokens": 3}),
    "without a cache": (SPEC, {"use_cache": False}),
}
# What the stock model cannot do; the test asks it first.
STOCK_CANNOT = {
    ("gemma3", "chunked"): "the part of an image that a chunk ends with does not see the rest",
    ("fast_vlm", "chunked"): "the encoder's output cannot be cut into chunks",
    ("smolvlm", "mixed"): "images and clips share one argument, and the processor gives one kind",
    ("qwen2_5_omni_thinker", "later"): "positions of a later turn start anew",
}


def run(this: Tiny, inputs: dict[str, Any], spec: str, **kwargs: Any) -> Any:
    with attach(this.model, spec):
        return generate(this, inputs, **{"tokens": 6, **kwargs})


def new(out: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return out.sequences[:, inputs["input_ids"].shape[1] :]


def close(a: Any, b: Any) -> None:
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=1e-4, rtol=0)


def differs(this: Tiny, inputs: dict[str, Any], mode: dict[str, Any]) -> bool:
    """Whether the stock model itself fails in a mode, or answers differently."""
    plain = generate(this, inputs, 6)
    try:
        other = generate(this, inputs, 6, **mode)
    except Exception:
        return True
    same = torch.equal(plain.sequences, other.sequences)
    return not same or not torch.allclose(
        torch.stack(plain.logits), torch.stack(other.logits), atol=1e-4
    )


def rows(this: Tiny) -> tuple[list[str], list[dict[str, list[Any]]]]:
    """Prompts with one item, none, several, and kinds mixed; and the media of each."""
    kinds = facts(this.family).kinds
    asked = [{"image": 1}, {}, {"image": 3}]
    if "video" in kinds:
        asked += [{"video": 1, "image": 1}]
    texts, media = [], []
    for number, counts in enumerate(asked):
        text = "".join(f"a {{{kind}}} " * n for kind, n in counts.items())
        texts.append(text + "what is here then?"[: 6 + 4 * number])
        media.append({})
        for kind, n in counts.items():
            media[-1] |= this.media(kind, n, seed=10 * number)
    return texts, media


@pytest.mark.rest_is_slow(5)
@families
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_equals_plain_decoding(family: str, mode: str) -> None:
    this = tiny(family)
    spec, options = MODES[mode]
    texts = ["a {image} or {image}?", "{image}"][: 1 if mode == "lookup" else 2]
    inputs = this.inputs(texts, images=this.images(1 + len(texts)))
    if mode == "chunked" and encoder_names._LOSES_MEDIA:
        pytest.skip("stock transformers loses media there before 5.23")
    cannot = differs(this, inputs, options)
    assert cannot == ((family, mode) in STOCK_CANNOT), "stock transformers changed"
    if not cannot:
        close(run(this, inputs, spec, **options), run(this, inputs, spec))


@pytest.mark.rest_is_slow(3)
@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
@families
def test_a_batch_of_mixed_prompts_equals_its_rows(family: str) -> None:
    this = tiny(family)
    texts, media = rows(this)
    if (family, "mixed") in STOCK_CANNOT:
        every = {name: items for each in media for name, items in each.items()}
        old = IndexError, "out of bounds"
        kind, words = old if RELEASE < (5, 18) else (ValueError, "do not match")
        with pytest.raises(kind, match=words):
            this.model(**this.inputs(["{image} {video}"], **{k: v[:1] for k, v in every.items()}))
        texts, media = texts[:-1], media[:-1]
    joined: dict[str, list[Any]] = {}
    for each in media:
        for name, items in each.items():
            joined[name] = joined.get(name, []) + items
    batch = this.inputs(texts, **joined)
    together = run(this, batch, SPEC, tokens=4)
    for row, (text, each) in enumerate(zip(texts, media, strict=True)):
        alone = run(this, single := this.inputs([text], **each), SPEC, tokens=4)
        assert torch.equal(new(together, batch)[row], new(alone, single)[0])
        got = torch.stack([step[row] for step in together.logits])
        torch.testing.assert_close(got, torch.cat(alone.logits), atol=1e-4, rtol=0)


@pytest.mark.rest_is_slow(3, 1)
@families
def test_beams_of_a_batch_equal_those_of_its_rows(family: str) -> None:
    this = tiny(family)
    texts, images = ["a {image} or {image}?", "{image}"], this.images(3)
    batch, beams = this.inputs(texts, images=images), {"num_beams": 3, "tokens": 4}
    together = new(run(this, batch, SPEC, **beams), batch)
    for row, part in enumerate((images[:2], images[2:])):
        single = this.inputs([texts[row]], images=part)
        assert torch.equal(together[row], new(run(this, single, SPEC, **beams), single)[0])
    bare = run(this, batch, EARLY, use_cache=False, **beams)
    assert torch.equal(new(bare, batch), new(run(this, batch, EARLY, **beams), batch))


@families
@pytest.mark.slow
def test_compiled_decoding_neither_breaks_nor_recompiles(family: str) -> None:
    from torch._dynamo.utils import counters

    this = tiny(family)
    inputs = this.inputs(["a {image}?", "{image}"], images=this.images(2))
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    static = {"cache_implementation": "static", "compile_config": config, "tokens": 8}
    torch._dynamo.reset()
    counters.clear()
    compiled = run(this, inputs, SPEC, **static)
    # One graph, as of the stock model; Gemma's windows take another way once they are full.
    assert counters["stats"]["unique_graphs"] == (2 if family == "gemma3" else 1)
    assert not counters["graph_break"]
    torch._dynamo.reset()
    close(compiled, run(this, inputs, SPEC, tokens=8))


@pytest.mark.rest_is_slow(3)
@families
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_second_image_in_a_later_turn(family: str, cache: str) -> None:
    """Equal to one pass over the whole conversation in which the same tokens are hidden."""
    this = tiny(family)
    close_to = {"atol": 1e-4, "rtol": 0}
    old = encoder_names._LOSES_MEDIA
    if cache == "dynamic" or old:  # the stock model first
        logits, expected = talk(this, None, cache)
        cannot = (family, "later") in STOCK_CANNOT
        other = family == "gemma3" or this.facts.rope
        if old and other and not torch.allclose(logits, expected, **close_to):
            pytest.skip("the stock model of this release reads a later turn in another way")
        assert torch.allclose(logits, expected, **close_to) != cannot, "stock transformers changed"
    if (family, "later") not in STOCK_CANNOT:
        logits, expected = talk(this, SPEC, cache)
        torch.testing.assert_close(logits, expected, **close_to)


def talk(this: Tiny, spec: str | None, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the second answer, and what they should be."""
    model = this.model
    parts = [
        this.inputs([text], images=this.images(1, seed))
        for text, seed in (("on {image} what?", 0), (" then {image} and?", 9))
    ]
    own = {} if cache == "dynamic" else {"past_key_values": StaticCache(model.config, 400)}
    with attach(model, spec) as trace:
        one = generate(this, parts[0], 4, **own)
        turn, past = len(trace.reductions), one.past_key_values
        whole = conversation(this, parts, one.sequences)
        given = {k: v for k, v in whole.items() if k not in PIXELS.values()}
        with prompt_ids(parts[1]["input_ids"]):  # whose tiles they are
            features = {"image": oracle.encode(this, parts[1], "image")}
        two = generate(this, given, 4, past_key_values=past, mm_encoder_outputs=features)
    second = [(site, number + 1, r) for site, number, r in trace.reductions[turn:]]
    answer = two.sequences[0, whole["input_ids"].shape[1] :]
    prompt = oracle.append(this, joined(this, parts, whole), answer[:-1])
    logits = oracle.masked(this, prompt, trace.reductions[:turn] + second)
    return torch.cat(two.logits), logits[whole["input_ids"].shape[1] - 1 :]


def conversation(this: Tiny, parts: list[dict[str, Any]], sequence: torch.Tensor) -> dict[str, Any]:
    """Inputs of both turns: all ids, types and grids."""
    first, second = parts
    whole = {"input_ids": torch.cat([sequence, second["input_ids"]], 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    answer = sequence.shape[1] - first["input_ids"].shape[1]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in first:
            gap = torch.zeros(1, answer, dtype=first[name].dtype)
            whole[name] = torch.cat([first[name], gap, second[name]], 1)
    for name in set(facts(this.family).rope) & set(first) - set(whole):
        whole[name] = torch.cat([first[name], second[name]])
    return whole


def joined(this: Tiny, parts: list[dict[str, Any]], whole: dict[str, Any]) -> oracle.Prompt:
    """The conversation with the features of both images put in their places by hand."""
    first, second = (oracle.embed(this, part) for part in parts)
    length, start = whole["input_ids"].shape[1], whole["input_ids"].shape[1] - len(second.embeds)
    answer = whole["input_ids"][0, len(first.embeds) : start]
    between = this.model.get_input_embeddings()(answer)
    embeds = torch.cat([first.embeds, between, second.embeds])
    planes = [torch.zeros(length, embeds.shape[1]) for _ in first.planes]
    for plane, early, late in zip(planes, first.planes, second.planes, strict=True):
        plane[: len(early)], plane[start:] = early, late
    items = first.items + [places + start for places in second.items]
    return oracle.Prompt(embeds, oracle.positions_of(this, whole), items, planes)


OMNI = "qwen2_5_omni_thinker"
# Sound is encoded inside the forward pass, so beams repeat it there; rows of SmolVLM's pixels are
# clips, not prompts.
CASES = [(OMNI, "audio"), ("qwen2_vl", "image"), ("idefics3", "image"), ("smolvlm", "video")]
BOTH = "divprune:0.4+fastv@llm2:0.5"


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize(
    "options", [{"num_beams": 2, "num_return_sequences": 2}, {"cache_implementation": "static"}]
)
def test_a_batch_equals_its_rows(family: str, kind: str, options: dict[str, Any]) -> None:
    this = tiny(family)
    texts = [f"on {{{kind}}} what?", f"{{{kind}}}{{{kind}}} and?"]
    media = this.media(kind, 3)
    ((name, items),) = media.items()
    batch = this.inputs(texts, **media)
    with attach(this.model, BOTH):
        together = generate(this, batch, 3, **options)
    count = options.get("num_return_sequences", 1)
    for row, (text, part) in enumerate(zip(texts, (items[:1], items[1:]), strict=True)):
        inputs = this.inputs([text], **{name: part})
        with attach(this.model, BOTH) as trace:
            alone = generate(this, inputs, 3, **options)
        assert trace.reductions
        mine = together.sequences[row * count : (row + 1) * count, batch["input_ids"].shape[1] :]
        assert torch.equal(mine, alone.sequences[:, inputs["input_ids"].shape[1] :])
