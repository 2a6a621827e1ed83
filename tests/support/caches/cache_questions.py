"""Helpers that several tests share: cache questions."""

from __future__ import annotations

import functools
from typing import Any

import cache_oracle
import model_oracle as oracle
import torch
from oracles_caches import ORACLES, Layer
from tiny_models import Tiny, build

# Policy, its budget and its knobs; the window is short, as these prompts are.
SCORES = {
    "snapkv:0.4?window=5&kernel=3": ("snapkv", 0.4, {"window": 5, "kernel": 3}),
    "fastkv:13?window=3": ("fastkv", 13, {"window": 3}),
    "keynorm:0.5?group=16": ("keynorm", 0.5, {"group": 16}),
    "keyformer:0.3": ("keyformer", 0.3, {}),
    "lookm:0.45": ("lookm", 0.45, {}),
    "lookm:15?merge=averaged": ("lookm", 15, {"merge": "averaged"}),
    "zipvl:0.5?low=0": ("zipvl", 0.5, {}),
}


def ask(this: Tiny) -> dict[str, Any]:
    kind = "video" if "video" in this.facts.kinds else "image"
    return this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1))


def kinds_of(this: Tiny, inputs: dict[str, Any], prompt: oracle.Prompt) -> list[int]:
    """Text 0, visual 1, separators 2, by hand."""
    ids, config = inputs["input_ids"][0].tolist(), this.model.config
    visual = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
    content = set(torch.cat(prompt.items).tolist())
    return [0 if t not in visual else 1 if i in content else 2 for i, t in enumerate(ids)]


@functools.cache
def model_of(family: str, attention: str = "sdpa") -> Tiny:
    """Keys of unlike length, in the families, too, that normalise them."""
    this = build(family, attention=attention)
    torch.manual_seed(1)
    for name, weight in this.model.get_decoder().named_parameters():
        if "k_norm" in name or "k_layernorm" in name:
            weight.uniform_(0.3, 1.7)
    return this


@functools.cache
def attentions(family: str) -> Any:
    """Attention `[1, H, L, L]` of every layer of a stock prefill without sdpa; None elsewhere."""
    with torch.no_grad():
        this = model_of(family, "eager")
        return this.model(**ask(this), output_attentions=True).attentions


def layer_of(this: Tiny, walk: cache_oracle.Walk, index: int, kind: list[int], window: int) -> Any:
    held, weights = walk.cache.layers[index], attentions(this.family)
    weights = weights[walk.full.index(index) if len(weights) < len(walk.kinds) else index]
    heads = held.keys.shape[1]
    weights = weights[0].double().unflatten(0, (heads, -1)).mean(1).numpy()  # [Hkv, L, L]
    keys = held.keys[0].double().numpy()
    return Layer(keys, kind, weights[:, -window:].mean(1), weights.sum(1), index)


def answers(
    this: Tiny, walk: cache_oracle.Walk, kind: list[int], method: str, budget: Any, knobs: Any
) -> dict[int, Any]:
    """What a slow policy makes of every layer."""
    number = budget if isinstance(budget, int) else round(budget * len(kind))
    rest = dict(knobs)
    window = knobs.get("window", 1)
    return {
        i: ORACLES[method](layer_of(this, walk, i, kind, window), number, **rest) for i in walk.full
    }
