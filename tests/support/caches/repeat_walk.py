"""What entries receive while a prompt is repeated: the stock layers, one by one, without sdpa.

A pass reads a copy of the cache of the whole prompt in layers of full attention, and nothing before
itself in the others.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import model_oracle as oracle
import numpy as np
import torch
from oracles_caches import oddest, repeated
from torch import Tensor

TAIL = 8


def received(
    walk: Any,
    prompt: oracle.Prompt,
    chunk: int,
    words: Sequence[Sequence[int]] = ((), (), ()),
    asks: float | None = None,
    mean: bool = False,
) -> dict[int, np.ndarray]:
    """Largest attention `[Hkv, N]` by layer; ids before a first and a later chunk, and behind.

    With `asks`, the oddest tokens of a chunk alone are read, in a row; `mean` is over query heads.
    """
    count, cache = len(prompt.embeds), walk.cache
    found = {i: np.zeros((cache.layers[i].keys.shape[1], count)) for i in walk.full}
    for at in range(0, count, chunk):
        here = list(range(at, min(at + chunk, count)))
        tail = list(range(max(0, at - TAIL), at))[-min(TAIL, chunk) :] if at else []
        if asks is None:
            seen = _pass(walk, prompt, here, tail, words)
        else:
            mine = [cache.layers[i].keys[0].double().numpy()[:, here] for i in walk.full]
            seen = _pass(walk, prompt, [here[i] for i in oddest(mine, asks)], [], words, True)
        for i, (query, new, scale) in seen.items():
            keys = cache.layers[i].keys[0].double().numpy()[:, here]
            found[i][:, here] = repeated(query, keys, new, scale, mean)
    return found


def _pass(
    walk: Any,
    prompt: Any,
    here: list[int],
    tail: list[int],
    words: Sequence[Sequence[int]],
    dense: bool = False,
) -> dict[int, tuple[np.ndarray, np.ndarray, float]]:
    """Queries and new keys of each layer of full attention, and the scale of its logits."""
    text, embed = walk.text, walk.tiny.model.get_input_embeddings()
    opening, later, closing = (torch.tensor(list(w), dtype=torch.long) for w in words)
    first = later if tail else opening
    hidden = torch.cat([embed(first), prompt.embeds[tail], embed(closing), prompt.embeds[here]])
    lead, own = len(hidden) - len(here), prompt.positions[..., here]
    start = int(prompt.positions.max()) + 1
    count = torch.arange(start, start + lead).expand(*own.shape[:-1], -1)
    positions = torch.cat([count, own + (start + lead - int(own.min()))], -1)
    if dense:
        positions = torch.arange(start, start + len(here)).expand(own.shape)
    planes = [
        torch.cat([0 * embed(first), plane[tail], 0 * embed(closing), plane[here]])
        for plane in prompt.planes
    ]
    seen, cache = {}, copy.deepcopy(walk.cache)
    for index, layer in enumerate(text.layers):
        hidden, mine = _layer(walk, index, layer, hidden, positions, cache)
        if index < len(planes):
            hidden = hidden + planes[index]
        if index in walk.full:
            seen[index] = mine
    return seen


def _layer(
    walk: Any, index: int, layer: Any, hidden: Tensor, positions: Tensor, cache: Any
) -> tuple[Tensor, Any]:
    kind, text, n = walk.kinds[index], walk.text, len(hidden)
    past = cache.layers[index].keys.shape[2] if index in walk.full else 0
    seen = torch.ones(n, past + n).tril(past).bool()
    if kind == "sliding_attention":
        seen &= torch.ones(n, n).triu(1 - text.config.sliding_window).bool()
    low = torch.finfo(hidden.dtype).min
    mask = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, low)[None, None]
    places = positions[None] if positions.ndim == 1 else positions[:, None]
    by_kind = [kind] if hasattr(text.rotary_emb, "layer_types") else []
    found: list[Any] = []
    attention = getattr(layer, "self_attn", None)
    home = sys.modules[type(attention if attention is not None else layer).__module__]
    stock = home.eager_attention_forward

    def look(module: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        parts = query[0].double().numpy(), key[0, :, past:].double().numpy()
        found.append((*parts, float(module.scaling)))
        return stock(module, query, key, *rest, **kwargs)

    with patch.object(home, "eager_attention_forward", look), torch.no_grad():
        out = layer(
            hidden[None],
            attention_mask=None if kind == "conv" else mask,
            position_embeddings=text.rotary_emb(hidden[None], places, *by_kind),
            past_key_values=cache if index in walk.full else None,
        )
    return (out[0] if isinstance(out, tuple) else out)[0], found[0] if found else None
