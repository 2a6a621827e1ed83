"""A prompt that reads chosen blocks equals the stock model under a mask that hides the rest."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import oracles_prefill as oracles
import pytest
import torch
from attach_runs import PROMPTS, logits_close, one
from text_zoo import prompt, text_model
from tiny_models import Tiny, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.models.reduction.probe import substituting
from mmfast.models.wrappers import attention_at, layers_of

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl")
SETTINGS = {
    "sample_attention": {"rows": 0.2, "window": 0.1},
    "zipvl": {"probes": 5},
    "flexprefill": {"tau": 0.1},
    "minference": {"probes": 9},
    "pbs": {"segment": 2},
    "hip": {},
    "sale": {"width": 2, "local": 4},
    "dhsa": {"chunk": 3, "window": 1},
}
BUDGET, SIZE = 0.4, 4


def spec_of(name: str, **more: Any) -> str:
    knobs = {"block": SIZE, "least": 8, **SETTINGS[name], **more}
    return f"{name}:{BUDGET}?" + "&".join(f"{key}={value}" for key, value in knobs.items())


class SlowPrefill:
    """The stock attention function under the mask of an oracle, row by row."""

    def __init__(self, model: Any, name: str, share: bool = True) -> None:
        text, self.name, self.share, self.calls = model.get_decoder(), name, share, 0
        self.modules = [attention_at(text, i) for i in range(len(layers_of(text)))]

    def __enter__(self) -> SlowPrefill:
        self.stack = substituting(dict.fromkeys(self.modules, self.around))
        self.stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)

    def around(
        self, call: Any, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any
    ) -> Any:
        if q.shape[2] < 8:
            return call(module, q, k, v, mask, **kwargs)
        self.calls += 1
        hidden = torch.zeros(len(q), q.shape[1], q.shape[2], k.shape[2])
        for row in range(len(q)):
            seen = torch.ones(k.shape[2], dtype=torch.bool) if mask is None else mask[row, 0, -1]
            places = (seen if seen.dtype == torch.bool else seen > -1).nonzero()
            start, stop = int(places[0]), int(places[-1]) + 1
            if mask is None:  # behind them an empty static cache
                stop = q.shape[2]
            real = min(q.shape[2], stop - start)
            found = self.mask(q[row, :, -real:], k[row, :, start:stop], kwargs.get("scaling"))
            hidden[row] = torch.finfo(torch.float32).min
            hidden[row, :, -real:, start:stop].masked_fill_(found, 0.0)
            hidden[row, :, : q.shape[2] - real, start:] = 0.0
        return call(module, q, k, v, hidden, **kwargs)

    def mask(self, query: Any, key: Any, scale: float | None) -> Any:
        groups = len(key) if self.share else len(query)
        q = query.unflatten(0, (groups, -1)).double().numpy()
        k = key.repeat_interleave(groups // len(key), 0).double().numpy()
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        found = oracles.ORACLES[self.name](q, k, scale, BUDGET, SIZE, **SETTINGS[self.name])
        return torch.from_numpy(np.repeat(found, len(query) // groups, 0))


def same(this: Tiny, inputs: Any, name: str, share: bool = True, **kwargs: Any) -> Any:
    with SlowPrefill(this.model, name, share) as slow:
        want = generate(this, inputs, **kwargs)
    with attach(this.model, prefill=spec_of(name, share=share)) as trace:
        got = generate(this, inputs, **kwargs)
    assert slow.calls and torch.equal(got.sequences, want.sequences)
    logits_close(got, want)
    return trace, got


# Of the methods whose oracles are slowest one family is asked by default.
PROMPTED = [
    pytest.param(
        *(family, name),
        marks=[pytest.mark.slow] if name in ("sale", "dhsa") and family != FAMILIES[0] else [],
    )
    for family in FAMILIES
    for name in SETTINGS
]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("family", "name"), PROMPTED)
def test_prompt_of_a_family(family: str, name: str) -> None:
    this = tiny(family)
    inputs = one(this)
    trace, got = same(this, inputs, name)
    row = next(r for r in trace.rows if r.stage == "sparse")
    assert 0 < row.tokens_out < row.tokens_in and row.method.startswith(name) and row.ms > 0
    stock = generate(this, inputs)
    assert not torch.equal(torch.stack(got.logits), torch.stack(stock.logits))
    with attach(this.model, prefill=f"{name}:1.0?least=1&block={SIZE}") as trace:
        logits = torch.stack(generate(this, inputs).logits)
    assert torch.equal(logits, torch.stack(stock.logits)) and not trace.rows


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", ["sample_attention", "pbs"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_with_padding_and_heads_of_their_own(family: str, name: str) -> None:
    this = tiny(family)
    inputs = this.inputs(PROMPTS, videos=this.videos(len(PROMPTS)))
    assert (inputs["attention_mask"] == 0).any()
    trace, batch = same(this, inputs, name, share=False)
    assert not trace.notes
    alone = this.inputs(PROMPTS[2:3], videos=this.videos(len(PROMPTS))[2:3])
    with attach(this.model, prefill=spec_of(name, share=False)):
        single = generate(this, alone)
    together, by_itself = (torch.stack(out.logits)[:, at] for out, at in ((batch, 2), (single, 0)))
    torch.testing.assert_close(together, by_itself, atol=1e-5, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_chunks_and_static_caches(family: str, attention: str) -> None:
    this = tiny(family, attention)
    inputs = one(this)
    same(this, inputs, "flexprefill", prefill_chunk_size=16)
    same(this, inputs, "flexprefill", cache_implementation="static")


def test_beside_reduction_cache_and_probes() -> None:
    """Methods that read attention see it under sparse prefill, and the tokens that are left."""
    this = tiny("qwen2_5_vl")
    inputs, both = one(this), {"reduce": "fastv@llm2:0.5", "cache": "snapkv:12"}
    with attach(this.model, **both), SlowPrefill(this.model, "sample_attention"):
        want = generate(this, inputs)
    with attach(this.model, **both, prefill=spec_of("sample_attention")) as trace:
        got = generate(this, inputs)
    assert {"sparse", "llm2", "kv"} <= {row.stage for row in trace.rows}
    logits_close(got, want)


def test_what_is_not_causal_stays_dense_and_is_told() -> None:
    this = tiny("gemma3")
    inputs = this.inputs(["{image} what?"], images=this.images(1))
    stock = generate(this, inputs)
    with (
        pytest.warns(UserWarning, match="mask is not causal"),
        attach(this.model, prefill="hip:0.3?least=2&block=4") as trace,
    ):
        got = generate(this, inputs)
    logits_close(got, stock)
    assert any("not causal" in note for note in trace.notes)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_weights_that_are_not_made_are_told_of(family: str) -> None:
    model, ids = copy.deepcopy(text_model(family)), prompt(40)
    model.set_attn_implementation("eager")
    with torch.no_grad(), attach(model, prefill="hip:0.3?least=2&block=4") as trace:
        model(ids)
        assert not trace.notes
        with pytest.warns(UserWarning, match="output_attentions=True gives none"):
            assert not model(ids, output_attentions=True).attentions
        assert len(trace.notes) == 1
        assert len(model(ids[:, :1], output_attentions=True).attentions) == 4  # a step makes them


def test_training_stays_dense() -> None:
    model, ids = text_model("llama"), prompt(40)
    embeds = model.get_input_embeddings()(ids).requires_grad_()
    want = model(inputs_embeds=embeds).logits
    with (
        pytest.warns(UserWarning, match="gradients"),
        attach(model, prefill="zipvl:0.3?least=2&block=4"),
    ):
        got = model(inputs_embeds=embeds).logits
    assert torch.equal(got, want) and got.requires_grad


def test_short_prompts_run_as_in_the_stock_model() -> None:
    model, ids = text_model("llama"), prompt(40)
    with torch.no_grad():
        want = model(ids).logits
        with attach(model, prefill="flexprefill") as trace:
            assert torch.equal(model(ids).logits, want)
    assert not trace.rows and not trace.notes and not model.__dict__.get("_mmfast_core")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("minferense", "minference"),
        ("hip:64", "takes a share"),
        ("hip+zipvl", "keep one"),
        ("pbs:0.9?segment=0", "at least 1 block"),
        ("zipvl?block=0", "at least 1 token"),
        ("flexprefill:0.9?tau=-1.0", "0 or more"),
        ("sample_attention:0.9?rows=2.0", "choose shares"),
        ("minference?probes=0", "at least 1"),
        ("sale?width=0", "at least 1 token"),
        ("dhsa?window=0", "at least 1 token"),
        ("evs:0.3", "unknown prefill"),
    ],
)
def test_wrong_specs_are_one_line(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        attach(text_model("llama"), prefill=spec)
    assert "\n" not in str(caught.value)


def test_attn_by_name_is_undone() -> None:
    model, ids = text_model("llama"), prompt(20)
    before = model.config._attn_implementation
    with torch.no_grad():
        want = model(ids).logits
        with attach(model, attn="eager"):
            assert model.config._attn_implementation == "eager"
            torch.testing.assert_close(model(ids).logits, want, atol=1e-5, rtol=1e-5)
    assert model.config._attn_implementation == before
    for name, words in (("flash_attention_2", "flash-attn"), ("sdpaa", "'sdpa'")):
        with pytest.raises(ModelError, match=words) as caught:
            attach(model, attn=name)
        assert "\n" not in str(caught.value) and isinstance(caught.value, MmfastError)
    assert model.config._attn_implementation == before
