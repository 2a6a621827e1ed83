"""The grid behind the scaling law: its work by the one cost model, resuming, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clip_lessons import clip_lessons

from mmfast.bench.suites import law
from mmfast.models.cost import prefill_flops
from mmfast.models.loading import embedded_path
from mmfast.models.loading import load as load_model
from mmfast.tiny import training
from mmfast.tiny.video import compressors
from mmfast.tiny.video.lessons import ClipSampler

SMALL = ["--clips", "6", "--held", "3", "--batch", "2", "--questions", "3", "--steps", "2"]


@pytest.fixture(scope="module")
def school() -> tuple[Any, ClipSampler]:
    """The model, and six clips with their features."""
    model, processor = load_model(embedded_path("tiny-video"), "cpu", "float32")
    return model, clip_lessons(model, processor, 6)


@pytest.fixture
def grid(
    school: tuple[Any, ClipSampler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Options of two sizes with two numbers of tokens, on a bank that is there already."""
    bank = (school[1].bank, school[1].tokens)
    monkeypatch.setattr(law.tower, "encoded_clips", lambda model, many, seed, log: bank)
    cells = ["--sizes", "64x2", "32x1", "--tokens", "4", "1"]
    return [*cells, *SMALL, "--out", str(tmp_path / "rows.jsonl"), "--log", str(tmp_path / "log")]


def _rows(options: list[str]) -> list[dict[str, Any]]:
    text = Path(options[options.index("--out") + 1]).read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_work_is_that_of_the_one_cost_model(school: tuple[Any, ClipSampler]) -> None:
    model, _ = school
    base = model.config.text_config
    own = law.config_of(base, 192, 5)
    assert own.to_dict() == base.to_dict()  # the largest decoder of the grid is the embedded one
    assert law.flops_of(own, [50, 8]) == [prefill_flops(model, [n] * 5) for n in (50, 8)]
    wide, n = 64 * 448 // 192, 20
    layer = 2 * n * (4 * 64 * 64 + 3 * 64 * wide) + 4 * 64 * n * (n + 1) // 2
    expected = 2 * layer + 2 * 64 * base.vocab_size
    assert law.flops_of(law.config_of(base, 64, 2), [n]) == [expected]
    decoder = law.SizedReader(own, 192, 1, 6)
    embedded = sum(each.numel() for each in model.model.language_model.layers.parameters())
    assert decoder.parameters_of_layers == embedded


def test_cells_are_measured_cheapest_first_and_a_run_goes_on(
    grid: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, seen = law.measure, list[Any]()

    def stops(cell: Any, *rest: Any) -> Any:
        if len(seen) == 2:
            raise RuntimeError("killed")
        seen.append(cell)
        return measure(cell, *rest)

    monkeypatch.setattr(law, "measure", stops)
    with pytest.raises(RuntimeError, match="killed"):
        law.main(grid)
    assert seen == [("32x1", 1, 0), ("32x1", 4, 0)]
    first = _rows(grid)
    path = Path(grid[grid.index("--out") + 1])
    with path.open("a") as file:
        file.write('{"suite": "scaling-law", "key": "64x2 1')  # killed while it wrote
    seen.clear()
    law.main(grid)
    assert seen == [("64x2", 1, 0), ("64x2", 4, 0)]
    rows = _rows(grid)
    assert rows[:2] == first and len(rows) == 4
    law.main(grid)  # nothing left
    assert _rows(grid) == rows and len(seen) == 2
    seen.clear()
    law.main([*grid, "--steps", "1", "--sizes", "32x1", "--tokens", "1"])  # another measurement
    assert [row["steps"] for row in _rows(grid)] == [2, 2, 2, 2, 1]


def test_a_row_repeats_and_says_under_which_conditions(grid: list[str]) -> None:
    one = [*grid, "--sizes", "32x1", "--tokens", "9"]
    law.main(one)
    (row,) = _rows(grid)
    assert row["suite"] == "scaling-law" and row["model"] == "tiny-video"
    assert {"versions", "commit", "date", "processor", "seed", "steps", "batch"} <= row.keys()
    assert (row["visual"], row["size"], row["tokens"]) == (72, "32x1", 9)
    assert len(row["right"]) == len(row["asked"]) == row["held"] == 3
    assert row["n"] == sum(row["asked"]) and row["score"] == sum(row["right"]) / row["n"]
    assert row["flops"]["0"] < row["flops"]["16"] < row["flops"]["128"]
    law.main([*one, "--seeds", "0", "1"])
    same, other = _rows(grid)[0], _rows(grid)[1]
    assert (same, other["seed"]) == (row, 1) and other["loss"] != row["loss"]
    Path(grid[grid.index("--out") + 1]).unlink()
    law.main(one)
    assert _rows(grid) == [row]


def test_every_cell_is_asked_alike_and_learns(school: tuple[Any, ClipSampler]) -> None:
    model, clips = school
    options, lessons = law.arguments([*SMALL, "--batch", "3"]), list[Any]()
    for size, tokens in (("32x1", 1), ("64x2", 9)):
        torch.manual_seed(0)
        config = law.config_of(model.config.text_config, *law.size_of(size))
        task = law.SizedTask(law.SizedReader(config, 192, tokens, 6), clips, 3, options)
        (lesson,) = task.batches(0, 0.0)
        lessons.append(lesson)
        before = {name: each.clone() for name, each in task.reader.named_parameters()}
        losses = [training.update(task, [lesson], 1.0)["loss"] for _ in range(6)]
        assert losses[-1] < 0.9 * losses[0]
        changed = {n for n, each in task.reader.named_parameters() if not each.equal(before[n])}
        assert {"enter.weight", "image_newline", "compressor.choose.weight"} <= changed
    assert lessons[0].packed.ids.equal(lessons[1].packed.ids)
    assert lessons[0].tokens.equal(lessons[1].tokens)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--sizes", "64"], "size '64' is not WIDTHxLAYERS; give for example 32x2"),
        (["--sizes", "64x0"], "size '64x0' is not WIDTHxLAYERS"),
        (["--sizes", "70x2"], "width 70 of size '70x2' is no multiple of 32"),
        (["--tokens", "37"], "--tokens 37 must be 1 to 36, the patches of a frame"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--clips", "100"], "--clips 100 must be at least 264"),
    ],
)
def test_bad_options_are_told_in_one_line(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        law.main(given)
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_another_model_is_refused_in_one_line(
    grid: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = SimpleNamespace(model=None)  # no LLaVA-OneVision
    monkeypatch.setattr(compressors, "load", lambda *_: (other, None))
    told = "error: 'tiny-video' is a SimpleNamespace; the lessons are those of tiny-video: name"
    with pytest.raises(SystemExit, match=r"^2$"):
        law.main(grid)
    assert capsys.readouterr().err.splitlines()[-1].startswith(told)
