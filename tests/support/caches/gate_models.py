"""Gates with random weights for tiny models, and their scores by the slow version."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracles_caches import gate

from mmfast.models.kv.gates import KeyGate
from mmfast.models.kv.patterns import HeadPatterns, read_modules

Weights = dict[int, dict[str, np.ndarray]]


def give_gates(model: Any, seed: int = 0) -> Weights:
    """Give a model gates that tell tokens apart; their weights by layer."""
    generator, config = torch.Generator().manual_seed(seed), model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    groups, made = config.num_attention_heads // heads, dict[int, KeyGate]()
    for index in read_modules(model):
        made[index] = KeyGate(config.hidden_size, heads, groups, rank=4, sinks=3)
        for name, weight in made[index].named_parameters():
            weight.data.normal_(0.5 if "scale" in name else 0.0, 1.0, generator=generator)
    filters = {index: torch.zeros(heads, 8) for index in made}
    HeadPatterns(filters, {index: torch.zeros(heads) for index in made}, made).use(model)
    return {
        index: {name: x.double().numpy() for name, x in each.state_dict().items()}
        for index, each in made.items()
    }


def by_hand(model: Any, inputs: dict[str, Any], weights: Weights) -> dict[int, np.ndarray]:
    """Scores `[H, N]` by layer of the one row of a stock pass."""
    found, handles = dict[int, np.ndarray](), []
    for index, module in read_modules(model).items():

        def look(_: Any, args: Any, kwargs: Any, index: int = index) -> None:
            states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            found[index] = gate(states[0].double().numpy(), weights[index])

        handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found
