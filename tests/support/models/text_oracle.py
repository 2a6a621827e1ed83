"""What a cut of text must equal: the stock model, which drops nothing and hides what is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction

RECURRENT = ("conv", "linear_attention")


def living(
    length: int, reductions: Sequence[tuple[str, int, Reduction]], last: int, row: int = 0
) -> list[tuple[int, Tensor]]:
    """By cut its layer, and the places alive from there on, `[length]` bool.

    A reduction acts on all tokens that are alive but the `last` ones of the prompt.
    """
    alive = torch.ones(length, dtype=torch.bool)
    found = []
    for site, number, reduction in reductions:
        if number != row:
            continue
        places = alive[: length - last].nonzero()[:, 0]
        assert reduction.n == len(places)
        alive = alive.clone()
        alive[places] = False
        alive[places[reduction.keep]] = True
        found.append((0 if site == "pre" else int(site[3:]), alive))
    return found


def hidden_from(model: Any, ids: Tensor, cuts: Sequence[tuple[int, Tensor]]) -> Tensor:
    """Logits `[L, V]` of a stock pass over `ids` `[1, L]` without a cache.

    From the layer of a cut on, tokens that are not alive are hidden as keys; layers that remember a
    state run on the living. Tokens behind those of a cut live.
    """
    text = model.get_decoder()
    layers = text.layers if hasattr(text, "layers") else text.h
    kinds = getattr(text.config, "layer_types", None)
    if not kinds:
        window = getattr(text.config, "sliding_window", None)
        kinds = ["full_attention" if window is None else "sliding_attention"] * len(layers)
    with ExitStack() as stack:
        for index, layer in enumerate(layers):
            alive = torch.ones(ids.shape[1], dtype=torch.bool)
            for start, mask in cuts:
                if start <= index:
                    alive[: len(mask)] &= mask
            if kinds[index] in (*RECURRENT, "hybrid"):
                forward = layer.forward
                layer.forward = partial(_on_the_living, forward, alive, kinds[index] == "hybrid")
                stack.callback(delattr, layer, "forward")
                continue
            hook = partial(_hide, mask_of(text, kinds[index], alive))
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        return model(ids, use_cache=False).logits[0]


def mask_of(text: Any, kind: str, alive: Tensor) -> Tensor:
    """Additive mask `[1, 1, L, L]` of a layer; a window counts the living."""
    length = len(alive)
    seen = torch.ones(length, length).tril().bool()
    if kind == "sliding_attention":
        rank = alive.cumsum(0)
        seen &= rank[:, None] - rank[None] < text.config.sliding_window
    seen &= alive[None] | torch.eye(length, dtype=torch.bool)
    dtype = text.dtype
    return torch.zeros(1, 1, length, length, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def _hide(mask: Tensor, module: Any, args: Any, kwargs: Any) -> Any:
    if len(args) > 2:  # GPT-2: hidden states, cache, mask
        return (*args[:2], mask, *args[3:]), kwargs
    return args, {**kwargs, "attention_mask": mask}


def _on_the_living(
    forward: Any, alive: Tensor, attends: bool, hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer on the living tokens alone, in the stock way of a prompt of so many."""
    n = int(alive.sum())
    kwargs = dict(kwargs)
    places = kwargs.get("position_embeddings")
    if places is not None:
        kwargs["position_embeddings"] = tuple(each[:, alive] for each in places)
    for name in ("attention_mask", "mamba_attention_mask", "position_ids"):
        kwargs.pop(name, None)
    causal = torch.full((1, 1, n, n), torch.finfo(hidden.dtype).min, dtype=hidden.dtype).triu(1)
    kwargs["attention_mask"] = causal if attends else None
    out = forward(hidden[:, alive], *args, **kwargs)
    first = out[0] if isinstance(out, tuple) else out
    whole = hidden.clone()
    whole[:, alive] = first
    return (whole, *out[1:]) if isinstance(out, tuple) else whole
