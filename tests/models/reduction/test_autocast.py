"""Attached methods under `torch.autocast`, as a Trainer with `bf16=True` calls them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny, video_prompt

import mmfast
from mmfast.core.registry import get
from mmfast.core.spec import parse, run
from mmfast.core.tokens import Tokens


def rows(count: int = 48, width: int = 24) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["divprune", "key_clip", "evs"])
def test_the_choice_under_autocast_is_that_without(name: str) -> None:
    signals = {need: rows() for need in get(name).needs if need not in ("x", "grid", "query")}
    tokens = Tokens(rows(), query=rows(5), grid=(3, 4, 4), signals=signals)
    if "attn" in get(name).needs:
        tokens = replace(tokens, attn=rows()[:, 0].softmax(0))
    (spec,) = parse(f"{name}:0.25")
    plain = run(spec, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = run(spec, tokens)
    assert torch.equal(plain.keep, mixed.keep)


def test_autocast_acts_on_products_here() -> None:
    """The control: without `choosing` the products of these rows are rounded."""
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x.T).dtype == torch.bfloat16


@pytest.mark.parametrize("spec", [{"reduce": "divprune:0.25"}, {"cache": "compactor:0.5"}])
def test_an_attached_model_answers_under_autocast(spec: dict[str, str]) -> None:
    this = tiny(FAMILIES[0])
    mixed = torch.autocast("cpu", torch.bfloat16)
    with mmfast.attach(this.model, **spec) as trace, mixed, torch.no_grad():
        this.model.generate(**video_prompt(this), max_new_tokens=2)
    (row, *_) = [row for row in trace.rows if row.stage in ("pre", "kv")]
    assert row.tokens_out < row.tokens_in
