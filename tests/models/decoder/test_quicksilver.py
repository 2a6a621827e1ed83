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
from mmfast.models.reduction.decoder_signals import drift
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
    facts = SimpleNamespace(blocks=False, prefix=False)
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


@pytest.mark.rest_is_slow(3)
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


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", some_slow(FAMILIES, 4))
@pytest.mark.parametrize("knobs", some_slow(KNOBS[1:] + KNOBS[:1], 2))
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


def differences(spec: str) -> float:
    """How far a text model is from the loop of masks."""
    model, ids = text_model("llama"), prompt(LENGTH)
    with attach(model, spec):
        logits = model(ids).logits[0]
    want, _ = dense(*of_text(model, ids), [torch.arange(LENGTH - 1)], spec)
    return float((logits - want).abs().max())


def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halting what moves most, states that are lost, and fused tokens that stay apart."""
    spec = "quicksilver?drift=0.7&fuse=0.9&tokens=text"
    assert differences(spec) < 1e-5
    with monkeypatch.context() as patch:
        patch.setattr(choice, "drift", lambda before, after: 1 - drift(before, after))
        assert differences(spec) > 1e-3
    finish, chain = HaltedTokens.finish, HaltedTokens.cut

    def lost(self: Any, *given: Any) -> Tensor:
        self.states.zero_()
        return finish(self, *given)

    def apart(self: Any, items: Any, chains: Any, *given: Any) -> None:
        whole = [SimpleNamespace(owner=c.owner.clone(), keep=c.keep) for c in chains]
        for each in whole:
            other = torch.ones_like(each.owner, dtype=torch.bool)
            other[each.keep] = False
            each.owner[other] = -1
        chain(self, items, whole, *given)

    for name, fault in (("finish", lost), ("cut", apart)):
        with monkeypatch.context() as patch:
            patch.setattr(HaltedTokens, name, fault)
            assert differences(spec) > 1e-3, name


@pytest.mark.parametrize("tokens", ["text", "media", "all"])
def test_a_share_of_one_and_thresholds_of_zero_are_the_stock_model(tokens: str) -> None:
    if tokens == "text":
        model: Any = text_model("llama")
        inputs: dict[str, Any] = {"input_ids": prompt(LENGTH)}
    else:
        this = tiny("qwen3_vl")
        model, inputs = this.model, asked(this)
    stock = model(**inputs).logits
    for spec in ("quicksilver:1.0", "quicksilver?drift=0&fuse=0"):
        with attach(model, f"{spec}{'&' if '?' in spec else '?'}tokens={tokens}"):
            assert torch.equal(model(**inputs).logits, stock), spec
    assert torch.equal(model(**inputs).logits, stock)


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("knobs", KNOBS[1:3])
def test_a_ragged_batch_of_text_equals_its_rows(name: str, knobs: str) -> None:
    model, prompts = text_model(name), [prompt(LENGTH), prompt(23, 1), prompt(31, 2)]
    batch = padded(prompts)
    with attach(model, spec_of(knobs, "text")):
        new, logits, _ = written(model, batch, 4)
        whole = model(**batch).logits
        alone = [written(model, {"input_ids": ids}, 4) for ids in prompts]
        rows = [model(ids).logits[0] for ids in prompts]
    for row, (mine, own, _) in enumerate(alone):
        assert torch.equal(new[row], mine[0])
        torch.testing.assert_close(logits[row], own[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(whole[row, -len(rows[row]) :], rows[row], atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_vl"])
def test_a_ragged_batch_of_media_equals_its_rows(family: str) -> None:
    this, images = tiny(family), tiny(family).images(2)
    texts = ["{image} what is it then?", "so {image}!"]
    for spec in ("quicksilver?drift=0.9&fuse=0.9&tokens=all", "quicksilver:0.4"):
        with attach(this.model, spec):
            together = generate(this, this.inputs(texts, images=images), 4)
            alone = [
                generate(this, this.inputs([text], images=[image]), 4)
                for text, image in zip(texts, images, strict=True)
            ]
        for row, one in enumerate(alone):
            logits = torch.stack([step[row] for step in together.logits])
            torch.testing.assert_close(logits, torch.cat(one.logits), atol=1e-4, rtol=0)


def test_chunks_halt_what_the_prompt_would() -> None:
    """A token's drift is its own, so a threshold finds the same tokens in every chunk."""
    this = tiny("qwen2_vl")
    spec = "quicksilver?drift=0.7&fuse=0.0"
    with attach(this.model, spec):
        whole = generate(this, asked(this), 4)
        parts = generate(this, asked(this), 4, prefill_chunk_size=16)
    assert held(parts.past_key_values) == held(whole.past_key_values)
    assert held(whole.past_key_values)[3] < held(whole.past_key_values)[0]
    torch.testing.assert_close(torch.cat(parts.logits), torch.cat(whole.logits), atol=1e-4, rtol=0)
    with attach(this.model, f"{spec}&tokens=all"), pytest.raises(ModelError, match="leave out"):
        generate(this, asked(this), 2, prefill_chunk_size=16)


def test_what_other_stages_drop_stays_away() -> None:
    """Only what has halted comes back, and labels follow what is there."""
    this = tiny("llava_onevision")
    inputs, ids = asked(this), asked(this)["input_ids"]
    length = ids.shape[1]
    stock = this.model(**inputs, labels=ids).loss
    with attach(this.model, "quicksilver:0.5"):
        out = this.model(**inputs, labels=ids)
    want = torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:])
    torch.testing.assert_close(out.loss, want)
    assert out.logits.shape[1] == length and out.loss != stock
    media = int((ids == this.model.config.image_token_id).sum())
    for spec in ("random:0.5+quicksilver:0.5", "quicksilver@llm1:0.8+random@llm3:0.5"):
        with attach(this.model, spec) as trace:
            found = this.model(**inputs, labels=ids)
        gone = [r.n - r.m for site, _, r in trace.reductions if site in ("pre", "llm3")]
        gone = gone[:2]  # of two images, by the stage that drops
        assert found.logits.shape[1] == length - sum(gone) > length - media, spec
        assert torch.isfinite(found.loss)


def test_all_of_a_picture_may_halt() -> None:
    this = tiny("llava_onevision")
    inputs = asked(this)
    left = inputs["input_ids"].shape[1] + 3 - sum(map(len, oracle.embed(this, inputs).items))
    for spec in ("quicksilver@llm1?drift=99.0", "quicksilver@llm1?drift=99.0+fastv@llm1:0.5"):
        with attach(this.model, f"{spec}+divprune@llm2:0.5"):
            out = generate(this, inputs, 4)
        assert held(out.past_key_values)[1:] == [left] * 3


def test_training_learns_from_what_runs() -> None:
    model, ids = text_model("qwen3_moe"), prompt(LENGTH)
    model.train().requires_grad_(True)
    try:
        with attach(model, "quicksilver:0.5?tokens=text"), torch.enable_grad():
            out = model(ids, labels=ids)
            out.loss.backward()
        assert out.logits.shape[1] == round(0.5 * (LENGTH - 1)) + 1
        assert model.get_decoder().layers[3].mlp.gate.weight.grad.abs().sum() > 0
    finally:
        model.eval().requires_grad_(False).zero_grad()


def test_modes_of_generation_write_the_same() -> None:
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    with attach(model, "quicksilver:0.5?fuse=0.9&tokens=text"):
        new = written(model, ids, 6)[0]
        assert torch.equal(written(model, ids, 6, use_cache=False)[0], new)
        assert torch.equal(written(model, ids, 6, prompt_lookup_num_tokens=3)[0], new)
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(written(model, ids, 6, **static)[0], new)


def test_errors_name_the_choices() -> None:
    model = text_model("llama")
    for knobs, words in (("start=1.0", "no depth"), ("drift=-1.0", "no distances")):
        with (
            pytest.raises(SpecError, match=words),
            attach(model, f"quicksilver?{knobs}&tokens=text"),
        ):
            model(prompt(LENGTH))
    with (
        pytest.raises(ModelError, match=r"'drift'.*K at least 1"),
        attach(model, "quicksilver@llm0:0.5?tokens=text"),
    ):
        model(prompt(LENGTH))
