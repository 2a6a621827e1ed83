"""Helpers that several tests share: cache questions."""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest.mock import patch

import cache_oracle
import model_oracle as oracle
import numpy as np
import repeat_walk
import torch
from gate_models import by_hand, give_gates
from oracles_caches import ORACLES, Layer, mutual, visual_attention
from tiny_models import Tiny, build

# Policy, its budget and its knobs; the window is short, as these prompts are.
SCORES = {
    "snapkv:0.4?window=5&kernel=3": ("snapkv", 0.4, {"window": 5, "kernel": 3}),
    "fastkv:13?window=3": ("fastkv", 13, {"window": 3}),
    "finch:0.4?window=3&chunk=12": ("finch", 0.4, {"window": 3, "chunk": 12}),
    "keynorm:0.5?group=16": ("keynorm", 0.5, {"group": 16}),
    "keyformer:0.3": ("keyformer", 0.3, {}),
    "lookm:0.45": ("lookm", 0.45, {}),
    "lookm:15?merge=averaged": ("lookm", 15, {"merge": "averaged"}),
    "zipvl:0.5?low=0": ("zipvl", 0.5, {}),
    "random:0.4?seed=3": ("random", 0.4, {"seed": 3}),
    "tova:0.4": ("tova", 0.4, {}),
    "keydiff:0.4": ("keydiff", 0.4, {}),
    "lagkv:0.5?sink=2&lag=4": ("lagkv", 0.5, {"sink": 2, "lag": 4}),
    "curdkv:0.4?sink=2": ("curdkv", 0.4, {"sink": 2}),
    "criticalkv:0.5?window=3&first=0.3": ("criticalkv", 0.5, {"window": 3, "first": 0.3}),
    "expected_attention:0.4?future=9": ("expected_attention", 0.4, {"future": 9}),
    "mixkv:0.4?window=3": ("mixkv", 0.4, {"window": 3}),
    "infinipot_v:0.5": ("infinipot_v", 0.5, {}),
    "streammem:0.5?window=3": ("streammem", 0.5, {"window": 3}),
    "livevlm:0.5?window=3&recent=0.1": ("livevlm", 0.5, {"window": 3, "recent": 0.1}),
    "knorm:0.4": ("knorm", 0.4, {}),
    "kvcompose:0.4?chunk=9&first=false": ("kvcompose", 0.4, {"chunk": 9, "first": False}),
    "kvcompose:0.3?chunk=100&first=true": ("kvcompose", 0.3, {"chunk": 100, "first": True}),
    "capkv:0.4?future=9": ("capkv", 0.4, {"future": 9}),
    "entropy_chunkkv:0.4?window=3&chunk=4&few=2": (
        "entropy_chunkkv",
        0.4,
        {"window": 3, "chunk": 4, "few": 2},
    ),
    "cam:0.45?merge=3": ("cam", 0.45, {"merge": 3}),
    "vatp:0.4?sink=2": ("vatp", 0.4, {"sink": 2}),
    "leverage:0.4?rank=0": ("leverage", 0.4, {"rank": 0}),
    "compactor:0.4?chunk=7&sink=2&recent=3": (
        "compactor",
        0.4,
        {"chunk": 7, "sink": 2, "recent": 3},
    ),
    "kvzip:0.4?chunk=9": ("kvzip", 0.4, {"chunk": 9}),
    "kvsquared:0.4?chunk=9&asks=0.3": ("kvsquared", 0.4, {"chunk": 9, "asks": 0.3}),
    "fastkvzip:0.4?sink=2&recent=0.1": ("fastkvzip", 0.4, {"sink": 2, "recent": 0.1}),
    "pyramidkv:0.5?window=3&kernel=3": ("pyramidkv", 0.5, {"window": 3, "kernel": 3}),
    "simlayerkv:0.4?threshold=0&window=3": ("simlayerkv", 0.4, {"threshold": 0.0, "window": 3}),
    "chunkkv:0.4?window=3&chunk=4": ("chunkkv", 0.4, {"window": 3, "chunk": 4}),
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


def frames(this: Tiny, inputs: dict[str, Any], prompt: oracle.Prompt) -> list[torch.Tensor]:
    """Places of the tokens of each frame."""
    if "video" not in this.facts.kinds:
        return prompt.items  # each picture is a block
    (item,) = prompt.items
    grid = inputs.get("video_grid_thw")
    return list(item.chunk(this.shape.frames if grid is None else int(grid[0, 0])))


def raw(this: Tiny, inputs: dict[str, Any], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys `[heads, L, d]` before RoPE, from the projections."""
    attention = this.model.get_decoder().layers[layer].self_attn
    found: dict[str, torch.Tensor] = {}
    handles = [
        getattr(attention, f"{name}_proj").register_forward_hook(
            lambda _m, _a, out, name=name: found.__setitem__(name, out)
        )
        for name in "qk"
    ]
    try:
        this.model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    heads = {n: x[0].unflatten(-1, (-1, attention.head_dim)) for n, x in found.items()}
    for name in "qk":
        norm = getattr(attention, f"{name}_norm", getattr(attention, f"{name}_layernorm", None))
        heads[name] = heads[name] if norm is None else norm(heads[name])
    return heads["q"].transpose(0, 1), heads["k"].transpose(0, 1)


def _expected(this: Tiny, walk: cache_oracle.Walk, index: int, future: int, sink: int) -> Any:
    """Mean and covariance of the turned queries, by a rotation matrix for every position."""
    query, key = raw(this, ask(this), index)
    attention, rotary = walk.text.layers[index].self_attn, walk.text.rotary_emb
    start, matrices = walk.position.reshape(-1)[-1], []
    for step in range(1, future + 1):
        place = (start + step).expand(3 if hasattr(rotary, "mrope_section") else 1, 1, 1)
        place = place if len(place) == 3 else place[0]
        kinds = [walk.kinds[index]] if hasattr(rotary, "layer_types") else []
        cos, sin = (x[0, 0].double() for x in rotary(query.float(), place, *kinds))
        half = len(cos) // 2
        swap = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
        swap[:half, half:], swap[half:, :half] = -torch.eye(half), torch.eye(half)
        matrices.append(torch.diag(cos) + sin[:, None] * swap)
    turn = torch.stack(matrices).mean(0)
    rows = query[:, sink:].double() @ turn.T * attention.scaling  # [Hq, T, d]
    mean = rows.mean(1)
    away = rows - mean[:, None]
    cov = away.transpose(1, 2) @ away / rows.shape[1]
    return [x.unflatten(0, (len(key), -1)).numpy() for x in (mean, cov)]


@functools.cache
def model_of(family: str, attention: str = "sdpa") -> Tiny:
    """Keys of unlike length, in the families, too, that normalise them; and gates."""
    this = build(family, attention=attention)
    torch.manual_seed(1)
    for name, weight in this.model.get_decoder().named_parameters():
        if "k_norm" in name or "k_layernorm" in name:
            weight.uniform_(0.3, 1.7)
    give_gates(this.model)
    return this


@functools.cache
def gates(family: str) -> dict[int, np.ndarray]:
    """Scores `[H, L]` of every layer, of the gates of `model_of`."""
    this = model_of(family)
    return by_hand(this.model, ask(this), give_gates(this.model))


@functools.cache
def attentions(family: str) -> Any:
    """Attention `[1, H, L, L]` of every layer of a stock prefill without sdpa; None elsewhere."""
    with torch.no_grad():
        this = model_of(family, "eager")
        return this.model(**ask(this), output_attentions=True).attentions


@functools.cache
def queries(family: str) -> dict[int, np.ndarray]:
    """Queries `[Hq, L, d]` as each layer attends with them, of a stock prefill without sdpa."""
    this, found = model_of(family, "eager"), dict[int, np.ndarray]()
    for index, layer in enumerate(this.model.get_decoder().layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            continue
        home = sys.modules[type(attention).__module__]
        stock = home.eager_attention_forward

        def seen(module: Any, query: Any, *rest: Any, **kwargs: Any) -> Any:
            if module is attention:  # noqa: B023
                found[index] = query[0].double().numpy()  # noqa: B023
            return stock(module, query, *rest, **kwargs)  # noqa: B023

        with patch.object(home, "eager_attention_forward", seen), torch.no_grad():
            this.model(**ask(this))
    return found


def _added(attention: Any, values: Any) -> Any:
    """What each value alone adds to the output, one query head at a time; `[Hkv, L]`."""
    name = "o_proj" if hasattr(attention, "o_proj") else "out_proj"
    weight = getattr(attention, name).weight.detach().double().numpy()  # [D, Hq * d]
    width = values.shape[-1]
    groups = weight.shape[1] // width // len(values)
    found = np.zeros(values.shape[:2])
    for head in range(len(values)):
        for part in range(head * groups, (head + 1) * groups):
            block = weight[:, part * width : (part + 1) * width]
            found[head] += [np.abs(block @ v).sum() / groups for v in values[head]]
    return found


def layer_of(
    this: Tiny, walk: cache_oracle.Walk, index: int, kind: list[int], knobs: dict[str, Any]
) -> Any:
    inputs = ask(this)
    numbers, spots = [-1] * len(kind), [-1] * len(kind)
    for number, places in enumerate(frames(this, inputs, oracle.embed(this, inputs))):
        for spot, place in enumerate(places.tolist()):
            numbers[place], spots[place] = number, spot
    held, weights = walk.cache.layers[index], attentions(this.family)
    weights = weights[walk.full.index(index) if len(weights) < len(walk.kinds) else index]
    heads = held.keys.shape[1]
    weights = weights[0].double().unflatten(0, (heads, -1)).mean(1).numpy()  # [Hkv, L, L]
    keys = held.keys[0].double().numpy()
    values = held.values[0].double().numpy()
    depth = walk.full.index(index), len(walk.full)
    out = _added(walk.text.layers[index].self_attn, values)
    query = _expected(this, walk, index, knobs["future"], 4) if "future" in knobs else ()
    window = knobs.get("window", 1)
    attn, recent = (weights[:, -window:].mean(1), weights.sum(1)), weights[:, -window:]
    found = Layer(keys, kind, *attn, index, depth, values, numbers, spots, out, *query)
    found.counted = (recent * (recent > 0).sum(-1, keepdims=True)).sum(1)
    if {"recent", "chunk"} <= {*knobs}:
        found.mutual = mutual(queries(this.family)[index], keys, **knobs)
    if {*knobs} == {"sink", "recent"}:
        found.gated = gates(this.family)[index]
    if {*knobs} == {"window", "recent"}:
        asks = [place for place, each in enumerate(kind) if each == 1][-window:]
        scale = walk.text.layers[index].self_attn.scaling
        found.vision = visual_attention(queries(this.family)[index], keys, asks, scale)
    if {*knobs} in ({"chunk"}, {"chunk", "asks"}):
        found.repeated = repeats(this.family, **knobs)[index]
    if {*knobs} == {"chunk", "first"}:
        whole = repeats(this.family, knobs["chunk"], 1.0, True)
        found.repeated, found.layers = whole[index], [whole[i] for i in walk.full]
    return found


@functools.cache
def repeats(
    family: str, chunk: int, asks: float | None = None, mean: bool = False
) -> dict[int, np.ndarray]:
    """What entries get while the prompt is repeated, without sdpa and with no word before it."""
    this = model_of(family, "eager")
    prompt = oracle.embed(this, ask(this))
    walk = cache_oracle.Walk(this, prompt)
    return repeat_walk.received(walk, prompt, chunk, asks=asks, mean=mean)


def answers(
    this: Tiny, walk: cache_oracle.Walk, kind: list[int], method: str, budget: Any, knobs: Any
) -> dict[int, Any]:
    """What a slow policy makes of every layer."""
    number = budget if isinstance(budget, int) else round(budget * len(kind))
    rest = dict(knobs)
    return {
        i: ORACLES[method](layer_of(this, walk, i, kind, knobs), number, **rest) for i in walk.full
    }
