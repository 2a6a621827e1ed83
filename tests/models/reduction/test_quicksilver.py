"""QuickSilver inside models: a loop over the stock layers in which nothing is ever removed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import model_oracle as oracle
import oracles
import pytest
import torch
from oracle_base import Item
from text_zoo import padded, prompt, text_model, written
from tiny_models import Tiny, generate, tiny
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction import choice
from mmfast.models.reduction.step import HaltedTokens

LENGTH = 40
TEXTS = ("llama", "gemma3", "qwen3", "gpt_oss", "qwen3_moe")
FAMILIES = ("llava_onevision", "qwen2_vl", "qwen3_vl", "gemma3", "qwen2_5_vl", "internvl")
# Random layers change and tell apart much: thresholds within their reach.
KNOBS = [
    "0.5?fuse=0.0",
    "0.4?fuse=0.9&start=0.6",
    "?drift=1.0&fuse=0.0",
    "?drift=0.7&fuse=0.9&start=0.5",
]
Groups = list[Tensor]  # places of the tokens that are ranked together


def some_slow(names: Any, quick: int) -> list[Any]:
    return [*names[:quick], *(pytest.param(name, marks=pytest.mark.slow) for name in names[quick:])]


def spec_of(knobs: str, tokens: str) -> str:
    return f"quicksilver{':' * (knobs[0] != '?')}{knobs}&tokens={tokens}"


def of_text(model: Any, ids: Tensor) -> tuple[Any, oracle.Prompt]:
    """A model of text and its prompt, in the form of those with media."""
    embeds = model.get_input_embeddings()(ids[0])
    facts = SimpleNamespace(blocks=False)
    made = oracle.Prompt(embeds, torch.arange(len(embeds)), [])
    return SimpleNamespace(model=model, facts=facts), made


def dense(this: Any, given: oracle.Prompt, groups: Groups, spec: str) -> tuple[Tensor, list[int]]:
    """Logits `[L, V]` by masks alone, and how many tokens run in each layer.

    Halted and fused tokens stay in the sequence, hidden from all, and behind every layer they are
    put back to what they were; at the end a fused one gets the state of the one that it joined.
    """
    text, (head, _, tail) = this.model.get_decoder(), spec.partition("?")
    options = dict(pair.split("=") for pair in tail.split("&"))
    share, media = head.partition(":")[2], options.pop("tokens") == "media"
    start, knobs = float(options.pop("start", 0.25)), {k: float(v) for k, v in options.items()}
    kinds = getattr(text.config, "layer_types", None) or ["full_attention"] * len(text.layers)
    cuts = list(range(max(1, round(start * len(kinds))), len(kinds)))
    hidden, planes = given.embeds.clone(), [plane.clone() for plane in given.planes]
    alive, ends = torch.ones(len(hidden), dtype=torch.bool), list(range(len(hidden)))
    before, counts = hidden, []
    for index, layer in enumerate(text.layers):
        now = hidden.clone()
        for group in groups if index in cuts else ():
            here = [i for i in group.tolist() if alive[i]]
            moved = [float((now[i] - before[i]).norm() / before[i].norm()) for i in here]
            count, signals = None, {"drift": torch.tensor(moved)}
            item = Item(now[here].double().numpy(), signals=signals)
            if share:
                last, part = round(float(share) * len(group)), (cuts.index(index) + 1) / len(cuts)
                count = round(len(group) * (last / len(group)) ** part)
            alive[here] = False
            for slot, members in oracles.ORACLES["quicksilver"](
                item, count, **knobs
            ).groups.items():
                kept, sources = here[slot], [here[i] for i in members]
                alive[kept] = True
                ends = [kept if end in sources else end for end in ends]
                for values in (hidden, *planes[index:][: len(planes) * media]):
                    values[kept] = values[sources].mean(0)
        before = hidden
        after = oracle.through(this, layer, kinds[index], hidden, given, alive.clone())
        after = after + planes[index] if index < len(planes) else after
        hidden = torch.where(alive[:, None], after, hidden)
        counts.append(int(alive.sum()))
    return this.model.lm_head(text.norm(hidden[ends])), counts


def held(cache: Any) -> list[int]:
    return [layer.keys.shape[2] for layer in cache.layers]


@pytest.mark.parametrize("name", some_slow(TEXTS, 3))
@pytest.mark.parametrize("knobs", KNOBS)
def test_text_equals_a_loop_of_masks(name: str, knobs: str) -> None:
    model, ids, spec = text_model(name), prompt(LENGTH), spec_of(knobs, "text")
    with attach(model, spec):
        logits = model(ids).logits[0]
        new, steps, out = written(model, {"input_ids": ids}, 4)
    able = torch.arange(LENGTH - 1)
    want, counts = dense(*of_text(model, ids), [able], spec)
    assert logits.shape == want.shape and counts[-1] < LENGTH
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=0)
    want, counts = dense(*of_text(model, torch.cat([ids, new[:, :-1]], 1)), [able], spec)
    torch.testing.assert_close(steps[0], want[LENGTH - 1 :].float(), atol=1e-5, rtol=0)
    full = [i for i, kind in enumerate(out.past_key_values.layers) if not kind.is_sliding]
    assert [held(out.past_key_values)[i] for i in full] == [counts[i] for i in full]  # KV skipped


def asked(this: Tiny) -> dict[str, Any]:
    return this.inputs(["a {image} b {image} c what is it?"], images=this.images(2))


def groups_of(this: Tiny, inputs: dict[str, Any], given: oracle.Prompt, tokens: str) -> Groups:
    if tokens == "media":
        return given.items
    text = ~torch.isin(inputs["input_ids"][0], torch.tensor(this.model.config.image_token_id))
    text[-1] = False
    return [torch.cat([text.nonzero()[:, 0], *(given.items if tokens == "all" else [])]).sort()[0]]


@pytest.mark.parametrize("family", some_slow(FAMILIES, 4))
@pytest.mark.parametrize("knobs", KNOBS)
@pytest.mark.parametrize("tokens", ["media", "all"])
def test_media_and_mixed_prompts_equal_a_loop_of_masks(
    family: str, knobs: str, tokens: str
) -> None:
    this, spec = tiny(family), spec_of(knobs, tokens)
    inputs = asked(this)
    given = oracle.embed(this, inputs)
    groups = groups_of(this, inputs, given, tokens)
    with attach(this.model, spec), torch.no_grad():
        logits = this.model(**inputs).logits[0]
        out = generate(this, inputs, 4)
    want, counts = dense(this, given, groups, spec)
    assert logits.shape == want.shape and counts[-1] < len(want)
    # Gemma's logits reach 39, where one step of float32 is 4e-6.
    torch.testing.assert_close(logits, want, atol=1e-5, rtol=1e-6)
    whole = oracle.append(this, given, out.sequences[0, len(want) : -1])
    want, _ = dense(this, whole, groups, spec)
    torch.testing.assert_close(torch.cat(out.logits), want[len(logits) - 1 :], atol=1e-4, rtol=0)
