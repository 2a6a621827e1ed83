"""Layers of one cache that lose unlike numbers of entries, in batches of ragged rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from text_zoo import padded, prompt, text_model, written

import mmfast
from mmfast.attach import attach
from mmfast.core.registry import register, unregister

LAYERS = {"first": (0, 1), "last": (3,), "all": (0, 1, 2, 3)}


@pytest.fixture(params=LAYERS)
def some_layers(request: pytest.FixtureRequest) -> Iterator[str]:
    """A policy that cuts some layers and keeps the others whole."""
    cut = LAYERS[request.param]

    @register(
        "some_layers", kind="cache", needs=("layer",), role="score", sites=("kv",), uneven=True
    )
    def some_layers(tokens: mmfast.Tokens, budget: int) -> mmfast.Reduction:
        """Keep the last tokens in a few layers."""
        if int(tokens.need("layer")) not in cut:
            return mmfast.Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]))
        keep = torch.arange(tokens.n - budget, tokens.n)
        return mmfast.Reduction.prune(keep.expand(*tokens.x.shape[:-2], -1), tokens.n)

    yield "some_layers:7"
    unregister("some_layers", "cache")


def steps(model: Any, spec: str, **inputs: Any) -> torch.Tensor:
    """Logits `[B, 6, V]` of greedy steps."""
    with attach(model, cache=spec):
        return written(model, inputs)[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_whole_layer_beside_a_cut_one_under_left_padding(family: str, some_layers: str) -> None:
    model = text_model(family)
    rows = [prompt(24), prompt(31, 1), prompt(40, 2)]
    found = steps(model, some_layers, **padded(rows))
    for row, ids in enumerate(rows):
        alone = steps(model, some_layers, input_ids=ids)
        torch.testing.assert_close(found[row : row + 1], alone, atol=1e-5, rtol=1e-5)


def held(spec: str) -> tuple[int, int]:
    """Bytes of memory behind keys, values and notes after a prompt of 60 tokens, and of these."""
    model = text_model("llama")
    with attach(model, cache=spec), torch.no_grad():
        cache = model(prompt(60), use_cache=True).past_key_values
    found = [x for layer in cache.layers for x in (layer.keys, layer.values, *layer.notes.values())]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}
    return sum(storages.values()), sum(x.nbytes for x in found)


SHORT = ["knorm:6", "window:6", "sink:2+window:4+curdkv:4?rank=0", "h2o:6", "snapkv:0.1?every=9"]


@pytest.mark.parametrize("spec", SHORT)
def test_a_short_cache_holds_no_memory_of_a_long_one(spec: str) -> None:
    memory, used = held(spec)
    assert memory <= used


def test_a_view_of_a_long_cache_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def views(keys: Any, values: Any, index: torch.Tensor) -> Any:
        return tuple(x[:, :, -index.shape[-1] :] for x in (keys, values))

    monkeypatch.setattr("mmfast.caches.store.selected", views)
    memory, used = held("knorm:6")
    assert memory > used
