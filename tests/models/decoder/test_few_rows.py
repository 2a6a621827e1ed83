"""Products of a few rows in pieces: the same numbers, where they pay and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_zoo import prompt, text_model
from torch import nn
from torch.nn import functional as F

from mmfast.attach import attach
from mmfast.models import packing
from mmfast.models.decoder import few_rows as module
from mmfast.models.decoder.few_rows import ROWS, FewRows, few_rows, paying_rows, pieces, product


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models count as large, and all numbers of rows as worth it."""
    monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(packing, "SMALL", 64)
    monkeypatch.setattr(module, "paying_rows", lambda threads: frozenset(ROWS))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the products that were computed in pieces."""
    found = list[int]()

    def seen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found.append(len(x))
        return product(x, weight)

    monkeypatch.setattr(module, "product", seen)
    return found


def model() -> Any:
    """A model of the zoo, in float32."""
    return copy.deepcopy(text_model("qwen2")).float()


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 200), st.integers(1, 50))
def test_products_are_those_of_float64(rows: int, outputs: int, inputs: int) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    want = F.linear(x.double(), weight.double())
    torch.testing.assert_close(product(x, weight).double(), want, atol=1e-4, rtol=1e-5)
    assert outputs % pieces(outputs) == 0


@pytest.mark.parametrize("rows", [1, 2, 15, 16])
def test_passes_of_a_few_rows_alone_are_in_pieces(rows: int, computed: list[int]) -> None:
    mine, ids = model(), torch.arange(rows)[None]
    with torch.no_grad():
        want = mine(ids).logits
        with few_rows(mine):
            found = mine(ids).logits
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert set(computed) == ({rows} if rows in ROWS else set())
    assert not [m for m in mine.modules() if "forward" in vars(m)]


def test_what_is_no_gain_stays_as_it_is(
    computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known other rows, 16 bits, gradients, small models, and where nothing was faster."""
    ids = torch.arange(4)[None]
    with FewRows(whole := model()).installed(20), torch.no_grad():
        whole(ids)
    with few_rows(half := model().bfloat16()), torch.no_grad():
        half(ids)
    with few_rows(whole.requires_grad_()):
        whole(ids).logits.sum().backward()
    monkeypatch.setattr(module, "paying_rows", lambda threads: frozenset())
    with few_rows(whole), torch.no_grad():
        whole(ids)
    monkeypatch.setattr(module, "paying_rows", lambda threads: frozenset(ROWS))
    monkeypatch.setattr(module, "LARGE", 1 << 24)
    with few_rows(whole), torch.no_grad():
        whole(ids)
    assert not computed


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_code_stays_as_it_is(whole: bool, computed: list[int]) -> None:
    mine, ids = model(), torch.arange(4)[None]
    if whole:
        mine.forward = torch.compile(mine.forward, backend="eager")
    else:
        mine.model.layers[0].compile(backend="eager")
    with torch.no_grad():
        want = mine(ids).logits
        with few_rows(mine):
            assert torch.equal(mine(ids).logits, want)
    assert not computed


def test_what_pays_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is slow at 4 to 8 rows is left there, and nowhere else."""
    clock, costs = [0.0], {3: 1.0, 6: 3.0, 12: 1.0}

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        clock[0] += costs[len(x)]

    def other(x: torch.Tensor, weight: torch.Tensor) -> None:
        clock[0] += 1.0

    monkeypatch.setattr(module.F, "linear", linear)
    monkeypatch.setattr(module, "product", other)
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module, "_SHAPE", (8, 4))
    assert paying_rows(101) == {4, 5, 6, 7, 8}
    costs[3] = 9.0
    assert paying_rows(101) == {4, 5, 6, 7, 8}
    assert paying_rows(102) == {*range(2, 9)}


def test_passes_that_verify_drafts_are_in_pieces(computed: list[int]) -> None:
    mine, ids = model(), prompt(12)
    how = {"max_new_tokens": 16, "do_sample": False, "repetition_penalty": 1.3}
    want = mine.generate(ids, **how)
    with attach(mine, decode="self?weights=int8&adapt=0&least=0&most=4"):
        assert torch.equal(mine.generate(ids, **how), want)
    assert computed and set(computed) <= set(ROWS)


def test_other_models_of_the_zoo_keep_their_layers() -> None:
    """Those in float64, as of the zoo, have nothing to gain."""
    zoo = text_model("llama")
    with few_rows(zoo):
        assert not [m for m in zoo.modules() if isinstance(m, nn.Linear) and "forward" in vars(m)]
