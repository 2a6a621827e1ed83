"""The whole benchmark on the smoke-test preset, and a gate that shuts on broken methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from mmfast.bench import stages, timing
from mmfast.bench import stages as stage_module
from mmfast.bench.presets import PRESETS
from mmfast.bench.report.docs import write_table
from mmfast.bench.results import bench_rows
from mmfast.bench.run import run_bench
from mmfast.core.reduction import Reduction
from mmfast.core.registry import methods, register, unregister
from mmfast.core.tokens import Tokens

KEYS = {
    *("reduce", "stage", "median_ms", "speedup", "ideal", "of_ideal", "of_oracle"),
    *("selection_ms", "peak_mb"),
}


@pytest.fixture(autouse=True)
def few_warm_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UPS", 1)
    monkeypatch.setattr(stages, "CPU_SIDE", 256)
    monkeypatch.setattr(stages, "CPU_COPY_BYTES", 1 << 20)


@pytest.mark.slow
def test_every_method_end_to_end() -> None:
    # Site `pixel` needs a tower that packs patches; the preset's takes tiles.
    specs = [f"{m.name}:0.25" for m in methods("reducer") if m.sites != ("pixel",)]
    ticks: list[tuple[int, int]] = []
    document = run_bench(
        preset="tiny", reduce=specs, iters=1, threads=1, progress=lambda *tick: ticks.append(tick)
    )
    assert document["ok"], document["faults"]
    rows = document["rows"]
    assert [row["reduce"] for row in rows] == [None, *specs]
    assert all(set(row) >= KEYS for row in rows)
    for row in rows[1:]:
        assert row["kept"] == 32 and row["tokens"] == 128
        assert row["ideal"] > 1 and row["of_ideal"] == pytest.approx(row["speedup"] / row["ideal"])
        assert row["selection_ms"] > 0 and row["of_oracle"] > 0 and row["peak_mb"] > 0
    assert document["preset"] == "tiny" and document["device"] == "cpu"
    assert ticks[-1][0] == ticks[-1][1] == len(ticks)
    assert len(write_table("bench", bench_rows(document))) == 4 + len(rows)


def test_ideal_depends_on_where_tokens_leave() -> None:
    specs = ["uniform:0.25", "uniform@llm2:0.25", "uniform:0.5+uniform@llm2:0.5", "uniform:1.0"]
    rows = run_bench(reduce=specs, iters=1)["rows"][1:]
    before, inside, both, whole = (row["ideal"] for row in rows)
    assert before > both > inside > whole == 1.0
    assert [row["kept"] for row in rows] == [32, 32, 32, 128]
    assert rows[3]["selection_ms"] == 0.0


def test_stages_have_their_own_rows() -> None:
    specs = ["evs:0.25", "visionzip:0.25"]
    document = run_bench(reduce=specs, stages="vit,llm,decode,ttft", iters=1)
    assert document["ok"], document["faults"]
    found = [(row["stage"], row["reduce"]) for row in document["rows"]]
    # The tower only shows what touches it: EVS takes no signal from there.
    assert found == [
        *(("vit", spec) for spec in (None, "visionzip:0.25")),
        *((stage, spec) for stage in ("llm", "decode", "ttft") for spec in (None, *specs)),
    ]
    assert set(document["noise"]) == {"vit", "llm", "decode", "ttft"}


def test_merging_in_the_tower_lowers_its_flops() -> None:
    specs = ["tome@vit:0.5", "tome@vit:0.5+evs:0.25"]
    document = run_bench(reduce=specs, stages="vit,ttft", iters=1)
    assert document["ok"], document["faults"]
    of = {(row["stage"], row["reduce"]): row for row in document["rows"]}
    assert of["vit", specs[0]]["ideal"] > 1.05
    assert of["ttft", specs[1]]["ideal"] > of["ttft", specs[0]]["ideal"]
    assert of["ttft", specs[1]]["of_oracle"] > 0


_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}
_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "qwen3-vl-8b"])
def test_qwen_shapes_scaled_down(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same families, layouts and inputs as the real presets, small enough for a test."""
    real = PRESETS[name]
    vision = {**real.vision, **_TOWER, "out_hidden_size": 64}
    vision |= {k: [0, 1, 2] for k in ("deepstack_visual_indexes",) if k in vision}
    vision |= {k: [2] for k in ("fullatt_block_indexes",) if k in vision}
    tiny = {**PRESETS["tiny"].text, "head_dim": 16, "num_hidden_layers": 4}
    rope = {**real.text["rope_parameters"], "mrope_section": [4, 2, 2]}
    text = {**real.text, **{k: v for k, v in tiny.items() if k != "model_type"}}
    text = {k: v for k, v in text.items() if k in real.text} | {"rope_parameters": rope}
    small = replace(real, vision=vision, text=text, special=_TOKENS, grid=(12, 20), half=False)
    monkeypatch.setitem(PRESETS, name, small)
    document = run_bench(
        preset=name, reduce=["evs:0.25", "fastv:0.5"], stages="vit,llm,decode,ttft", iters=1
    )
    assert document["ok"], document["faults"]
    kept = {(row["stage"], row["reduce"]): row["kept"] for row in document["rows"]}
    assert document["tokens"] == 4 * 6 * 10
    assert kept["llm", "evs:0.25"] == kept["ttft", "evs:0.25"] == 60
    assert kept["llm", "fastv:0.5"] == kept["decode", "fastv:0.5"] == 120


@pytest.fixture
def planted() -> Iterator[None]:
    yield
    unregister("planted")


def test_gate_refuses_a_wrong_count(planted: None) -> None:
    @register("planted")
    def planted_method(tokens: Tokens, budget: int) -> Reduction:
        """Keep one token too few."""
        return Reduction.prune(torch.arange(budget - 1), tokens.n)

    document = run_bench(reduce=["uniform:0.5", "planted:0.5"], iters=1)
    assert not document["ok"] and document["rows"] == []
    (fault,) = document["faults"]
    assert "planted:0.5" in fault and "63" in fault and "64" in fault


def test_gate_refuses_an_invalid_map(planted: None) -> None:
    @register("planted")
    def planted_method(tokens: Tokens, budget: int) -> Reduction:
        """Keep the right number, the first one twice."""
        good = Reduction.prune(torch.arange(budget), tokens.n)
        keep = good.keep.clone()
        keep[1] = 0
        return Reduction(keep, good.owner, pure=True)

    document = run_bench(reduce=["planted:0.5"], iters=1)
    assert not document["ok"] and document["rows"] == []
    assert "ascending" in document["faults"][0]


def _broken(monkeypatch: pytest.MonkeyPatch, only_whole: bool) -> None:
    """An attach that quietly reduces a little more, or disturbs the model at keep 1.0."""
    real = stage_module.attach

    @contextmanager
    def attach(model: Any, reduce: str) -> Iterator[Any]:
        if only_whole and "1.0" in reduce:
            handle = model.lm_head.register_forward_hook(lambda m, a, out: out * 1.000001)
            yield None
            handle.remove()
        elif only_whole or "recorded" not in reduce:
            with real(model, reduce=reduce) as trace:
                yield trace
        else:
            with real(model, reduce=f"{reduce}+uniform@llm3:0.5") as trace:
                yield trace

    monkeypatch.setattr(stage_module, "attach", attach)


def test_gate_refuses_a_model_that_holds_other_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, only_whole=False)
    document = run_bench(reduce=["uniform:0.5"], iters=1)
    assert not document["ok"] and document["rows"] == []
    assert "layer 3" in document["faults"][0]


def test_gate_refuses_keep_1_that_is_not_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    _broken(monkeypatch, only_whole=True)
    document = run_bench(reduce=["uniform:0.5"], iters=1)
    assert not document["ok"] and document["rows"] == []
    assert "bit-identical" in document["faults"][0]
