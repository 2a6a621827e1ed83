"""Compiled decoding behind a reduced prompt: one graph, no breaks, never compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from mmfast.attach import attach
from mmfast.bench.cases import build
from mmfast.bench.suites import decode
from mmfast.bench.suites.decode import CompiledRun
from mmfast.models.cache_name import cache_of
from mmfast.models.reduction import hooks

EAGER = {"backend": "eager"}  # Dynamo alone decides on graphs and breaks
STEPS = 33  # the first compiles, 32 must not
SPECS = [None, "evs:0.25", "evs:0.5+fastv@llm2:0.5", "holitom_inner@llm3:0.5"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def case() -> Any:
    return build("tiny", ("llm", "decode"), 2)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", SPECS)
def test_one_graph_and_the_tokens_of_eager_steps(case: Any, spec: str | None) -> None:
    run = CompiledRun(case, STEPS)
    with attach(run.case.model, spec):
        want = run.tokens(case.model)
        got, did = run.compile(torch.compile(case.model, fullgraph=True, **EAGER))
    assert torch.equal(got, want) and len(torch.unique(want)) > 2
    assert (did.graphs, did.breaks, did.again) == (1, 0, 0)


def test_attached_anew_nothing_is_compiled_again(case: Any) -> None:
    run, step = CompiledRun(case, 3), torch.compile(case.model, fullgraph=True, **EAGER)
    torch._dynamo.reset()
    counters.clear()
    said = []
    for _ in range(3):
        with attach(run.case.model, "evs:0.5+fastv@llm2:0.5"):
            said.append(run.tokens(step))
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(tokens, said[0]) for tokens in said)


@pytest.mark.slow
def test_code_of_another_spec_is_not_used(case: Any) -> None:
    """Steps compiled for one spec, and for the stock model, decode right under another."""
    run, step = CompiledRun(case, 4), torch.compile(case.model, fullgraph=True, **EAGER)
    torch._dynamo.reset()
    for spec in (None, "fastv@llm2:0.5", "evs:0.25"):
        with attach(run.case.model, spec):
            assert torch.equal(run.tokens(step), run.tokens(case.model)), spec


@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
def test_an_eager_conversation_between_compiled_steps(case: Any) -> None:
    """A dynamic cache takes no hooks off that compiled steps of a static one rely on."""
    run, step = CompiledRun(case, 6), torch.compile(case.model, fullgraph=True, **EAGER)
    torch._dynamo.reset()
    inputs = {**case.prompt, "logits_to_keep": 1, "use_cache": True}
    with attach(run.case.model, "fastv@llm2:0.5"):
        want = run.tokens(case.model)
        cache, token = run.prefill()
        other = case.model(input_ids=case.prompt["input_ids"][:, :5], use_cache=True)
        found = []
        for at in range(6):
            case.model(input_ids=token, past_key_values=other.past_key_values, use_cache=True)
            token = run.decode(step, cache, token, at, 1)[0]
            found.append(token)
        assert inputs and torch.equal(torch.cat(found, dim=1), want)


@pytest.mark.slow
def test_a_planted_break_is_found(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, run = hooks.fit_decode, CompiledRun(case, 3)

    def looks(config: Any, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        if hidden.amax().item() > 1e9:
            raise AssertionError
        return stock(config, layer, hidden, kwargs)

    monkeypatch.setattr(hooks, "fit_decode", looks)
    with attach(run.case.model, "fastv@llm2:0.5"):
        with pytest.raises(torch._dynamo.exc.Unsupported):
            run.compile(torch.compile(case.model, fullgraph=True, **EAGER))
        _, did = run.compile(torch.compile(case.model, **EAGER))
    assert did.breaks > 0 and did.graphs > 1


def test_a_planted_number_that_changes_is_found(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, run, count = hooks.fit_decode, CompiledRun(case, 2), [0]

    def counts(config: Any, layer: int, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        cache_of(kwargs).layers[layer].step = count[0]
        return stock(config, layer, hidden + 0 * count[0], kwargs)

    monkeypatch.setattr(hooks, "fit_decode", counts)
    with attach(run.case.model, "fastv@llm2:0.5"):
        step = torch.compile(case.model, fullgraph=True, dynamic=False, **EAGER)

        def next_step(**given: Any) -> Any:
            count[0] += 1
            return step(**given)

        _, did = run.compile(next_step)
    assert did.again > 0


@pytest.mark.slow
def test_rows_of_the_benchmark() -> None:
    rows = decode.compiled_rows(
        "tiny", 2, 3, 2, (None, "fastv@llm3:0.5"), device="cpu", options=EAGER
    )
    for row in rows:
        assert row["same_tokens"] and (row["graphs"], row["breaks"]) == (1, 0)
        assert row["recompiles"] == row["recompiles_attached_anew"] == 0
        assert row["eager_ms"] > 0 and row["compiled_ms"] > 0 and row["compiler"] == "eager"


def test_a_gpu_captures_its_steps() -> None:
    on_gpu = decode.default_options(torch.device("cuda"))
    assert on_gpu == {"mode": "reduce-overhead"}
    assert decode.default_options(torch.device("cpu")) == {"backend": "inductor"}


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_under_real_cuda_graphs() -> None:
    rows = decode.compiled_rows("tiny", 2, 8, 2, SPECS, device="cuda")
    assert all(row["graphs"] == 1 and row["breaks"] == 0 for row in rows)
    assert all(row["same_tokens"] and row["recompiles"] == 0 for row in rows)
