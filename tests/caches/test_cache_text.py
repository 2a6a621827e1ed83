"""KV policies on language models of text: against a stock cache that hides what they drop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gate_models import give_gates
from text_steps import hidden_steps
from text_zoo import DENSE, HYBRID, TEXTS, padded, prompt, text_model, written
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import ModelError

LENGTH, STEPS = 32, 2
POLICIES = (
    "snapkv:0.4?window=5&kernel=3",
    "tova:0.4?window=1",
    "knorm:0.5",
    "keydiff:0.5",
    "lagkv:0.5?lag=8&sink=2",
    "chunkkv:0.4?window=5&chunk=4",
    "pyramidkv:0.4?window=4",
    "leverage:0.5",
    "curdkv:0.5",
    "random:0.5",
    "kvzip:0.5?chunk=12",
    "kvsquared:0.5?chunk=12&asks=0.2",
    "livevlm:0.5",
    "fastkvzip:0.5",
)
QUICK = ("llama", "gemma3", "gpt_neox", "gpt_oss", "qwen3_next", "falcon_h1")
ABLE = [name for name in TEXTS if name != "mistral_window"]


def full_layers(model: Any) -> list[int]:
    kinds = getattr(model.config, "layer_types", None)
    count = model.config.num_hidden_layers
    kinds = list(kinds or ["full_attention"] * count)
    return [i for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid")]


def kept(layer: Any, length: int) -> Tensor:
    """Which of the first `length` tokens a layer still holds in each KV head, `[H, n]` bool."""
    places = layer.notes["place"][0].expand(layer.keys.shape[1], -1)
    seen = torch.zeros(len(places), length, dtype=torch.bool)
    for head, mine in enumerate(places):
        seen[head, mine[mine < length]] = True
    return seen


def slow_unless(names: Any, quick: Any) -> list[Any]:
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_unless(ABLE, QUICK))
def test_policies_equal_a_full_cache_that_hides(name: str) -> None:
    model, ids = text_model(name), prompt(LENGTH)
    give_gates(model)
    for policy in POLICIES:
        if name == "gpt_neox" and policy.startswith("fastkvzip"):
            continue  # its config here tells of key heads that it does not have
        with attach(model, cache=policy) as trace:
            new, logits, out = written(model, {"input_ids": ids}, STEPS)
        cache = out.past_key_values
        visible = {i: kept(cache.layers[i], LENGTH) for i in full_layers(model)}
        assert all(0 < seen.sum() < seen.numel() for seen in visible.values()), policy
        want = hidden_steps(model, ids, new[0], visible).float()
        torch.testing.assert_close(logits[0], want, atol=1e-5, rtol=0, msg=policy)
        (row,) = trace.rows
        assert row.stage == "kv" and row.tokens_in == LENGTH > row.tokens_out
        assert cache.get_seq_length(full_layers(model)[0]) == LENGTH + STEPS - 1


@pytest.mark.parametrize("name", slow_unless(ABLE, QUICK))
def test_a_share_of_one_is_the_stock_model(name: str) -> None:
    model, ids = text_model(name), prompt(LENGTH)
    stock = written(model, {"input_ids": ids}, STEPS)
    for policy in (*POLICIES[:4], "sink:64+window:64", "quant:8"):
        whole = policy.partition(":")[0] + ":1.0" if policy in POLICIES else policy
        if whole == "quant:8":
            whole = "quant:8?residual=64"  # nothing is old enough
        if "quant" in whole and name == "falcon_h1":
            continue
        with attach(model, cache=whole):
            assert torch.equal(written(model, {"input_ids": ids}, STEPS)[1], stock[1]), whole


def test_the_oracle_sees_a_fault() -> None:
    model, ids = text_model("llama"), prompt(LENGTH)
    with attach(model, cache=POLICIES[0]):
        new, logits, out = written(model, {"input_ids": ids}, STEPS)
    visible = {i: kept(out.past_key_values.layers[i], LENGTH) for i in range(4)}
    for fault in (visible[2].flip(0), visible[2].roll(1, 1)):
        wrong = hidden_steps(model, ids, new[0], {**visible, 2: fault}).float()
        assert (wrong - logits[0]).abs().max() > 1e-4


@pytest.mark.parametrize("name", slow_unless(("llama", "gemma3", "gpt_neox", *HYBRID), ("llama",)))
@pytest.mark.parametrize("spec", ["snapkv:0.4?window=5", "sink:2+window:9", "h2o:0.4"])
def test_a_ragged_batch_equals_its_rows(name: str, spec: str) -> None:
    model, prompts = text_model(name), [prompt(LENGTH), prompt(21, 1), prompt(27, 2)]
    with attach(model, cache=spec):
        _, logits, _ = written(model, padded(prompts), STEPS)
        alone = [written(model, {"input_ids": ids}, STEPS)[1] for ids in prompts]
    torch.testing.assert_close(logits, torch.cat(alone), atol=2e-5, rtol=0)


@pytest.mark.parametrize("spec", ["snapkv:0.4?window=5", "sink:2+window:9"])
def test_with_a_cut_of_text(spec: str) -> None:
    """What a reducer of text leaves is what the policy chooses from, in every mode."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    with attach(model, "fastv@llm2:0.5?tokens=text", cache=spec) as trace:
        new, logits, _ = written(model, ids, 5)
        drafts = written(model, ids, 5, prompt_lookup_num_tokens=3)
        batch = written(model, padded([prompt(LENGTH), prompt(21, 1)]), 5)
        with pytest.raises(ModelError, match="prefill_chunk_size"):
            written(model, ids, 2, prefill_chunk_size=16)
    assert torch.equal(drafts[0], new)
    torch.testing.assert_close(batch[1][0], logits[0], atol=1e-5, rtol=0)
    assert [row.stage for row in trace.rows[:2]] == ["llm2", "kv"]


@pytest.mark.parametrize(
    "spec",
    [
        "keyformer:0.2+sink:2+window:14",
        "knorm:0.2+window:9",
        "sink:0.1+window:0.3",
        "snapkv:6+sink:0.1+window:0.3",
    ],
)
def test_drafts_that_come_with_the_prompt_are_no_part_of_it(spec: str) -> None:
    """An assistant's first drafts are read in one pass with the prompt, and taken back."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    torch.manual_seed(5)
    helper = type(model)(model.config).eval().to(model.dtype)
    helper.generation_config = copy.deepcopy(model.generation_config)
    helper.generation_config.assistant_confidence_threshold = 0
    with attach(model, cache=spec):
        alone = written(model, ids, 9)
        helped = written(model, ids, 9, assistant_model=helper)
        cache = alone[2].past_key_values
    assert torch.equal(helped[0], alone[0])
    torch.testing.assert_close(helped[1], alone[1], atol=1e-5, rtol=0)
    # What was chosen behind the prompt stays, beside a window of the size that the plan says.
    window = {"14": 14, "9": 9, "0.3": round(0.3 * LENGTH)}[spec.rpartition(":")[2]]
    sinks = 0 if "sink" not in spec else 2 if "sink:2" in spec else round(0.1 * LENGTH)
    chosen = {"keyformer": round(0.2 * LENGTH), "knorm": round(0.2 * LENGTH), "snapkv": 6}
    held = cache.layers[0].keys.shape[2] - 1  # the last token came behind the eviction
    assert held == window + sinks + chosen.get(spec.partition(":")[0], 0)


@pytest.mark.parametrize("spec", POLICIES)
def test_drafts_are_verified_on_what_is_left_of_the_prompt(spec: str) -> None:
    """A model that drafts for itself is right while nothing is gone; so all are accepted."""
    model, ids = text_model("llama"), {"input_ids": prompt(LENGTH)}
    if "fastkvzip" in spec:
        give_gates(model)
    helper = copy.deepcopy(model)
    helper.generation_config.assistant_confidence_threshold = 0
    with attach(model, cache=spec):
        alone = written(model, ids, 5)
        helped = written(model, ids, 5, assistant_model=helper)
    assert torch.equal(helped[0], alone[0])
    torch.testing.assert_close(helped[1], alone[1], atol=1e-5, rtol=0)


def test_chunked_prefill_equals_one_piece() -> None:
    model, ids = text_model("qwen3_moe"), {"input_ids": prompt(LENGTH)}
    for spec in ("snapkv:0.4?window=5", "knorm:0.5"):
        with attach(model, cache=spec):
            whole = written(model, ids, STEPS)
            parts = written(model, ids, STEPS, prefill_chunk_size=16)
        torch.testing.assert_close(parts[1], whole[1], atol=1e-5, rtol=0)


def test_a_policy_that_keeps_all_beside_windows_changes_nothing() -> None:
    """Behind a cut, a window and a full layer have lost the same; their masks are not the same."""
    model, both = text_model("gemma3"), padded([prompt(LENGTH), prompt(21, 1)])
    with attach(model, "random@llm0:0.6?tokens=text"):
        plain = written(model, both, STEPS)[1]
    with attach(model, "random@llm0:0.6?tokens=text", cache="knorm:60"):
        kept = written(model, both, STEPS)[1]
    torch.testing.assert_close(kept, plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("spec", ["window:6", "sink:2+window:5"])
def test_first_chunks_of_a_short_row_may_be_padding_alone(spec: str) -> None:
    model, rows = text_model("llama"), [prompt(LENGTH), prompt(LENGTH // 2, 1)]
    with attach(model, cache=spec):
        alone = [written(model, {"input_ids": r}, STEPS, prefill_chunk_size=8)[1] for r in rows]
        together = written(model, padded(rows), STEPS, prefill_chunk_size=8)[1]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("mistral_window", "snapkv:0.5", "sliding_attention, bounded by themselves"),
        ("falcon_h1", "quant:4", "packs whole layers"),
        ("falcon_h1", "snapkv:0.5+adakv", "packs whole layers"),
        ("gpt_neox", "expected_attention:0.5", "has no head_dim"),
        ("jamba", "expected_attention:0.5", "rotary positions"),
        ("codegen", "retrieve:4", "has no num_key_value_heads"),
    ],
)
def test_what_cannot_act_says_so(name: str, spec: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        attach(text_model(name), cache=spec)


def test_static_caches_are_refused_in_one_line() -> None:
    model = text_model("llama")
    static = {"cache_implementation": "static", "disable_compile": True}
    with (
        attach(model, cache="snapkv:0.5"),
        pytest.raises(ModelError, match="leave out cache_implementation"),
    ):
        written(model, {"input_ids": prompt(LENGTH)}, 2, **static)


def test_expected_queries_of_a_model_that_turns_a_part_of_a_head() -> None:
    model, ids = text_model("phi"), prompt(LENGTH)
    with attach(model, cache="expected_attention:0.4"):
        new, logits, out = written(model, {"input_ids": ids}, STEPS)
    visible = {i: kept(out.past_key_values.layers[i], LENGTH) for i in range(4)}
    want = hidden_steps(model, ids, new[0], visible).float()
    torch.testing.assert_close(logits[0], want, atol=1e-5, rtol=0)


def test_the_zoo_is_what_was_promised() -> None:
    assert {"llama", "gpt_oss", "gpt_neox", "mixtral", "qwen3_moe"} <= {*DENSE}
