"""Questions and probes about the present, beside a clip of the same seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mmfast
from mmfast.bench.report.docs import write_table
from mmfast.cli import main as cli
from mmfast.tiny.stream.present import (
    KINDS,
    PresentQuestion,
    clip_times,
    present_row,
    questions_at,
    run_present,
)
from mmfast.tiny.stream.world import World

MEMORY = "sink:64+window:576+retrieve:16"


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-stream", device="cpu")


def test_probes_and_counts_now_are_answered_from_the_last_seconds(pipe: Any) -> None:
    """A subscription, a waiting caller and a question; the fault is the model alone."""
    world = World(seed=12, every=12, facts=2)
    event = world.event(0)
    frames = [(world.frame(second), float(second)) for second in range(int(event.stop))]
    there = len(event.place.things)
    with pipe.open(memory=MEMORY) as session:
        told = list[float]()
        session.subscribe(f"there is a {event.name}", lambda e: told.append(e.time), every=0.0)
        session.subscribe("there is a number 7 star", lambda e: told.append(-1.0), threshold=1.0)
        for frame, time in frames:
            session.push(frame, time)
        assert told == [float(np.ceil(event.start))]
        assert session.ask("How many objects are there now?").read() == str(there)
        assert session.ask(f"Is there a {event.name} now?").read() == "yes"
        at = session.ask(f"Where is the {event.name} now?")
        assert at.read() == event.corner and at.trace.rows[0].stage == "clip"
    with pipe.open(memory=MEMORY) as session:
        session.watch(iter(frames), background=True)
        found = session.wait_until(f"Is there a {event.name} now?", timeout=120)
        assert found is not None and found.time >= event.start
    with pipe.open(memory=MEMORY) as session:
        session.stream.recent = None
        session.push([frame for frame, _ in frames], [time for _, time in frames])
        assert session.ask(f"Is there a {event.name} now?").read() != "yes"


def test_questions_have_the_truth_of_their_moment() -> None:
    kinds, answers = set[str](), dict[str, set[str]]()
    for seed in range(6):
        world = World(seed, every=40)
        for time in range(50, 300, 50):
            place, times = world.place_at(time), clip_times(world, time)
            assert 1 <= len(times) <= 8 and times[-1] == time
            assert all(world.place_at(second) == place for second in times)
            assert len(times) == 8 or world.place_at(times[0] - 1) != place
            names = {f"{thing.colour} {thing.shape}" for thing in place.things}
            for each in questions_at(world, time, np.random.default_rng(seed)):
                kinds.add(each.kind)
                answers.setdefault(each.kind, set()).add(each.answer)
                if each.kind in ("exists", "probe"):
                    assert any(name in each.text for name in names) == (each.answer == "yes")
                if each.kind == "count":
                    assert int(each.answer) == len(place.things)
    assert kinds == set(KINDS) and answers["probe"] == answers["exists"] == {"yes", "no"}
    assert len(answers["direction"]) > 2


def test_a_row_has_both_and_their_ratio_and_makes_a_table() -> None:
    marks = [("count", True, True), ("count", False, True), ("probe", True, False)]
    row = present_row("push", marks)
    assert row["by_kind"]["count"] == {"n": 2, "right": 0.5, "clip": 1.0, "relative": 0.5}
    assert row["by_kind"]["probe"]["relative"] is None and row["accuracy"] == 2 / 3
    stamp = {"n": 3, "seed": 0, "model": "m", "streams": 1, "date": "2026-01-01", "commit": "c"}
    text = "\n".join(write_table("present", [{**row, **stamp}]))
    assert "| count | 2 | 100.0 | 50.0 | 50.0 |" in text
    assert len({PresentQuestion("a", "b", "c", "d")} | {PresentQuestion("a", "b", "c", "d")}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_each_kind_reaches_nine_tenths_of_the_clip(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The run of the results: fewer questions leave a kind a dozen, of which two decide."""
    out = tmp_path / "eval-present.jsonl"
    asked = ["--n", "240", "--seed", "1000", "--out", str(out), "--json"]
    with pytest.raises(SystemExit) as stop:
        cli(["eval", "--suite", "present", *asked])
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in rows] == ["push", "watch"] and out.read_text().count("\n") == 2
    for row in rows:
        for kind, mark in row["by_kind"].items():
            assert mark["right"] >= 0.9 * mark["clip"] or mark["n"] < 10, (row["way"], kind, mark)


@pytest.mark.parametrize("suite", ["present", "history"])
def test_what_the_suites_would_ignore_is_refused(
    suite: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, value in (("--reduce", "evs:0.5"), ("--cache", "snapkv:64"), ("--model", "x")):
        with pytest.raises(SystemExit) as stop:
            cli(["eval", "--suite", suite, option, value])
        assert stop.value.code
        assert "leave --reduce, --cache and --model out" in capsys.readouterr().err


@pytest.mark.slow
def test_present_runs_are_repeatable() -> None:
    first, second = (run_present(20, 3, ["push"])["rows"] for _ in range(2))
    assert first == second
