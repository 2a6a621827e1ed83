"""The entries that kvpress keeps of a random Llama, recorded from its public presses, are ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cache_oracle
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from mmfast.attach import attach
from mmfast.models.kv import repetition
from mmfast.models.kv.patterns import HeadPatterns

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/kvpress.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def model() -> Any:
    """The weights of the record: parameters in the order of their names from one generator."""
    made = LlamaForCausalLM(LlamaConfig(**GOLDEN["sizes"])).eval()
    generator = torch.Generator().manual_seed(GOLDEN["seed"])
    with torch.no_grad():
        for name, weight in sorted(made.named_parameters()):
            drawn = (
                torch.randn(weight.shape, generator=generator) * 0.3 if "norm" not in name else 1
            )
            weight.copy_(torch.as_tensor(drawn))
    return made


@pytest.mark.parametrize("case", GOLDEN["channels"], ids=lambda case: case["spec"])
def test_the_same_channels_go(model: Any, case: dict[str, Any]) -> None:
    ids, cache = torch.tensor([case["ids"]]), DynamicCache(config=model.config)
    with attach(model, cache=case["spec"]), torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for layer, heads in zip(cache.layers, case["gone"], strict=True):
        keys = layer.whole()[0][0]  # [H, n, d]
        assert [(head == 0).all(0).nonzero()[:, 0].tolist() for head in keys] == heads


@pytest.mark.parametrize("case", GOLDEN["merges"], ids=lambda case: case["spec"])
def test_the_same_values_are_merged(model: Any, case: dict[str, Any]) -> None:
    """A prompt of one token, and an answer; the cache is thinned when one more token comes."""
    cache, told = DynamicCache(config=model.config), [*case["ids"], 0, 0]
    with attach(model, cache=case["spec"]):
        model.generate(
            torch.tensor([told[:1]]),
            past_key_values=cache,
            max_new_tokens=len(told) - 1,
            pad_token_id=0,
            eos_token_id=64,  # which no token is
            prefix_allowed_tokens_fn=lambda _, said: told[len(said) : len(said) + 1],
        )
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            theirs = torch.tensor(case[name][index])
            assert layer.keys.shape[2] == theirs.shape[1] + 1
            ours = getattr(layer, name)[0, :, :-1]
            # Recorded on another processor, whose sums round otherwise at every one of the steps.
            torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["spec"])
def test_the_same_entries_stay(
    model: Any, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, cache = torch.tensor([case["ids"]]), DynamicCache(config=model.config)
    if "filters" in case:  # given to both
        filters, reach = (torch.tensor(case[name]) for name in ("filters", "reach"))
        HeadPatterns(dict(enumerate(filters)), dict(enumerate(reach))).use(model)
    if "words" in case:  # of the request to repeat
        monkeypatch.setattr(repetition, "request_ids", lambda _: case["words"])
    with attach(model, cache=case["spec"]), torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    for index, heads in enumerate(case["kept"]):
        seen = cache_oracle.kept(cache, index, ids.shape[1])
        assert [row.nonzero()[:, 0].tolist() for row in seen] == heads
