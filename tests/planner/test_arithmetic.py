"""`weights="fastest"`: what is chosen from times, and that they are measured once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import CLIP, QUESTION, fails

import mmfast
from mmfast.core.errors import ModelError
from mmfast.models.loading import load
from mmfast.models.packing import STOCK
from mmfast.planner import arithmetic
from mmfast.planner.arithmetic import FastestSpec, choose, fastest, parse_fastest, use_weights

TIMES = {STOCK: (10.0, 0.0), "float16": (6.0, 2e-4), "int8": (4.0, 8e-3), "int4": (3.0, 0.08)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that does not exist yet."""
    monkeypatch.setenv("MMFAST_CACHE_DIR", str(tmp_path / "new" / "home"))
    return tmp_path / "new" / "home"


@pytest.fixture(scope="module")
def model() -> Any:
    return load(None, "cpu", "auto")[0]


def test_the_fastest_within_the_error_that_gains_a_tenth() -> None:
    wanted = {1e-5: STOCK, 1e-3: "float16", 0.01: "int8", 0.5: "int4"}
    assert {limit: choose(TIMES, limit) for limit in wanted} == wanted
    assert choose({STOCK: (10.0, 0.0), "int8": (9.5, 0.0)}, 0.1) == STOCK
    assert choose({STOCK: (10.0, 0.0)}, 0.1) == STOCK


def test_specs() -> None:
    assert parse_fastest("int8") is None and parse_fastest("fastest") == FastestSpec(0.01)
    assert parse_fastest("fastest?error=0.02") == FastestSpec(0.02)
    for bad in ("fastest?error=2", "fastest?error=x", "fastest?error=", "fastest?error=nan"):
        with pytest.raises(ModelError, match="no share between 0 and 1"):
            parse_fastest(bad)
    with pytest.raises(ModelError, match=r"knob.*'limit'.*error"):
        parse_fastest("fastest?limit=2")


def test_prompts_take_the_form_of_steps_where_it_costs_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tower = {STOCK: (10.0, 0.0), "float16": (5.0, 2e-4)}
    times = {"decode": TIMES, "prefill": {STOCK: (10.0, 0.0), "int8": (10.5, 8e-3)}}
    monkeypatch.setattr(arithmetic, "measured", lambda _: {**times, "tower": tower})
    plan = fastest(model)
    assert (plan.few, plan.many, plan.tower) == ("int8", "int8", "float16")
    assert "decode int8 (2.5x, error 0.008)" in plan.why and "tower float16 (2.0x" in plan.why
    times["prefill"]["int8"] = (20.0, 8e-3)
    assert fastest(model).many == STOCK
    monkeypatch.setattr(arithmetic, "measured", lambda _: {"decode": TIMES, "prefill": TIMES})
    assert fastest(model, FastestSpec(1e-5)).why.endswith("prefill as loaded")


def test_devices_are_measured_once(model: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = arithmetic.measured(model)
    assert found.keys() == {"decode", "prefill", "tower"}
    assert all(ms > 0 and 0 <= e < 0.2 for part in found.values() for ms, e in part.values())
    (file,) = home.iterdir()
    key = json.loads(file.read_text())["key"]
    assert key["torch"] == torch.__version__ and key["shapes"]["decoder"] == [448, 192]
    measure = arithmetic._times
    monkeypatch.setattr(arithmetic, "_times", lambda *_: pytest.fail("measured twice"))
    assert arithmetic.measured(model) == found
    for damage in ("", "{", '{"times": {}}', file.read_text().replace('"int8"', '"int99"')):
        file.write_text(damage)
        monkeypatch.setattr(arithmetic, "_times", measure)
        assert arithmetic.measured(model).keys() == found.keys()


class _MadeAtFirst:
    """A form of weights whose kernel is made at its first call, as those of oneDNN are."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight, self._made = weight, False

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if not self._made:
            time.sleep(0.2)
        self._made = True
        return torch.nn.functional.linear(x, self._weight, bias)


def test_a_kernel_that_is_made_at_its_first_call_is_not_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arithmetic, "pack", lambda _, weight: _MadeAtFirst(weight))
    found = arithmetic._times((512, 512), 1, torch.float32, ("int8",))
    assert found["int8"][0] < 50 and found["int8"][1] < 1e-6


def test_folders_that_cannot_be_written_are_no_error(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMFAST_CACHE_DIR", str(tmp_path / "file" / "home"))
    assert arithmetic.measured(model)


def test_pipelines_say_what_was_chosen(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "measured", lambda _: {"decode": TIMES, "prefill": TIMES})
    pipe = mmfast.pipeline("video-qa", device="cpu", weights="fastest")
    (note,) = [n for n in pipe(CLIP, QUESTION).trace.notes if n.startswith("weights: ")]
    assert "layers int8" in note and "error at most 0.01: decode int8 (2.5x" in note
    slow = {STOCK: (1.0, 0.0)}
    monkeypatch.setattr(arithmetic, "measured", lambda _: {"decode": slow, "prefill": slow})
    found = use_weights(load(None, "cpu", "auto")[0], "fastest")
    assert found is not None and found.note.startswith("weights: as loaded (error at most 0.01")


def test_the_command_line_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    told = fails(capsys, "ask", CLIP, QUESTION, "--weights", "int9")
    assert "'int9'" in told and "int8-dynamic" in told and "fastest" in told
    told = fails(capsys, "eval", "--suite", "speech", "--weights", "int8")
    assert "takes no --weights" in told
