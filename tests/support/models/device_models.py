"""Tiny models on the CPU and on the device of the tests, and what a run there must agree on."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from devices import DEVICE
from gate_models import give_gates
from text_zoo import text_model
from tiny_models import Tiny, build, generate

from mmfast.attach import attach
from mmfast.core.errors import MmfastError
from mmfast.models.kv.patterns import HeadPatterns, read_modules

HOST = torch.device("cpu")
TEXTS = ("on {x} what?", "so what is {x} then, in a longer question?")
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16")}
FAR = 1e-3  # of logits in float32, whose sums run in another order


@functools.lru_cache(maxsize=12)
def placed(
    family: str, device: torch.device = DEVICE, dtype: torch.dtype = torch.float32, **shape: Any
) -> Tiny:
    """The tiny model of a family on a device; the same weights everywhere."""
    this = build(family, **shape)
    this.model.to(device, dtype)
    return this


@functools.lru_cache(maxsize=12)
def text_placed(
    name: str, device: torch.device = DEVICE, dtype: torch.dtype = torch.float32
) -> Any:
    """A tiny model of text alone on a device."""
    return copy.deepcopy(text_model(name)).to(device, dtype)


def moved(
    inputs: Any, device: torch.device = DEVICE, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Inputs of a model on its device, in its precision."""
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in inputs.items()
    }


def asked(this: Tiny, rows: int = 2, kind: str = "") -> dict[str, Any]:
    """A ragged batch of questions about one medium each."""
    kind = kind or ("video" if "video" in this.facts.kinds else "image")
    texts = [text.replace("{x}", f"{{{kind}}}") for text in TEXTS[:rows]]
    return this.inputs(texts, **this.media(kind, rows))


def answered(this: Tiny, tokens: int = 4, rows: int = 2, **stages: Any) -> Any:
    """Tokens and logits `[T, B, V]` of an attached model, and its trace; or the error it gives."""
    device, dtype = this.model.device, this.model.dtype
    inputs, how = moved(asked(this, rows), device, dtype), stages.pop("how", {})
    try:
        with attach(this.model, **stages) as trace:
            out = generate(this, inputs, tokens, **how)
    except MmfastError as error:
        return str(error)
    return out.sequences.cpu(), torch.stack(list(out.logits)).cpu(), trace


def agree(here: Any, there: Any, far: float = FAR) -> None:
    """Hold that a run on the device kept what the run on the CPU kept, and said the same."""
    if isinstance(here, str) or isinstance(there, str):
        assert here == there
        return
    if same_tokens_kept(here[2], there[2]):
        torch.testing.assert_close(there[1][0], here[1][0], atol=far, rtol=far)
        assert torch.equal(there[0], here[0])
        torch.testing.assert_close(there[1], here[1], atol=far, rtol=far)


def same_tokens_kept(here: Any, there: Any) -> bool:
    """Tell if all Reductions agree; AssertionError where fewer than 90 % of the tokens do."""
    assert len(here.reductions) == len(there.reductions)
    kept = shared = 0
    equal = True
    for (site, item, mine), (its_site, its_item, its) in zip(
        here.reductions, there.reductions, strict=True
    ):
        assert (site, item, mine.n) == (its_site, its_item, its.n)
        one, other = (set(map(tuple, _places(r))) for r in (mine, its))
        kept += max(len(one), len(other))
        shared += len(one & other)
        equal = equal and one == other
    assert shared >= 0.9 * kept, f"{shared} of {kept} tokens are the same"
    return equal


def _places(reduction: Any) -> list[list[int]]:
    """Head and place of what is kept, `[..., m]`."""
    keep = reduction.keep.cpu()
    keep = keep.reshape(-1, keep.shape[-1])
    return [[head, place] for head, row in enumerate(keep.tolist()) for place in row]


def give_patterns(model: Any, seed: int = 0) -> None:
    """Give a model gates, filters and reach of its heads, all of them random."""
    give_gates(model, seed)
    generator, config = torch.Generator().manual_seed(seed), model.config.get_text_config()
    heads = int(config.num_key_value_heads or config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers = [*read_modules(model)]
    filters = {i: torch.randn(heads, width, generator=generator) for i in layers}
    reach = {i: torch.rand(heads, generator=generator) for i in layers}
    HeadPatterns(filters, reach).use(model)
