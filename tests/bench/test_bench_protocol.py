"""What the benchmark does around its rounds: ceilings, clocks, memory, budgets, break-even."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmfast.bench import full, registry, timing
from mmfast.bench import run as bench_run
from mmfast.bench import stages as ceilings
from mmfast.bench import stages as memory
from mmfast.bench.cases import build
from mmfast.bench.presets import PRESETS
from mmfast.bench.results import load
from mmfast.bench.run import run_bench
from mmfast.bench.stages import peaks_in, spans
from mmfast.bench.timing import clock_of, device_times, interleave
from mmfast.cli import main
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register, unregister
from mmfast.core.spec import parse
from mmfast.core.tokens import Tokens

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "WARM_UPS", 1)
    monkeypatch.setattr(ceilings, "CPU_SIDE", 256)
    monkeypatch.setattr(ceilings, "CPU_COPY_BYTES", 1 << 20)


def test_device_times_runs_every_job_every_round_in_shuffled_order() -> None:
    order: list[str] = []

    def job(name: str) -> Callable[[], object]:
        return lambda: order.append(name)

    times = device_times({name: job(name) for name in "abc"}, rounds=8, device="cpu")
    assert {name: len(ms) for name, ms in times.items()} == {"a": 8, "b": 8, "c": 8}
    assert all(ms >= 0 for each in times.values() for ms in each)
    rounds = ["".join(order[i : i + 3]) for i in range(3, len(order), 3)]  # behind one warm-up
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(set(rounds)) > 2
    again: list[str] = order.copy()
    order.clear()
    device_times({name: job(name) for name in "abc"}, rounds=8, device="cpu")
    assert order == again


@pytest.mark.parametrize(
    ("jobs", "rounds", "device"),
    [(0, 3, "cpu"), (1, 0, "cpu"), (1, 1, "meta")],
    ids=["no job", "no round", "no clock"],
)
def test_device_times_refuses(jobs: int, rounds: int, device: str) -> None:
    with pytest.raises(MmfastError):
        device_times(dict.fromkeys("ab"[:jobs], lambda: None), rounds, device)


def test_ceilings_are_positive_measured_once_and_by_type() -> None:
    first = ceilings.ceilings("cpu")
    assert set(first) == {"copy_gb_s", "matmul_tflop_s"} and min(first.values()) > 0
    assert ceilings.ceilings(CPU, torch.float32) == first
    assert ceilings.ceilings("cpu", torch.float64)["matmul_tflop_s"] != first["matmul_tflop_s"]


def test_an_emulated_type_is_measured_on_matrices_it_can_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides: list[int] = []

    def seconds(side: int, *_: Any) -> float:
        sides.append(side)
        return side**3 / 1e8  # a thousandth of what float32 reaches

    monkeypatch.setattr(ceilings, "CPU_SIDE", 3072)
    monkeypatch.setattr(ceilings, "_product_seconds", seconds)
    assert ceilings._product("cpu", torch.bfloat16, cuda=False) == pytest.approx(2e-4)
    assert sides == [256, 512]


def test_one_thread_is_timed_by_the_processor() -> None:
    assert clock_of(CPU, 1)[1].startswith("processor time") and clock_of(CPU, 2)[1] == "wall"
    assert clock_of(torch.device("cuda"), 1)[1] == "wall"


def test_rounds_end_early_but_not_before_the_third() -> None:
    runs: list[int] = []
    samples = interleave({"a": lambda: runs.append(1) or {}}, 9, enough=lambda: True)
    assert len(samples["a"]) == len(runs) == timing.FEWEST == 3
    samples = interleave({"a": dict}, 5, enough=lambda: len(runs) > 3)
    assert len(samples["a"]) == 5


def test_what_a_process_has_frozen_stays_so() -> None:
    gc.freeze()
    with timing.frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0  # 0 behind `gc.unfreeze()`


def test_rows_say_what_was_reached_of_the_machine() -> None:
    specs, stages = ["evs:0.25", "fastv:0.25"], "llm,decode,selection"
    document = run_bench(reduce=specs, stages=stages, iters=3, threads=1)
    assert document["ok"], document["faults"]
    assert document["clock"] == "processor time of the process"
    best, rows = document["ceilings"], document["rows"]
    prefill = [row for row in rows if row["stage"] == "llm"]
    assert all(0 < row["of_ceiling"] < 2 for row in prefill)
    for row in prefill:
        assert row["of_ceiling"] == pytest.approx(row["tflop_s"] / best["matmul_tflop_s"])
        assert row["first_ms"] > 0
    # 154 tokens through 160,000 weights and attention; a step reads a megabyte of weights.
    assert 2e7 < prefill[0]["tflop_s"] * 1e9 * prefill[0]["median_ms"] < 1e8
    (step,) = [row for row in rows if row["stage"] == "decode" and not row["reduce"]]
    assert 5e5 < step["gb_s"] * 1e6 * step["median_ms"] < 2e6
    _, evs, fastv = prefill
    assert fastv["scoring_over"] is not None and evs["scoring_over"] is None
    assert abs(fastv["scoring_over"]) < 0.5
    chosen = [row for row in rows if row["stage"] == "selection"]
    assert [row["reduce"] for row in chosen] == specs
    for row in chosen:
        assert row["speedup"] is row["ideal"] is None and row["share_of"] == "llm"
        assert 0 < row["share"] < 1 and row["compact_ms"] > 0


def test_selection_alone_brings_no_other_rows() -> None:
    document = run_bench(reduce=["uniform:0.25"], stages="selection", iters=1)
    assert [row["stage"] for row in document["rows"]] == ["selection"]


@pytest.fixture
def slow_method() -> Any:
    @register("planted")
    def planted(tokens: Tokens, budget: int) -> Reduction:
        """Waste time."""
        for _ in range(40):
            torch.mm(torch.ones(400, 400), torch.ones(400, 400))
        return Reduction.prune(torch.arange(budget), tokens.n)

    yield
    unregister("planted")


def test_a_slow_choice_shows_in_the_selection_rows(slow_method: None) -> None:
    document = run_bench(reduce=["planted:0.25", "uniform:0.25"], stages="selection", iters=5)
    slow, quick = document["rows"]
    assert slow["median_ms"] > 3 * quick["median_ms"] and slow["share"] > quick["share"]
    assert slow["median_ms"] > 3 * slow["compact_ms"]


def test_layers_whose_attention_is_read() -> None:
    case = build("tiny", ("llm",))
    found = {text: spans(case.model, parse(text), tower=True) for text in (
        "fastv@llm2:0.5", "uniform@llm2:0.5", "visionzip:0.5", "evs:0.5", "pyramiddrop:0.5",
    )}  # fmt: skip
    assert found["fastv@llm2:0.5"] == [("layer", 1)] and found["visionzip:0.5"] == [("tower", 0)]
    assert found["uniform@llm2:0.5"] == found["evs:0.5"] == []
    assert len(found["pyramiddrop:0.5"]) > 1
    assert spans(case.model, parse("visionzip:0.5"), tower=False) == []


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no resident peak here")
def test_memory_of_a_layer_is_that_layers_alone() -> None:
    case = build("tiny", ("llm",))
    layers, waste = case.model.get_decoder().layers, [0]

    def take(*_: Any) -> None:
        torch.ones(25_000_000 * waste[0])  # 100 MB a piece

    handle = layers[1].register_forward_hook(take)
    inputs = {**case.prompt, "mm_encoder_outputs": case.features()}

    def run() -> None:
        with torch.no_grad():
            case.model(**inputs, use_cache=False)

    where = [("layer", 0), ("layer", 1)]
    quiet = peaks_in(case.model, where, run)
    waste[0] = 2
    loud = peaks_in(case.model, where, run)
    handle.remove()
    assert loud["layer", 1] - quiet["layer", 1] > 150
    assert loud["layer", 0] - quiet["layer", 0] < 60


def test_a_shape_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 20 * 10**9)
    with pytest.raises(MmfastError, match=r"needs about 3\d\.\d GB and 20.0 GB are free") as caught:
        run_bench(preset="qwen2.5-vl-7b", dtype="float32")
    assert "--dtype bfloat16" in str(caught.value) and "\n" not in str(caught.value)
    shape = PRESETS["llava-onevision-7b"]
    half = memory.needed_bytes(shape, ("llm",), 8, torch.bfloat16)
    assert 15e9 < half < 17e9  # 7.6 billion weights
    assert memory.needed_bytes(shape, ("llm",), 8, torch.float32) == pytest.approx(2 * half)
    assert memory.needed_bytes(shape, ("ttft",), 8, torch.bfloat16) > half + 0.7e9
    memory.check_fits(shape, ("llm",), 8, torch.bfloat16, CPU)


def test_running_out_of_memory_is_one_line_and_other_errors_pass() -> None:
    refused = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you"
    for error in (RuntimeError(refused), torch.OutOfMemoryError("CUDA out of memory. Tried\nto")):
        told = pytest.raises(MmfastError, match="memory ran out on tiny with 8 frames")
        with told as caught, memory.one_line_when_full("tiny", 8):
            raise error
        assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="shapes"), memory.one_line_when_full("tiny", 8):
        raise RuntimeError("shapes do not match")


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _steps(clock: FakeClock, seconds: float) -> list[full.RunStep]:
    def run(progress: Any, enough: Callable[[], bool]) -> list[dict[str, Any]]:
        while not enough():
            clock.now += seconds
        return [{"suite": "bench", "device": "cpu"}]

    def fail(progress: Any, enough: Any) -> list[dict[str, Any]]:
        raise KeyError("no such\nthing")

    def large() -> None:
        raise MmfastError("needs about 32.0 GB")

    steps = [full.RunStep("first", 1.0, run), full.RunStep("broken", 1.0, fail)]
    return [*steps, full.RunStep("large", 1.0, run, large), full.RunStep("last", 3.0, run)]


def test_full_shares_its_time_and_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, got, told = FakeClock(), [], []
    monkeypatch.setattr(full, "plan", lambda device, preset: _steps(clock, 1.0))
    document = full.run_full("cpu", minutes=1, sink=got.append, tell=told.append, clock=clock)
    states = {step["label"]: step["state"] for step in document["steps"]}
    assert states == {"first": "done", "broken": "failed", "large": "left out", "last": "done"}
    assert not document["ok"] and len(document["rows"]) == 2 and len(got) == 4
    first, *_, last = document["steps"]
    assert first["seconds"] == pytest.approx(60 / 6, abs=1.5)
    assert document["seconds"] == pytest.approx(60, abs=1.5) and last["seconds"] > 45
    assert "failed: broken: KeyError: 'no such\\nthing'" in told
    assert "left out: large: needs about 32.0 GB" in told


def test_full_ends_where_a_fault_ended_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, left = FakeClock(), [], iter([True, False])
    monkeypatch.setattr(full, "plan", lambda device, preset: _steps(clock, 1.0))
    monkeypatch.setattr(full, "_emptied", lambda device: next(left))
    document = full.run_full("cpu", minutes=1, tell=told.append, clock=clock)
    assert [step["label"] for step in document["steps"]] == ["first", "broken"]
    assert not document["ok"] and len(document["rows"]) == 1
    assert told[-1] == "cpu takes no more work after that; 2 steps left out"


def test_full_leaves_out_what_it_has_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(full, "plan", lambda device, preset: _steps(clock, 100.0))
    document = full.run_full("cpu", minutes=1, clock=clock)
    assert [step["reason"] for step in document["steps"]] == ["", *["no time left"] * 3]
    assert document["ok"]
    with pytest.raises(MmfastError, match="no time to measure in"):
        full.run_full("cpu", minutes=0)


def test_a_part_that_fails_leaves_the_rows_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(case: str) -> list[dict[str, Any]]:
        if case == "large":
            raise RuntimeError("CUDA out of memory\nand more")
        return [{"case": case, "device": "cpu"}]

    kept: list[dict[str, Any]] = []
    three = lambda tick: registry.over(("small", "large", "last"), rows, tick)
    monkeypatch.setitem(registry._KNOWN["kernels"], "three", three)
    with pytest.raises(registry.IncompleteError) as caught:
        registry.named_rows("kernels", "three", sink=kept.append)
    assert str(caught.value) == "large: RuntimeError: CUDA out of memory"
    assert [row["case"] for row in caught.value.rows] == ["small", "last"]
    assert kept == caught.value.rows and "commit" in kept[0]
    step = full.RunStep("three", 1.0, lambda *_: registry.named_rows("kernels", "three"))
    monkeypatch.setattr(full, "plan", lambda device, preset: [step])
    document = full.run_full("cpu", minutes=1)
    assert not document["ok"] and len(document["rows"]) == 2
    assert document["steps"][0]["state"] == "failed"


def test_the_plan_for_a_gpu_names_benchmarks_that_exist() -> None:
    for suite, asked in full._ON_CUDA.items():
        assert set(asked) <= set(registry.names(suite))


def test_the_plan_for_a_gpu_begins_with_correctness_and_covers_real_shapes() -> None:
    labels = [step.label for step in full.plan(torch.device("cuda"))]
    kernels = [i for i, label in enumerate(labels) if label.startswith("kernels")]
    assert kernels == list(range(len(kernels))) and kernels
    for preset in ("llava-onevision-7b", "qwen2.5-vl-7b", "qwen3-vl-8b", "llava-onevision-0.5b"):
        assert any(label.startswith(f"{preset}, 32 frames") for label in labels)
    assert any(label.startswith("decode") for label in labels)
    assert any(label.startswith("encoder") for label in labels)
    only = [step.label for step in full.plan(CPU, "tiny")]
    assert next(label for label in only if not label.startswith("kernels")).startswith("tiny")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", *args])
    return int(caught.value.code or 0), capsys.readouterr().out


def test_full_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one command for a borrowed GPU, at tiny sizes; kernels have tests of their own."""
    monkeypatch.setattr(full, "names", lambda suite: [])
    out = tmp_path / "rows.jsonl"
    code, text = run(capsys, "--full", "--device", "cpu", "--out", str(out), "--json")
    document = json.loads(text)
    assert code == 0 and document["ok"] and [s["state"] for s in document["steps"]] == ["done"]
    rows = load(out)
    assert rows == document["rows"]
    assert {row["stage"] for row in rows} == {"vit", "llm", "decode", "ttft", "selection"}
    assert all(row["ceilings"]["copy_gb_s"] > 0 for row in rows)


@pytest.mark.slow
def test_break_even_of_the_tiny_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "TINY_SIDES", (2,))
    monkeypatch.setattr(bench_run, "TINY_FRAMES", (2, 64))
    monkeypatch.setattr(bench_run, "BATCHES", (1, 3))
    monkeypatch.setattr(bench_run, "AT", 2)
    monkeypatch.setattr(bench_run, "MOST", 3)
    out = tmp_path / "rows.jsonl"
    code, text = run(capsys, "--break-even", "--threads", "1", "--out", str(out), "--json")
    rows = json.loads(text)
    assert code == 0 and load(out) == rows
    tokens = [row for row in rows if row["bench"] == "tokens"]
    assert [row["tokens"] for row in tokens[::4]] == [4, 32, 1024]
    few, *_, many = tokens[0::4]
    assert many["speedup"] > 1.5 * few["speedup"] and many["pays"] is True
    assert few["ideal"] < many["ideal"]
    batched = [row for row in rows if row["bench"] == "batch"]
    assert {(row["batch"], row["stage"]) for row in batched} == {
        (batch, stage) for batch in (1, 3) for stage in ("llm", "decode")
    }
    # One step reads the weights once for all answers, and the entries of each.
    one, three = (r["ideal"] for r in batched if r["stage"] == "decode" and "evs" in r["reduce"])
    assert 1 < one < three


def test_break_even_refuses_other_families() -> None:
    with pytest.raises(MmfastError, match="takes LLaVA-OneVision shapes and tiny"):
        bench_run.run_break_even("qwen2.5-vl-7b")
