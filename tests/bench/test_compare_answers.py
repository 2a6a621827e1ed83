"""`mmfast ask --compare`: figures against made-up pipelines whose times are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_runs import CLIP, QUESTION, fails, run

from mmfast.bench import compare
from mmfast.bench.compare import ROUNDS, compare_answers
from mmfast.cli import _with_spec
from mmfast.core.trace import Row
from mmfast.tiny.video.clips import write

STAGES = ["read", "encode", "prefill", "decode", "first token", "answer"]


class Pipe:
    """Answers with stage times from a list that repeats."""

    def __init__(self, name: str, prefill: list[float], log: list[str], text: str = "left") -> None:
        self.name, self.prefill, self.log, self.text, self.calls = name, prefill, log, text, 0

    def __call__(self, media: Any, question: str) -> Any:
        self.log.append(self.name)
        prefill = self.prefill[self.calls % len(self.prefill)]
        self.calls += 1
        stages = [("read", 2), ("preprocess", 3), ("encode", 10), ("pre", prefill / 4)]
        stages += [("prefill", 3 * prefill / 4), ("generate", 30)]
        rows = [Row(stage, 0, 4 if stage == "generate" else 0, ms) for stage, ms in stages]
        return SimpleNamespace(
            text=self.text, ttft_ms=15 + prefill, visual_tokens=80,
            kept_tokens=20 if self.name == "spec" else 80, trace=SimpleNamespace(rows=rows),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine ends no comparison early."""
    monkeypatch.setattr(compare, "SECONDS", float("inf"))


def _compared(stock: list[float], spec: list[float], text: str = "left") -> tuple[Any, list[str]]:
    log: list[str] = []
    ticks: list[tuple[int, int]] = []
    pipes = Pipe("all", stock, log), Pipe("spec", spec, log, text)
    found = compare_answers(*pipes, "clip", "q?", lambda *tick: ticks.append(tick))
    assert ticks[-1] == (3 * ROUNDS, 3 * ROUNDS)
    assert [row["stage"] for row in found["rows"]] == STAGES
    return found, log[-3 * ROUNDS :]


def test_stages_and_ratios() -> None:
    found, log = _compared([100.0], [25.0], "right")
    rows = {row["stage"]: row for row in found["rows"]}
    assert rows["read"]["all_ms"] == 5 and rows["encode"]["all_ms"] == 10
    assert (rows["prefill"]["all_ms"], rows["prefill"]["median_ms"]) == (100, 25)
    assert rows["prefill"]["speedup"] == pytest.approx(4) and not rows["prefill"]["equal"]
    assert rows["decode"]["median_ms"] == 10 and rows["decode"]["equal"]  # of four tokens
    assert rows["first token"]["speedup"] == pytest.approx(115 / 40)
    assert rows["answer"]["all_ms"] == 145 and rows["answer"]["n"] == ROUNDS
    assert found["answers"] == {"all": "left", "spec": "right"} and not found["agree"]
    assert (found["visual_tokens"], found["kept_tokens"]) == (80, 20)
    assert [sorted(log[i : i + 3]) for i in range(0, len(log), 3)] == [
        ["all", "all", "spec"]
    ] * ROUNDS
    assert len({tuple(log[i : i + 3]) for i in range(0, len(log), 3)}) == 3  # every place


def test_a_difference_within_the_noise_is_none() -> None:
    found, _ = _compared([100.0, 140.0, 80.0], [101.0])
    row = next(row for row in found["rows"] if row["stage"] == "prefill")
    assert row["noise"] > 0.05 and row["equal"] and found["agree"]
    found, _ = _compared([100.0], [101.0])
    assert not next(row for row in found["rows"] if row["stage"] == "prefill")["equal"]


@pytest.mark.parametrize(
    ("args", "bare"),
    [
        (["clip", "q", "--compare"], True),
        (["clip", "q", "--compare", "--json"], True),
        (["--compare", "clip", "q", "--reduce", "evs:0.5"], True),
        (["--reduce=evs:0.5", "--compare", "clip", "q"], True),
        (["clip", "q", "--compare", "evs:0.5"], False),
        (["--compare", "evs:0.5", "clip", "q", "--cache", "sink:4"], False),
        (["clip", "q", "--compare", "evz:0.5"], False),
        (["clip", "q", "--compare=evs:0.5"], False),
        (["clip", "q"], False),
    ],
)
def test_compare_with_and_without_a_spec(args: list[str], bare: bool) -> None:
    given = _with_spec(args)
    assert ("--compare=" in given) == bare
    assert [each.rstrip("=") for each in given] == args


def test_compare_on_the_embedded_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compare, "ROUNDS", 3)
    monkeypatch.setattr("mmfast.bench.timing.WARM_UPS", 1)
    code, out, _ = run(capsys, "ask", CLIP, QUESTION, "--compare", "evs:0.25", "--json")
    document = json.loads(out)
    assert code == 0 and (document["reduce"], document["cache"]) == ("evs:0.25", None)
    assert [row["stage"] for row in document["rows"]] == STAGES
    assert document["answers"]["all"] in {"left", "right", "up", "down"} and "note" not in document
    assert document["kept_tokens"] == round(0.25 * document["visual_tokens"])
    for row in document["rows"]:
        assert min(row["all_ms"], row["median_ms"], row["noise"]) >= 0 and row["n"] == 3
        assert row["equal"] == (abs(row["speedup"] - 1) <= row["noise"])
    other = tmp_path / "noise.mp4"
    write(other, np.random.default_rng(1).integers(0, 256, (6, 96, 96, 3), dtype=np.uint8))
    how = ("--cache", "snapkv:0.5", "--compare")
    code, out, err = run(capsys, "ask", str(other), QUESTION, *how)
    assert code == 0 and "snapkv:0.5 ms" in out and "the answers" in out and "all tokens: " in out
    assert err.count("mmfast: note: ") == 1


def test_wrong_comparisons(capsys: pytest.CaptureFixture[str]) -> None:
    for args in (["--compare"], ["--compare", "evs:0.5", "--reduce", "evs:0.25"]):
        assert "--compare" in fails(capsys, "ask", CLIP, QUESTION, *args)
    assert "snapkv" in fails(capsys, "ask", CLIP, QUESTION, "--compare", "snapkv")
