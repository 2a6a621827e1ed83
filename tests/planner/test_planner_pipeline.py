"""Targets on a pipeline, `mmfast plan`, and predictions against the clock."""

from __future__ import annotations

import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import mmfast
from mmfast.bench import plan as plan_check
from mmfast.bench.plan import PlanCheck, check_rows
from mmfast.bench.report.docs import write_table
from mmfast.cli import main
from mmfast.planner.rates import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CLIP = str(ROOT / "assets" / "clips" / "red-circle.mp4")
QUESTION = "Which way does the red circle move?"
PARTS = {"total", "read", "plan", "encode", "select", "prefill", "overhead"}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("rates")))
        yield


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-qa", device="cpu", max_new_tokens=8)


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def test_a_call_with_a_target_runs_its_plan(pipe: Any) -> None:
    answer = pipe(CLIP, QUESTION, target_tokens=40)
    plan = answer.plan
    assert plan is not None and plan.spec is not None and plan.met
    assert answer.kept_tokens == plan.kept_tokens and plan.mean_tokens <= 40
    assert {"plan", "measure device"} <= {row.stage for row in answer.trace.rows}
    assert answer.ttft_ms < sum(r.ms for r in answer.trace.rows if r.stage != "generate") + 1e3
    document = json.loads(json.dumps(answer.to_dict()))["plan"]
    assert document["measured_ttft_ms"] == pytest.approx(answer.ttft_ms, abs=0.01)
    assert document["measured_over_predicted"] > 0
    same = mmfast.attach(pipe.model, plan.spec)
    with same:
        assert pipe(CLIP, QUESTION).text == answer.text


def test_without_a_target_nothing_is_planned(pipe: Any) -> None:
    answer = pipe(CLIP, QUESTION)
    assert answer.plan is None and "plan" not in answer.to_dict()
    assert "plan" not in {row.stage for row in answer.trace.rows}


def test_a_quality_streams_too(pipe: Any) -> None:
    whole = pipe(CLIP, QUESTION, quality="fast")
    assert "".join(pipe.stream(CLIP, QUESTION, quality="fast")).strip() == whole.text
    assert whole.plan.mean_tokens <= 29


def test_a_pipeline_keeps_its_target() -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", quality="balanced", batch_size=2)
    one, two = pipe([CLIP, CLIP], QUESTION)
    assert one.plan is two.plan and one.plan.accuracy[0] >= one.plan.accuracy[1] - 0.0301
    assert one.plan.visual_tokens == 2 * one.visual_tokens
    pipe.reduce = None
    assert pipe(CLIP, QUESTION, target_ttft_ms=1e7).plan.spec is None  # the call's own target


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"reduce": "evs:0.5", "target_tokens": 64}, "contradict"),
        ({"quality": "best"}, "choices"),
        ({"target_ttft_ms": 0}, "target_ttft_ms=0"),
        ({"max_memory": "2 potatoes"}, "no size"),
    ],
)
def test_contradictions_before_any_weight_is_read(options: dict[str, Any], word: str) -> None:
    with pytest.raises(mmfast.MmfastError, match=word) as caught:
        mmfast.pipeline("video-qa", model="./nowhere", **options)
    assert "\n" not in str(caught.value)


def test_plan_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", CLIP, QUESTION, "--target-tokens", "30", "--json")
    document = json.loads(out)
    assert code == 0 and document["met"] and document["mean_tokens"] <= 30
    assert set(document["predicted_ttft_ms"]) == PARTS
    assert set(document["memory_bytes"]) == {"total", "weights", "kv", "activations"}
    assert document["visual_tokens"] == 288 and document["why"] and document["rejected"]
    total = document["predicted_ttft_ms"].pop("total")
    assert total == pytest.approx(sum(document["predicted_ttft_ms"].values()), abs=0.1)
    assert document["reduce"].split(":")[0] in {m.name for m in mmfast.methods("reducer")}


def test_plan_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "--preset", "tiny", "--frames", "2", "--target-tokens", "12")
    assert code == 0
    for word in ("first token", "memory", "random selection", "not taken", "no accuracy rows"):
        assert word in out, out


def test_check_compares(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--preset", "tiny", "--frames", "2", "--target-tokens", "12", "--check", "--json")
    code, out, _ = run(capsys, "plan", *args)
    document = json.loads(out)
    assert code == 0 and document["measured_ttft_ms"] > 0
    ratio = document["measured_ttft_ms"] / document["predicted_ttft_ms"]["total"]
    assert document["measured_over_predicted"] == pytest.approx(ratio, rel=0.01)


def test_ask_takes_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ask", CLIP, QUESTION, "--target-tokens", "40")
    assert code == 0 and out.strip() and "planned: " in err
    code, out, err = run(capsys, "ask", CLIP, QUESTION, "--quality", "high", "--reduce", "evs:0.5")
    assert code == 2 and "contradict" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((CLIP, "--target-ttft-ms", "-5"), ["-5"]),
        ((CLIP, "--target-tokens", "0"), ["target_tokens=0"]),
        ((CLIP, "--quality", "hgh"), ["did you mean 'high'"]),
        ((CLIP, "--max-memory", "1MB"), ["out of reach", "MB"]),
        ((CLIP, "--target-ttft-ms", "1"), ["out of reach", "the best is"]),
        ((), ["--preset"]),
        ((CLIP, "--preset", "tiny"), ["--preset does not use MEDIA"]),
        (("--preset", "tinny"), ["did you mean 'tiny'"]),
        (("--preset", "tiny", "--frames", "0"), ["--frames 0"]),
        (("nowhere.mp4",), ["nowhere.mp4"]),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], words: list[str]
) -> None:
    code, out, err = run(capsys, "plan", *args)
    assert code == 2 and out == "" and err.count("\n") == 1, (code, out, err)
    assert all(word in err for word in words), err


def test_rows_and_their_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = PlanCheck("tiny", "llm", 2, (None, "evs:0.25", "fastv@llm1:0.5"))
    monkeypatch.setattr(plan_check, "CHECKS", (check,))
    monkeypatch.setattr(plan_check, "embedded_rows", list)
    args = ("plan", "--check-all", "--out", str(tmp_path / "plan.jsonl"), "--json")
    code, out, _ = run(capsys, *args)
    rows = json.loads(out)
    assert code == 0 and [row["reduce"] for row in rows] == list(check.specs)
    assert [json.loads(line) for line in (tmp_path / "plan.jsonl").read_text().splitlines()] == rows
    for row in rows:
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
        assert row["predicted_ms"] == pytest.approx(sum(row["parts"].values()))
        assert {"suite", "n", "threads", "device", "dtype", "commit", "versions"} <= set(row)
    lines = write_table("plan", rows + rows)
    assert len(lines) == 4 + len(rows) and "over 3 predictions" in lines[0]
    assert write_table("plan", []) == ["Not measured."]


@pytest.mark.slow
def test_predictions_hold_on_the_embedded_model() -> None:
    """Processor time, since the wall clock of a machine that runs tests says little."""
    ratios = [row["ratio"] for row in plan_check.embedded_rows(time.process_time)]
    assert 0.6 < median(ratios) < 1.6 and all(0.3 < ratio < 3 for ratio in ratios), ratios


def test_a_cut_shape_runs_every_family() -> None:
    for name in ("llava-onevision-7b", "qwen2.5-vl-7b", "qwen3-vl-8b"):
        small = plan_check.cut(plan_check.get_preset(name), 2)
        assert small.text["num_hidden_layers"] == 2
        assert max(small.vision.get("fullatt_block_indexes", [1])) == 1
    assert check_rows(checks=(PlanCheck("tiny", "ttft", 2, (None,)),))[0]["parts"]["encode"] > 0


def test_a_model_with_adapters_is_planned_for_and_watches(pipe: Any) -> None:
    from peft import LoraConfig, get_peft_model

    own = mmfast.pipeline("video-qa", device="cpu")
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    pair = get_peft_model(own.model, config), own.processor  # starts as the model without it
    answer = mmfast.pipeline("video-qa", pair, max_new_tokens=8)(CLIP, QUESTION, target_tokens=40)
    assert answer.plan.spec is not None and answer.kept_tokens <= 40
    texts = []
    for model in (pair, (pipe.model, pipe.processor)):
        with mmfast.pipeline("video-stream", model).open() as session:
            session.watch(CLIP, fps=8)
            texts.append(session.ask(QUESTION).read())
    assert texts[0] == texts[1]
