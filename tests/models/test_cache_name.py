"""The name of the cache argument is written in one place and read under both names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import generate, tiny
from transformers import DynamicCache

from mmfast.attach import attach
from mmfast.models import cache_name
from mmfast.models.cache_name import CACHE, OLD, cache_of, name_in, returned_cache

ROOT = Path(__file__).resolve().parents[2]
APART = {
    "mmfast/models/cache_name.py",
    "mmfast/bench/suites/kvpress_worker.py",  # runs in kvpress' environment, on its transformers
}


NAMES = {ast.keyword: "arg", ast.Attribute: "attr", ast.Constant: "value", ast.arg: "arg"}


def named(source: str) -> bool:
    """A module writes the old name as an argument, an attribute or a key."""
    for node in ast.walk(ast.parse(source)):
        name = NAMES.get(type(node))
        if name is not None and getattr(node, name) == OLD:
            return True
    return False


def test_no_other_module_writes_the_old_name() -> None:
    tops = [ROOT / top for top in ("mmfast", "kernels", "pipelines", "demos")]
    paths = [path for top in tops for path in top.rglob("*.py")]
    assert len(paths) > 400
    found = {str(p.relative_to(ROOT)) for p in paths if named(p.read_text(encoding="utf-8"))}
    assert found == APART


@pytest.mark.parametrize(
    "source",
    [
        "f(past_key_values=x)",
        "f.past_key_values",
        "f['past_key_values']",
        "def f(past_key_values): 0",
    ],
)
def test_the_old_name_is_found(source: str) -> None:
    assert named(source) and not named(source.replace(OLD, "cache"))


@pytest.mark.parametrize("own", ["cache", OLD])
def test_both_names_are_read(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_name, "CACHE", own)
    for name in {own, OLD}:
        assert cache_of({name: 3, "x": 1}) == 3 and name_in({name: None}) == name
    assert cache_of({"x": 1}) is None and name_in({}) == own
    if own == OLD:
        assert cache_of({"cache": 3}) is None  # another argument, which older releases do not know


@pytest.mark.parametrize("spec", ["fastv@llm1:0.5", "evs:0.5"])
def test_a_cache_goes_in_under_both_names(spec: str) -> None:
    this = tiny("qwen2_5_vl")
    inputs = this.inputs(["{image} what is it?"], images=this.images(1))

    def answer(name: str) -> tuple[Any, Any]:
        cache = DynamicCache(config=this.model.config)
        with attach(this.model, spec, cache="snapkv:0.5"):
            out = generate(this, inputs, 6, **{name: cache})
        assert returned_cache(out) is cache
        return out, cache

    (one, mine), (two, yours) = answer(OLD), answer(CACHE)
    assert torch.equal(torch.stack(one.logits), torch.stack(two.logits))
    assert [x.keys.shape for x in mine.layers] == [x.keys.shape for x in yours.layers]
