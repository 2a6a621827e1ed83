"""ZipCache: equal to a stock model without sdpa whose cache is rounded by hand, block by block."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from cache_checks import evict
from cache_factory import make
from cache_runs import close, rows, run
from oracles_caches import ZipCache
from text_zoo import padded, prompt, text_model, written
from tiny_models import precise
from transformers import DynamicCache

from mmfast import MmfastError, SpecError
from mmfast.attach import attach
from mmfast.caches.plan import call_plan, plan_cache
from mmfast.caches.quantised import Probes
from mmfast.models.kv import notes, packs, policy
from mmfast.ops.quantisation import dequantise, quantise, quantise_apart

KNOBS: dict[str, Any] = {"recent": 0.1, "random": 0.2, "seed": 3, "every": 4}
SPEC = "zipcache:0.4?" + "&".join(f"{name}={value}" for name, value in KNOBS.items())
EVEN = "zipcache:0.5?high=16&low=16&every=4"  # nothing is rounded
PROMPT, LATER = prompt(40), prompt(10, 9)  # tokens of a question and of its answer


def fed(model: Any, ids: torch.Tensor, answer: torch.Tensor, spec: str | None) -> torch.Tensor:
    """Logits `[1 + n, V]` behind a prompt and each token of an answer, one call each."""
    cache = DynamicCache(config=model.config)
    with attach(model, cache=spec), torch.no_grad():
        calls = (ids, *answer.T[:, None])
        return torch.stack([model(x, past_key_values=cache).logits[0, -1] for x in calls])


@functools.cache
def eager(family: str) -> Any:
    model = copy.deepcopy(text_model(family))
    model.set_attn_implementation("eager")
    return model


@functools.cache
def by_hand(family: str, budget: float) -> torch.Tensor:
    """The same of a stock model that shows its attention, and a cache that is edited."""
    model, found = eager(family), []
    cache = DynamicCache(config=model.config)
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 99
    slow = [ZipCache(budget, **KNOBS) for _ in range(model.config.num_hidden_layers)]
    for call in (PROMPT, *LATER.T[:, None]):
        for index, layer in enumerate(cache.layers):
            if found and kinds[index] == "full_attention":
                pair = layer.keys[0].numpy().copy(), layer.values[0].numpy().copy()
                edited = (torch.from_numpy(x)[None] for x in slow[index].before_a_step(*pair))
                layer.keys, layer.values = edited
        with torch.no_grad():
            out = model(call, past_key_values=cache, output_attentions=True)
        for one, weights in zip(slow, out.attentions, strict=True):
            one.saw(weights[0].numpy())
        found.append(out.logits[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [0.4, 17])
def test_an_answer_equals_rounding_by_hand(family: str, budget: float) -> None:
    """The prompt is packed, then blocks of 4 tokens of the answer, each by its own probes."""
    model = text_model(family)
    mine = fed(model, PROMPT, LATER, SPEC.replace("0.4", str(budget), 1))
    torch.testing.assert_close(mine, by_hand(family, budget), atol=2e-5, rtol=1e-5)
    assert (mine - fed(model, PROMPT, LATER, None)).abs().max() > 1e-2


_DRAWN = Probes._drawn


def _late(own: Probes, numbers: torch.Tensor) -> torch.Tensor:
    return _DRAWN(own, numbers + 1)


def _silent(own: Probes, numbers: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(numbers, dtype=torch.bool)


def _summed(known: Any) -> torch.Tensor:
    found: torch.Tensor = known[notes.PROBED]
    return found


def _by_token(x: torch.Tensor, bits: int) -> Any:
    return quantise(x, bits, x.shape[2], along_tokens=False)


def _few(recent: int) -> int:
    return recent // 4 * 4 - 4 if recent >= 8 else 0


FAULTS = [
    (Probes, "_drawn", _late),
    (Probes, "of_answer", _silent),
    (notes, "saliency", _summed),
    (packs, "quantise_apart", _by_token),
]


@pytest.mark.parametrize(("home", "name", "fault"), FAULTS, ids=[f[1] for f in FAULTS])
def test_the_oracle_sees_planted_faults(
    monkeypatch: pytest.MonkeyPatch, home: Any, name: str, fault: Any
) -> None:
    monkeypatch.setattr(home, name, fault)
    if name == "saliency":
        monkeypatch.setattr("mmfast.models.kv.eviction.saliency", fault)
    with pytest.raises(AssertionError, match="not close"):
        test_an_answer_equals_rounding_by_hand("llama", 0.4)


def test_a_block_that_is_packed_a_block_late_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy.Packing, "due", lambda own, recent: _few(recent))
    with pytest.raises(AssertionError, match="not close"):
        test_an_answer_equals_rounding_by_hand("llama", 0.4)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "lfm2"])
def test_nothing_changes_where_nothing_is_rounded(family: str) -> None:
    model, ids = text_model(family), prompt(40)
    with attach(model, cache=EVEN):
        _, logits, out = written(model, {"input_ids": ids}, 7)
    torch.testing.assert_close(logits, written(model, {"input_ids": ids}, 7)[1])
    packed = [
        layer.rows[0].packed for layer in out.past_key_values.layers if hasattr(layer, "rows")
    ]
    assert packed and set(packed) == {40 + 4}


@pytest.mark.parametrize("chunk", [5, 16])
def test_probes_are_the_same_in_chunks(chunk: int) -> None:
    for inputs in ({"input_ids": prompt(41)}, padded([prompt(23), prompt(41, 4)])):
        model = text_model("llama")
        with attach(model, cache=SPEC):
            _, logits, out = written(model, inputs, 7)
            _, parts, other = written(model, inputs, 7, prefill_chunk_size=chunk)
        torch.testing.assert_close(parts, logits, atol=1e-5, rtol=1e-5)
        pairs = zip(out.past_key_values.layers, other.past_key_values.layers, strict=True)
        for one, two in pairs:
            for name in (notes.PROBED, notes.PROBES):
                torch.testing.assert_close(one.notes[name], two.notes[name], atol=1e-5, rtol=0)


def test_a_ragged_batch_is_its_rows() -> None:
    model, ids = text_model("llama"), [prompt(23), prompt(40, 4)]
    with attach(model, cache=SPEC):
        logits = written(model, padded(ids), 10)[1]
        for row, mine in enumerate(ids):
            alone = written(model, {"input_ids": mine}, 10)[1]
            torch.testing.assert_close(logits[row], alone[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llava_onevision", "gemma3"])
def test_media_in_batches_and_chunks(family: str) -> None:
    """Tokens of a picture of Gemma 3 see each other, ahead of them too."""
    this = precise(family)
    together = run(this, rows(this, [0, 1]), SPEC, tokens=7)
    for row in range(2):
        single = rows(this, [row])
        close(together, run(this, single, SPEC, tokens=7), row)
        if family != "gemma3":  # the stock model reads pictures whole
            close(together, run(this, single, SPEC, tokens=7, prefill_chunk_size=7), row)


def test_later_turns_and_beams() -> None:
    model, first = text_model("llama"), prompt(30)
    with attach(model, cache=SPEC):
        out = written(model, {"input_ids": first}, 7)[2]
        ids = torch.cat([out.sequences, prompt(20, 5)], 1)
        cache = written(model, {"input_ids": ids}, 3, past_key_values=out.past_key_values)[2]
        beams = model.generate(first, max_new_tokens=9, num_beams=2, do_sample=False)
    row = cache.past_key_values.layers[0].rows[0]
    assert row.packed == ids.shape[1] and len(row.packs) == 6  # prompt, a block, the second turn
    assert beams.shape[1] == 39


def test_bytes_are_those_of_codes_and_scales() -> None:
    model = text_model("llama")
    with attach(model, cache=SPEC) as trace:
        cache = written(model, {"input_ids": PROMPT}, 1)[2].past_key_values
    heads, width, item = 2, 8, 8  # float64
    keys = [
        n * heads * width * bits // 8 + 2 * heads * width * item for n, bits in ((16, 4), (24, 2))
    ]
    values = [
        n * heads * width * bits // 8 + 2 * n * item + heads * width * item
        for n, bits in ((16, 4), (24, 2))
    ]
    order = cache.layers[0].rows[0].live.nbytes
    assert {layer.nbytes for layer in cache.layers} == {sum(keys) + sum(values) + order}
    assert trace.rows[0].peak_bytes == 4 * (sum(keys) + sum(values) + order)


def test_channels_apart_spare_small_ones_an_outlier() -> None:
    """Where a channel is 20 times as large as the others, its scale is not theirs."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 50, 16, generator=g)
    x[0, :, 3] *= 20
    x[1, :, 5] = 0  # a channel without a size
    small = torch.arange(16) != 3
    for bits in (8, 4, 2):
        apart = quantise_apart(x, bits)
        assert apart.whole().shape == x.shape == apart.shape
        plain = dequantise(quantise(x, bits, 16, along_tokens=False))
        error = [((y - x)[0, :, small] ** 2).mean() for y in (apart.whole(), plain)]
        assert error[0] < (0.2 if bits > 2 else 0.9) * error[1]
        slow = ZipCache.apart(x.double().numpy(), bits)
        np.testing.assert_allclose(apart.whole().numpy(), slow, rtol=2e-4, atol=2e-4)
    with pytest.raises(MmfastError, match="NaN or infinity"):
        quantise_apart(x / 0, 4)


def test_probes_are_as_many_as_asked_for() -> None:
    numbers = torch.arange(20_000)
    for share in (0.0, 0.05, 0.5, 1.0):
        marks = Probes(0.05, share, 1, 100).of_prompt(numbers, 20_000)
        assert marks[-1000:].all()
        assert float(marks[:-1000].float().mean()) == pytest.approx(share, abs=0.01)
    assert Probes(0.0, 0.0, 0, 0).of_prompt(numbers[:7], 7).tolist() == [False] * 6 + [True]
    one, two = (Probes(0.0, 0.3, seed, 8).of_prompt(numbers, 20_000) for seed in (-5, 10**15))
    assert 0.35 < float((one != two).float().mean()) < 0.49  # unlike seeds, unlike probes


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("zipcache", "needs a budget"),
        ("zipcache:0.5?every=-1", "every=-1"),
        ("zipcache:0.5+quant:4", "both choose bits; drop one of them$"),
        ("zipcache:0.5+quest:0.1", "unpacks all entries"),
        ("zipcache:0.5+adakv", "does not tell"),
    ],
)
def test_refusals(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        plan_cache(spec)


@pytest.mark.parametrize("knobs", ["high=3", "low=0", "recent=1.5", "random=-0.1"])
def test_senseless_knobs(knobs: str) -> None:
    with pytest.raises(SpecError, match="choose"):
        evict(make("random", 2, 20), f"zipcache:4?{knobs}")


def test_all_of_a_prompt_is_read_again() -> None:
    plan = call_plan("zipcache:0.6")
    assert plan is not None and plan.rereads is None and plan.every == 100 and plan.bits == (4, 2)
