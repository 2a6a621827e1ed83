"""A random Llama under the presses of kvpress, in an environment that need not have mmfast.

A line of JSON on the input names a press, its options and the seed of a prompt; the answer is the
processor time of its hooks, and a file with the entries that each head keeps.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


def random_llama(sizes: Mapping[str, Any]) -> Any:
    """Return a Llama whose weights depend on the names of its parameters alone."""
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" in name:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5, generator=generator)
    return model


def prompt_of(seed: int, tokens: int, vocabulary: int) -> Tensor:
    """Return random ids `[1, n]`."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (1, tokens), generator=drawn)


@torch.no_grad()
def keys_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the keys `[H, n, d]` of each layer behind a prompt."""
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"
    model(ids, **{name: cache}, use_cache=True, logits_to_keep=1)
    return [layer.keys[0].clone() for layer in cache.layers]


def entries(kept: Tensor, known: Tensor) -> Tensor:
    """Return the places `[H, m]`, ascending, of kept keys `[H, m, d]` among all of them."""
    marks, given = _marks(known), _marks(kept)
    order = marks.argsort(-1)
    places = torch.searchsorted(marks.gather(-1, order), given)
    found = order.gather(-1, places.clamp(max=marks.shape[-1] - 1))
    if not torch.equal(marks.gather(-1, found), given):
        raise ValueError("a kept key is none of the prompt's")
    return found.sort(-1).values


def _marks(keys: Tensor) -> Tensor:
    """Return a number for each key, the same for the same bits."""
    return keys[..., 0].double() + 3e4 * keys[..., 1].double()


def main() -> None:
    """Answer requests until the input ends."""
    import kvpress

    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    model, spent = random_llama(given["sizes"]), 0.0
    stock = kvpress.BasePress.forward_hook

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        start = time.process_time()
        found = stock(*args, **kwargs)
        spent += time.process_time() - start
        return found

    kvpress.BasePress.forward_hook = timed
    whole: dict[int, list[Tensor]] = {}
    print(json.dumps({"release": "kvpress"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        ids = prompt_of(asked["seed"], given["tokens"], given["sizes"]["vocab_size"])
        if asked["seed"] not in whole:
            whole = {asked["seed"]: keys_of(model, ids)}
        press, spent = _made(kvpress, asked), 0.0
        with press(model):
            left = keys_of(model, ids)
        both = zip(left, whole[asked["seed"]], strict=True)
        path = Path(asked["file"])
        torch.save([entries(kept, known) for kept, known in both], path)
        print(json.dumps({"ms": spent * 1e3}), flush=True)


def _made(module: Any, asked: Mapping[str, Any]) -> Any:
    """Return the press that a request describes; one inside another is an option of its own."""
    options = {
        name: _made(module, value) if isinstance(value, dict) else value
        for name, value in asked["options"].items()
    }
    return getattr(module, asked["press"])(**options)


if __name__ == "__main__":
    main()
