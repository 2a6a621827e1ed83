"""Signals at `llm<K>` against the attention weights of an eager model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, build, generate, tiny
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from transformers import StaticCache

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register, unregister
from mmfast.core.tokens import Tokens
from mmfast.models.reduction.decoder_signals import LayerAttention, inner_signals
from mmfast.models.reduction.sequence import MediaItem, Sequences

KEYS = ("key_norm", "text_key_norm", "key_mean", "values", "text_values")
NAMES = ("attn", "attn_window", "attn_visual", "attn_text", "attn_peak", "attn_mutual")


@pytest.fixture
def seen() -> Iterator[list[Tokens]]:
    """What a method that reads everything was given; it keeps the first tokens."""
    calls: list[Tokens] = []

    @register("reads-all", needs=NAMES, sites=("llm",))
    def reads_all(tokens: Tokens, budget: int) -> Reduction:
        """Remember the tokens."""
        calls.append(tokens)
        return Reduction.prune(torch.arange(budget), tokens.n)

    yield calls
    unregister("reads-all")


def expected(
    heads: Tensor, items: list[Tensor], real: Tensor, text: Tensor | None = None
) -> list[dict[str, Tensor]]:
    """The signals by their definition, from eager weights `[H, L, L]` of one row."""
    weights = heads.mean(0)
    places = real.nonzero()[:, 0].tolist()
    visual = {int(i) for item in items for i in item}
    words = [i for i in places if i not in visual] if text is None else text.tolist()
    return [
        {
            "attn": weights[places[-1], item],
            "attn_window": weights[places[-8:]][:, item].mean(0),
            "attn_visual": weights[item][:, item].mean(0),
            "attn_text": weights[words][:, item].T,
            "attn_peak": heads[:, words][:, :, item].amax((0, 1)),
            "attn_mutual": mutual(heads, item, [i for i in words if i > int(item[-1])]),
        }
        for item in items
    ]


def mutual(heads: Tensor, item: Tensor, words: list[int]) -> Tensor:
    """What text gives an item, each token weighted by what other text gives it and gets."""
    score = torch.zeros(len(item))
    for head in heads:
        for word in words:
            others = sum(float(head[word, i] + head[i, word]) for i in words if i != word)
            score += (others + float(head[word, word])) * head[word, item]
    return score


def check(tokens: Tokens, want: dict[str, Tensor]) -> None:
    for name in NAMES:
        torch.testing.assert_close(tokens.need(name), want[name], atol=5e-6, rtol=0, msg=name)


def eager(family: str, inputs: dict[str, Any], layer: int) -> Tensor:
    """Weights `[B, H, L, L]` of a decoder layer."""
    model = build(family, attention="eager").model
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions[layer]


def batch(this: Tiny) -> dict[str, Any]:
    prompts = ["a {image} b {video} longer?", "{image} is it?"]
    return this.inputs(prompts, images=this.images(2), videos=this.videos(1))


def single(this: Tiny, row: int) -> dict[str, Any]:
    if row == 0:
        return this.inputs(
            ["a {image} b {video} longer?"], images=this.images(1), videos=this.videos(1)
        )
    return this.inputs(["{image} is it?"], images=this.images(2)[1:])


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_signals_equal_eager_attention(family: str, attention: str, seen: list[Tokens]) -> None:
    this = tiny(family, attention)
    inputs = batch(this)
    weights = eager(family, inputs, 1)
    with attach(this.model, "reads-all@llm2:0.5"), torch.no_grad():
        this.model(**inputs)
    at = 0
    for row in range(2):
        places = oracle.embed(this, single(this, row)).items
        real = inputs["attention_mask"][row].bool()
        shift = int((~real).sum())
        # Separators are visual, and belong to no item.
        ids = inputs["input_ids"][row]
        marks = {this.model.config.image_token_id, this.model.config.video_token_id}
        lone = torch.tensor([int(i) in marks for i in ids])
        text = (real & ~lone).nonzero()[:, 0] if family == "llava_onevision" else None
        want = expected(weights[row], [p + shift for p in places], real, text)
        for one in want:
            check(seen[at], one)
            at += 1
    assert at == len(seen) == 3


def test_a_batch_gives_what_its_rows_give(seen: list[Tokens]) -> None:
    this = tiny("qwen2_5_vl")
    with attach(this.model, "random:0.5+reads-all@llm2:0.5"), torch.no_grad():
        this.model(**batch(this))
        together = list(seen)
        seen.clear()
        for row in range(2):
            this.model(**single(this, row))
    for one, other in zip(together, seen, strict=True):
        check(one, {name: other.need(name) for name in NAMES})


def test_static_cache_and_padding_on_the_right(seen: list[Tokens]) -> None:
    this = tiny("qwen2_5_vl")
    inputs = single(this, 0)
    with attach(this.model, "reads-all@llm1:0.5"), torch.no_grad():
        this.model(**inputs)
        cache = StaticCache(this.model.config.get_text_config(), max_cache_len=512)
        this.model(**inputs, past_key_values=cache)
        padded = {**inputs, **{n: _right(inputs[n]) for n in inputs if inputs[n].ndim == 2}}
        padded |= {name: inputs[name] for name in inputs if "grid" in name or "pixel" in name}
        padded["attention_mask"][:, -3:] = 0
        this.model(**padded)
    assert len(seen) == 6
    for i, tokens in enumerate(seen[2:]):
        check(tokens, {name: seen[i % 2].need(name) for name in NAMES})


def _right(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, 3))


def test_a_later_turn_sees_its_own_tokens_among_all_keys(seen: list[Tokens]) -> None:
    this = tiny("llava_onevision")
    inputs = single(this, 1)
    length = inputs["input_ids"].shape[1]
    media = {name: inputs[name] for name in ("pixel_values", "image_sizes")}
    with attach(this.model, "reads-all@llm1:0.5"), torch.no_grad():
        out = generate(this, inputs, 4)
        this.model(input_ids=inputs["input_ids"], past_key_values=out.past_key_values, **media)
    ids = torch.cat([out.sequences[:, : length + 3], inputs["input_ids"]], 1)
    both = {name: torch.cat([value, value]) for name, value in media.items()}
    weights = eager("llava_onevision", {"input_ids": ids, **both}, 0)[
        0, :, length + 3 :, length + 3 :
    ]
    (places,) = oracle.embed(this, inputs).items
    text = (inputs["input_ids"][0] != this.model.config.image_token_id).nonzero()[:, 0]
    want = expected(weights, [places], torch.ones(length).bool(), text)
    check(seen[-1], want[0])


def _dense(q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    hidden = torch.ones(logits.shape[-2:]).triu(1).bool()
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


@pytest.mark.parametrize("mask", ["none", "padding", "bool", "additive", "flex"])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_every_kind_of_mask(mask: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped heads, and masks as sdpa, eager, flash and flex get them."""
    monkeypatch.setattr("mmfast.models.reduction.probe._CHUNK", chunk)
    torch.manual_seed(0)
    length = 30
    q, k = torch.randn(2, 6, length, 8), torch.randn(2, 2, length, 8)
    causal = torch.ones(length, length).tril().bool()
    masks: dict[str, Any] = {
        "none": None,
        "padding": torch.ones(2, length, dtype=torch.int64),
        "bool": causal.expand(2, 1, -1, -1),
        "additive": torch.zeros(2, 1, length, length).masked_fill(~causal, -3e38),
    }
    if mask == "flex":
        masks["flex"] = create_block_mask(
            lambda b, h, i, j: i >= j, 2, None, length, length, device="cpu", BLOCK_SIZE=16
        )
    items = [
        MediaItem(row, row, torch.arange(4 + row, 20), torch.arange(0), None) for row in range(2)
    ]
    text = [torch.cat([torch.arange(4 + row), torch.arange(20, length)]) for row in range(2)]
    sequences = Sequences(length, list(text), list(text), items)
    found = inner_signals(NAMES, sequences, LayerAttention(q, k, masks[mask], None, True, 0))
    weights = _dense(q, k)
    for row in range(2):
        (want,) = expected(weights[row], [items[row].where], torch.ones(length).bool())
        for name in NAMES:
            torch.testing.assert_close(found[row][name], want[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("left", [0, 2])
@pytest.mark.parametrize("right", [(0, 0, 0), (3, 0, 1), (2, 2, 5)])
def test_attention_of_the_last_token_that_is_no_padding(left: int, right: tuple[int, ...]) -> None:
    """Rows padded on the right by different numbers, all of them, some or none."""
    torch.manual_seed(0)
    length, visual = 20, torch.arange(5, 11)
    q, k = torch.randn(3, 4, length, 8), torch.randn(3, 2, length, 8)
    place = torch.arange(length)
    ok = (place >= left) & (place < length - torch.tensor(right)[:, None])
    mask = torch.ones(length, length).tril().bool() & ok[:, None, None]
    items = [MediaItem(row, row, visual, torch.arange(0), None) for row in range(3)]
    text = [torch.arange(left, 5)] * 3
    found = inner_signals(
        {"attn"},
        Sequences(length, text, text, items, ok),
        LayerAttention(q, k, mask, None, True, 0),
    )
    logits = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) * 8**-0.5
    weights = logits.masked_fill(~mask, -3e38).softmax(-1).mean(1)
    for row, gap in enumerate(right):
        want = weights[row, length - 1 - gap, visual]
        torch.testing.assert_close(found[row]["attn"], want, atol=1e-6, rtol=0)


def test_nothing_is_computed_that_nobody_reads(seen: list[Tokens]) -> None:
    this = tiny("qwen2_5_vl")
    inputs = single(this, 1)
    with attach(this.model, "reads-all@llm2:1.0"), torch.no_grad():
        stock = this.model(**inputs).logits
    assert not seen
    with torch.no_grad():
        assert torch.equal(stock, this.model(**inputs).logits)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
def test_keys_values_and_angles_are_those_of_the_model(family: str, seen: list[Tokens]) -> None:
    """Of every item and of the text of its row, also of a row that padding moves."""

    @register("reads-keys", needs=(*KEYS, "rope"), sites=("llm",))
    def reads_keys(tokens: Tokens, budget: int) -> Reduction:
        """Remember the tokens."""
        seen.append(tokens)
        return Reduction.prune(torch.arange(budget), tokens.n)

    this = tiny(family)
    inputs = batch(this)
    rotated: list[tuple[Tensor, ...]] = []
    rotary = this.model.get_decoder().rotary_emb
    hook = rotary.register_forward_hook(lambda *given: rotated.append(given[-1]))
    try:
        with torch.no_grad():
            layer = this.model(**inputs).past_key_values.layers[1]
            with attach(this.model, "reads-keys@llm2:0.5"):
                this.model(**inputs)
    finally:
        hook.remove()
        unregister("reads-keys")
    norms, ids, config = layer.keys.abs().sum((1, 3)), inputs["input_ids"], this.model.config
    visual = (ids == config.image_token_id) | (ids == config.video_token_id)
    real = inputs["attention_mask"].bool()
    left = iter(seen)
    for row in range(2):
        text = real[row] & ~visual[row]
        for item in oracle.embed(this, single(this, row)).items:
            tokens, places = next(left), item + int((~real[row]).sum())
            torch.testing.assert_close(tokens.need("key_norm"), norms[row][places])
            means = layer.keys[row].mean(0)
            torch.testing.assert_close(tokens.need("key_mean"), means[places])
            values = layer.values[row].transpose(0, 1)
            torch.testing.assert_close(tokens.need("values"), values[places].flatten(1))
            torch.testing.assert_close(tokens.need("text_key_norm"), norms[row][text])
            torch.testing.assert_close(tokens.need("text_values"), values[text])
            for side, each in enumerate(rotated[0]):
                axes = each if each.ndim == 4 else each[None]  # [A, B or 1, L, d]
                mean = axes[:, min(row, axes.shape[1] - 1)].mean((0, 2))[places]
                torch.testing.assert_close(tokens.need("rope")[:, side], mean)
    assert next(left, None) is None


@pytest.mark.parametrize("cut", ["", "divprune@llm2:0.5+"])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
def test_attention_before_is_that_of_the_layer_two_in_front(family: str, cut: str) -> None:
    """Also where a cut stands between the two layers: what went has no attention any more."""
    seen: list[Tokens] = []

    @register("reads-back", needs=("attn", "attn_before"), sites=("llm",))
    def reads_back(tokens: Tokens, budget: int) -> Reduction:
        """Remember the tokens."""
        seen.append(tokens)
        return Reduction.prune(torch.arange(budget), tokens.n)

    this = tiny(family)
    inputs = single(this, 0)
    try:
        with attach(this.model, f"{cut}reads-back@llm3:0.5") as trace, torch.no_grad():
            this.model(**inputs)
        early_site = pytest.raises(SpecError, match=r"before decoder layer 1; choose llm2 or later")
        with early_site, attach(this.model, "reads-back@llm1:0.5"), torch.no_grad():
            this.model(**inputs)
    finally:
        unregister("reads-back")
    early, late = (eager(family, inputs, layer)[0].mean(0) for layer in (1, 2))
    places = oracle.embed(this, inputs).items
    kept = [found.keep for site, _, found in trace.reductions if site == "llm2"]
    assert len(seen) == len(places) and bool(kept) == bool(cut)
    for number, (tokens, item) in enumerate(zip(seen, places, strict=True)):
        left = item[kept[number]] if cut else item
        want = early[-1, left]
        torch.testing.assert_close(tokens.need("attn_before"), want, atol=2e-6, rtol=0)
        if not cut:
            torch.testing.assert_close(tokens.need("attn"), late[-1, left], atol=2e-6, rtol=0)
        assert (want - late[-1, left]).abs().max() > 1e-6


def test_catp_inner_in_a_model() -> None:
    """One budget for the examples and the last image of every prompt."""
    this = tiny("qwen2_5_vl")
    inputs = batch(this)
    with attach(this.model, "catp_inner@llm2:0.4") as trace:
        generate(this, inputs, 2)
    first, second = trace.reductions[:2], trace.reductions[2:]
    assert len(second) == 1 and {site for site, _, _ in trace.reductions} == {"llm2"}
    for each in (first, second):
        n, m = (sum(getattr(found, name) for _, _, found in each) for name in "nm")
        assert m == round(0.4 * n)
