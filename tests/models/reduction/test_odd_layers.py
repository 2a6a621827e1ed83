"""Decoder layers that are no plain attention: sliding windows, image blocks, convolutions."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import Tiny, build, generate, tiny
from transformers import DynamicCache, StaticCache
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from mmfast import ModelError, Reduction, Tokens, register
from mmfast.attach import attach
from mmfast.core.registry import unregister
from mmfast.models.families.adapter import adapter_for
from mmfast.models.reduction.cache_layers import join
from mmfast.models.reduction.record import recording

SPEC = "random:0.4+random@llm2:0.5"


def run(this: Tiny, inputs: dict[str, Any], spec: str = SPEC, **kwargs: Any) -> Any:
    with attach(this.model, spec):
        return generate(this, inputs, **kwargs)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("tokens", [3, 30])
def test_a_window_counts_the_tokens_that_are_left(attention: str, tokens: int) -> None:
    """From a prompt longer than the window, and from one that outgrows it while answering."""
    this = tiny("gemma3", attention)
    inputs = this.inputs(["{image}"], images=this.images(1))
    spec = "random:1" if tokens == 30 else "random:0.6+random@llm2:0.5"
    with attach(this.model, spec) as trace:
        out = generate(this, inputs, tokens)
    length = inputs["input_ids"].shape[1]
    whole = oracle.append(this, oracle.embed(this, inputs), out.sequences[0, length:-1])
    logits = oracle.masked(this, whole, trace.reductions)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=0)


def test_without_token_types_an_image_is_causal_as_in_the_stock_model() -> None:
    this = tiny("gemma3")
    inputs = this.inputs(["on {image}?"], images=this.images(1))
    bare = {k: v for k, v in inputs.items() if k != "token_type_ids"}
    with attach(this.model, "random:0.5") as trace:
        blocks, causal = this.model(**inputs).logits, this.model(**bare).logits
    assert (blocks - causal).abs().max() > 1e-2
    whole = oracle.embed(this, inputs)
    keep = oracle.kept_places(whole, trace.reductions[:1])
    hidden = this.model.get_decoder()(
        inputs_embeds=whole.embeds[keep][None],
        position_ids=whole.positions[keep][None],
        attention_mask=torch.ones(1, len(keep), dtype=torch.int64),
        use_cache=False,
    )
    assert torch.equal(causal, this.model.lm_head(hidden.last_hidden_state))


def test_chunks_that_cut_no_image_equal_one_piece() -> None:
    this = tiny("gemma3")
    inputs = this.inputs(["a {image} or {image} then?"], images=this.images(2))
    ends = (inputs["input_ids"][0] == this.model.config.boi_token_id).nonzero()[:, 0]
    whole = run(this, inputs, "tome:0.4")
    parts = run(this, inputs, "tome:0.4", prefill_chunk_size=int(ends[1]))
    assert torch.equal(parts.sequences, whole.sequences)
    torch.testing.assert_close(
        torch.stack(parts.logits), torch.stack(whole.logits), atol=1e-4, rtol=0
    )


def test_a_window_in_a_cache_without_types_of_layers() -> None:
    """One row without padding: the layer holds more than its window sees, so it needs a mask."""
    this = tiny("gemma3")
    inputs = this.inputs(["so {image}{image}?"], images=this.images(2))
    typed = run(this, inputs, past_key_values=DynamicCache(config=this.model.config), tokens=20)
    plain = run(this, inputs, past_key_values=DynamicCache(), tokens=20)
    torch.testing.assert_close(torch.cat(plain.logits), torch.cat(typed.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cache", ["typed", "plain", "static"])
@pytest.mark.parametrize("family", ["exaone4_5", "cohere2_vision"])
def test_padding_behind_a_cut_takes_no_place_in_a_window(family: str, cache: str) -> None:
    """Chunks of which a cut leaves nothing, or unequal numbers of tokens in the rows."""
    this = tiny(family)
    texts = ["{image} a", "so it {image} is {image}?"]
    inputs = this.inputs(texts, images=this.images(3))
    whole = run(this, inputs, "random:0.3", tokens=6)
    for size in (3, 5):
        held = {
            "typed": lambda: DynamicCache(config=this.model.config),
            "plain": DynamicCache,
            "static": lambda: StaticCache(config=this.model.config, max_cache_len=200),
        }[cache]()
        parts = run(
            this, inputs, "random:0.3", tokens=6, prefill_chunk_size=size, past_key_values=held
        )
        torch.testing.assert_close(
            torch.stack(parts.logits), torch.stack(whole.logits), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("family", ["gemma3", "lfm2_vl"])
def test_a_cache_without_types_of_layers(family: str) -> None:
    """`DynamicCache()` keeps all keys of a window's layer; convolutions cannot use it."""
    this = tiny(family)
    inputs = this.inputs(["{image} a", "so {image}{image}?"], images=this.images(3))
    typed = run(this, inputs, past_key_values=DynamicCache(config=this.model.config), tokens=20)
    if family == "lfm2_vl":
        with pytest.raises(ModelError, match="is a convolution; pass DynamicCache"):
            run(this, inputs, past_key_values=DynamicCache())
        return
    plain = run(this, inputs, past_key_values=DynamicCache(), tokens=20)
    assert torch.equal(plain.sequences, typed.sequences)


def test_attention_of_a_convolution_is_refused() -> None:
    this = tiny("lfm2_vl")
    with (
        pytest.raises(ModelError, match=r"is a convolution; choose llm2$"),
        attach(this.model, "fastv@llm3:0.5"),
    ):
        pass


@pytest.mark.parametrize("way", ["forward", "generate", "batch", "again"])
def test_the_tiles_of_an_image_are_one_item(way: str) -> None:
    """A large image between two small ones; the overview is tile 0 and comes last."""
    this = tiny("lfm2_vl")
    small, large = this.images(2), this.images(1, 7, size=(80, 160))
    texts, images = ["on {image}{image} or {image}?"], [small[0], *large, small[1]]
    if way == "batch":
        texts.append("{image}")
        images += large
    inputs = this.inputs(texts, images=images)
    seen: list[Tokens] = []

    @register("peek", needs=("x", "attn"))
    def peek(tokens: Tokens, budget: int | None) -> Reduction:
        """Notes what it gets."""
        seen.append(tokens)
        return Reduction.prune(torch.arange(int(budget or 1)), tokens.n)

    try:
        with attach(this.model, "peek:0.5") as trace:
            if way == "generate":
                generate(this, inputs, 2)
            else:
                logits = this.model(**inputs).logits
            if way == "again":
                seen.clear()
                logits = this.model(**inputs).logits
    finally:
        unregister("peek")
    tiles = inputs["spatial_shapes"].prod(1) // this.shape.merge**2
    count = (len(tiles) - 2) // len(texts)
    sizes = [int(tiles[0]), int(tiles[1 : 1 + count].sum()), int(tiles[1 + count])]
    assert [t.n for t in seen] == sizes + sizes[1:2] * (len(texts) - 1)
    parts = tiles[1 : 1 + count].tolist()
    owner = [i for i, n in zip([*range(1, count), 0], parts, strict=True) for _ in range(n)]
    assert seen[1].signals["tile"].tolist() == owner
    assert seen[1].grid is None and seen[0].grid is not None
    if way == "forward":
        whole = oracle.embed(this, inputs)
        keep = oracle.kept_places(whole, trace.reductions)
        assert torch.equal(logits[0], oracle.removed(this, whole, keep))


def test_padding_of_a_tile_looks_at_nothing() -> None:
    """A tile's attention signal is the same alone and beside a larger one."""
    this = tiny("lfm2_vl")
    inputs = this.inputs(["{image}"], images=this.images(1))
    call = {k: inputs[k] for k in this.facts.calls["image"]}
    real = int(inputs["spatial_shapes"][0].prod())
    assert real < inputs["pixel_values"].shape[1]
    bare = {**call, "pixel_values": call["pixel_values"][:, :real]}
    bare["pixel_attention_mask"] = call["pixel_attention_mask"][:, :real]
    base, found = this.model.base_model, []
    for each in (call, bare):
        with recording(base, adapter_for(this.model), {"attn", "keys"}) as recorder:
            base.get_image_features(**each)
            found.append(recorder.last["image"].signals[0])
    for name in ("attn", "keys"):
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gaps", [[0, 0], [2, 0], [1, 5]])
def test_a_convolution_steps_over_padding(gaps: list[int]) -> None:
    """Two calls with padding in front of the second equal rows without padding."""
    this = build("lfm2_vl")
    config = this.model.get_decoder().config
    layer = next(m for m in this.model.modules() if isinstance(m, Lfm2ShortConv))
    first, second = torch.randn(2, 4, 32), torch.randn(2, 5, 32)
    ok = torch.arange(5) >= torch.tensor(gaps)[:, None]
    cache = DynamicCache(config=config)
    layer(first, past_key_values=cache)
    join(cache, 0, ok)
    out = layer(second, past_key_values=cache, attention_mask=ok)
    last = layer(torch.ones(2, 1, 32), past_key_values=cache)
    for row, gap in enumerate(gaps):
        whole = torch.cat([first[row], second[row, gap:], torch.ones(1, 32)])
        expected = layer(whole[None])[0]
        torch.testing.assert_close(out[row, gap:], expected[4:-1])
        torch.testing.assert_close(last[row], expected[-1:])
