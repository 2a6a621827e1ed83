"""Benchmarks of streams: found by name, gated by checks, rows that say what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from mmfast.bench import registry, timing
from mmfast.bench.presets import get_preset
from mmfast.bench.report.docs import write_table
from mmfast.bench.results import environment
from mmfast.bench.suites import reuse, stream
from mmfast.bench.suites.camera import embedded_clips
from mmfast.cli import app
from mmfast.core.errors import MmfastError
from mmfast.models.loading import embedded_path, load


def test_benchmarks_are_found_by_name() -> None:
    assert {"frame-cache", "prefill"} <= {*registry.names("stream")}
    for suite in registry.SUITES:
        for name in registry.names(suite):
            assert callable(registry.find(suite, name))
    with pytest.raises(MmfastError, match="frame-cache"):
        registry.named_rows("stream", "frame-cash")


def test_rows_name_the_processor_they_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"device": "cuda"}, {"device": "cpu"}, {"device": "not measured"}, {}]
    registry.names("stream")  # registers them
    monkeypatch.setitem(registry._KNOWN["stream"], "prefill", lambda tick: rows)
    monkeypatch.setattr(registry, "device_name", lambda device: f"a {device.type}")
    here = environment()["processor"]
    found = [row["processor"] for row in registry.named_rows("stream", "prefill")]
    assert found == ["a cuda", here, here, here]


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SHAPES", {"tiny": (get_preset("tiny"), 1, "small")})


@pytest.mark.usefixtures("tiny_shape")
def test_rows_of_the_frame_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stream, "ROUNDS", 1)
    out = tmp_path / "rows.jsonl"
    run = CliRunner().invoke(app, ["bench", "--stream", "frame-cache", "--json", "--out", str(out)])
    assert run.exit_code == 0
    stock, cached = json.loads(run.stdout)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [stock, cached]
    assert cached["computed"] == pytest.approx(0.25)
    assert stock["saved"] == 0.0 and stock["method"] is None
    assert cached["knobs"] == {"refresh": 0.25} and cached["state_mb"] > 0
    assert {"versions", "date", "median_ms", "noise", "clock", "note"} <= {*cached}
    shown = CliRunner().invoke(app, ["bench", "--stream", "frame-cache"])
    assert shown.exit_code == 0 and "speedup" in shown.stdout


@pytest.mark.usefixtures("tiny_shape")
def test_no_time_is_told_of_a_cache_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def worse(output: Any) -> torch.Tensor:
        return output.pooler_output + torch.rand(1)

    monkeypatch.setattr(stream, "feature_rows", worse)
    with pytest.raises(MmfastError, match="failed its checks"):
        stream.frame_cache_rows("tiny", 1)


def test_a_row_of_a_question_copies_nothing_of_the_window() -> None:
    whole, ask, frames, both = stream.ask_rows(layers=2, window=400, rounds=1)
    row = 2 * 3 * 4 * 128 * 2 / 1e6  # a token in two layers of four heads, in MB
    assert whole["copied_mb"] >= 300 * row and ask["copied_mb"] == 0
    assert both["copied_mb"] <= frames["copied_mb"] + 200 * row


def test_a_row_of_a_score_policy_tells_its_bound() -> None:
    row = stream.score_row("keydiff", frames=60, early=30)
    assert row["most"] == stream.OPENING + stream.HELD and row["n"] == 60
    assert row["held_growth"] == 0 and row["positions"] <= 4 * row["most"] * 1.25 + 16


@pytest.mark.slow
def test_rows_of_prefill_keep_the_share() -> None:
    whole, reduced = stream.prefill_rows(layers=1, frames=2, rounds=1)
    assert whole["kept"] == 2 * 196
    assert reduced["kept"] == 2 * round(0.3 * 196)
    assert reduced["method"] == "stc_pruner"


def test_rows_of_pictures_seen_elsewhere() -> None:
    rows = reuse.reuse(lambda *_: None, "tiny", 1, (1, 2))
    one, two = rows[:3], rows[3:]
    assert [row["job"] for row in one] == [row["job"] for row in two] == ["full", *reuse.SPECS]
    assert [row.get("note") for row in (one[0], two[0])] == [None, "2 pictures"]
    text = one[0]["tokens"] - one[0]["visual"]
    assert two[0]["visual"] == 2 * one[0]["visual"] and two[0]["tokens"] - text == two[0]["visual"]
    for row in (*one[1:], *two[1:]):
        assert row["computed"] == text + math.ceil(0.15 * row["visual"])
        assert 0 < row["hidden_gap"] < 1 and row["of_full"] > 0


def test_features_are_near_on_the_embedded_clips() -> None:
    paths = embedded_clips()[:2]
    pair = load(embedded_path(stream.MODEL), "cpu", "float32")
    row = stream.quality_row(*pair, paths, 8.0, {"refresh": 0.25})
    assert row["frames"] == 32 and row["whole"] == 2
    assert row["cosine"] > 0.98 and row["cosine_worst_token"] > 0.9
    assert row["computed"] < 0.32


def test_jobs_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: Iterator[float] = iter(range(10**6))
    monkeypatch.setattr(timing.time, "process_time", lambda: float(next(ticks)))

    def slow() -> None:
        for _ in range(3):
            next(ticks)

    jobs = {"slow": slow, "fast": lambda: None}
    base, half = timing.compare_jobs(jobs, rounds=3, shared={"preset": "tiny"})
    assert base["speedup"] == 1.0 and base["noise"] == 0.0
    assert half["speedup"] == pytest.approx(4.0)
    assert base["preset"] == half["preset"] == "tiny" and base["device"] == "cpu"
    assert stream._saving([half])[0]["saved"] == pytest.approx(0.75)


def test_an_unknown_benchmark_ends_with_one_line() -> None:
    from mmfast.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["bench", "--stream", "nothing"])
    assert ended.value.code == 2


def test_costs_as_markdown_take_the_latest_row_and_say_what_is_missing() -> None:
    shared = {"processor": "P", "date": "d", "commit": "c", "bench": "frame-cache", "noise": 0.02}
    job = {"preset": "tower", "note": "all of it", "clock": "clock", "job": "frame cache"}
    found = [
        {**shared, **job, "method": "frame_cache", "median_ms": ms, "saved": saved}
        for ms, saved in ((90.0, 0.1), (40.0, 0.6))
    ]
    text = "\n".join(write_table("stream", found))
    assert "| tower | all of it | `frame cache` | 40 | 60.0 % |" in text
    assert "10.0 %" not in text
    assert "P, clock, noise 2.0 %, d, commit `c`." in text
    assert text.count("not measured") == 12


def test_a_benchmark_of_hours_keeps_every_row_as_soon_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, seen = tmp_path / "rows.jsonl", list[str]()

    def row(name: str, *_: object, **__: object) -> dict[str, object]:
        if len(seen) == 2:
            assert len(out.read_text().splitlines()) == 2  # those before it
            raise KeyboardInterrupt
        seen.append(name)
        return {"memory": name}

    monkeypatch.setattr(stream, "score_row", row)
    ran = CliRunner().invoke(app, ["bench", "--stream", "score", "--out", str(out)])
    assert ran.exit_code != 0
    kept = [json.loads(line)["memory"] for line in out.read_text().splitlines()]
    assert kept == seen and set(kept) < set(stream.score_policies())


def test_a_benchmark_of_hours_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "score_row", lambda name, *_, **__: {"memory": name})
    ask = ["bench", "--stream", "score", "--json", "--only"]
    ran = CliRunner().invoke(app, [*ask, "tova,expected_attention"])
    assert [row["memory"] for row in json.loads(ran.stdout)] == ["tova", "expected_attention"]
    for name, only, said in (
        ("score", "tova,kvzip", "unknown score policy of a stream 'kvzip'"),
        ("ask", "tova", "runs as a whole; leave --only out"),
    ):
        ran = CliRunner().invoke(app, ["bench", "--stream", name, "--only", only])
        assert ran.exit_code != 0 and said in str(ran.exception)
