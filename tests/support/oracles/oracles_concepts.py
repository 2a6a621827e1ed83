"""A slow, obvious CompLLM: a Llama-like model with a LoRA, written out token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def rms(x: Array, weight: Array, small: float) -> Array:
    return weight * x / math.sqrt(float((x * x).mean()) + small)


def turn(x: Array, place: int, theta: float) -> Array:
    """Rotate the pairs (i, i + half) of a head."""
    half, out = len(x) // 2, x.copy()
    for i in range(half):
        angle = place * theta ** (-2 * i / len(x))
        a, b = x[i], x[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def product(x: Array, stock: Weights, lora: Weights, scale: float, name: str) -> Array:
    """A linear layer with its low-rank part; no LoRA, no part."""
    out = stock[f"{name}.weight"] @ x
    if f"{name}.bias" in stock:
        out = out + stock[f"{name}.bias"]
    at = name.replace(".", "/")
    if f"down.{at}" in lora:
        out = out + scale * (lora[f"up.{at}"] @ (lora[f"down.{at}"] @ x))
    return out


def hidden(rows: list[Array], stock: Weights, lora: Weights, config: Any, scale: float) -> Array:
    """Last hidden states of a sequence of embeddings, token by token, head by head."""
    heads, groups, small = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
    )
    theta = config.rope_parameters["rope_theta"]
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    states = [row.copy() for row in rows]
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        queries, keys, values = [], [], []
        for place, state in enumerate(states):
            x = rms(state, stock[f"{at}.input_layernorm.weight"], small)
            q, k, v = (
                product(x, stock, lora, scale, f"{at}.self_attn.{n}_proj").reshape(-1, size)
                for n in "qkv"
            )
            for name, table in (("q", q), ("k", k)):
                for head in range(len(table)):
                    if f"{at}.self_attn.{name}_norm.weight" in stock:
                        norm = stock[f"{at}.self_attn.{name}_norm.weight"]
                        table[head] = rms(table[head], norm, small)
                    table[head] = turn(table[head], place, theta)
            queries.append(q)
            keys.append(k)
            values.append(v)
        for place in range(len(states)):
            mixed = []
            for head in range(heads):
                group = head * groups // heads
                scores = [
                    float(queries[place][head] @ keys[i][group]) / math.sqrt(size)
                    for i in range(place + 1)
                ]
                powers = [math.exp(score - max(scores)) for score in scores]
                shares = [power / sum(powers) for power in powers]
                mixed.append(sum(s * values[i][group] for i, s in enumerate(shares)))
            joined = np.concatenate(mixed)
            states[place] = states[place] + product(
                joined, stock, lora, scale, f"{at}.self_attn.o_proj"
            )
            x = rms(states[place], stock[f"{at}.post_attention_layernorm.weight"], small)
            gate = product(x, stock, lora, scale, f"{at}.mlp.gate_proj")
            up = product(x, stock, lora, scale, f"{at}.mlp.up_proj")
            inner = gate / (1 + np.exp(-gate)) * up
            states[place] = states[place] + product(
                inner, stock, lora, scale, f"{at}.mlp.down_proj"
            )
    return np.stack([rms(state, stock["norm.weight"], small) for state in states])


def concepts(part: Array, stock: Weights, lora: Weights, config: Any, **how: Any) -> list[Array]:
    """Embeddings of one segment `[S, D]` at a rate."""
    count = math.ceil(len(part) / how["rate"])
    rows = [*part, *[lora["mark"]] * count]
    told = hidden(rows, stock, lora, config, how["scale"])[len(part) :]
    return [lora["leave.weight"] @ each + lora["leave.bias"] for each in told]


def context(
    embedded: Array, last: int, stock: Weights, lora: Weights, config: Any, first: int, **how: Any
) -> Array:
    """A prompt `[L, D]`: all but its first and last tokens in segments."""
    rows, at, end = list(embedded[:first]), first, len(embedded) - last
    while at < end:
        stop = min(at + how["segment"], end)
        rows += concepts(embedded[at:stop], stock, lora, config, **how)
        at = stop
    return np.stack([*rows, *embedded[end:]])
