"""Recipe of a tower without attention in some blocks: a loss that falls, a file, a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_lessons import clip_lessons

from mmfast import pipeline
from mmfast.core.trace import Trace
from mmfast.models.loading import embedded_path, load
from mmfast.models.vision.folding import file_of, folded_tower, read
from mmfast.tiny import training
from mmfast.tiny.video import folding as recipe
from mmfast.tiny.video.lessons import answer

CLIPS = Path(__file__).parents[2] / "assets" / "clips"
HELD = 2


@pytest.fixture(scope="module")
def school() -> tuple[Any, Any]:
    """The model, and four clips with their features."""
    model, processor = load(embedded_path("tiny-video"), "cpu", "float32")
    return model, clip_lessons(model, processor, 4)


@pytest.mark.slow
def test_the_loss_falls_and_the_stock_model_stays(
    school: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "CLIPS", 1)
    model, clips = school
    before = {name: each.clone() for name, each in model.state_dict().items()}
    options = recipe.arguments(["--out", str(tmp_path), "--steps", "2", "--blocks", "2", "1"])
    options.held = HELD
    task = recipe.FoldTask(model, [1, 2], clips, 0, held=HELD, questions=2)
    for chosen, lesson in task.exam:  # clips that run backwards are met, and known as such
        states = answer(model, lesson, lesson.every).states
        mine = task._states(chosen, lesson, clips.tokens[list(chosen)].float().flatten(0, 1))
        torch.testing.assert_close(mine, states, rtol=1e-4, atol=1e-4)
    batch = task.batches(0, 0.0)
    losses = [sum(training.update(task, batch, 1.0).values()) for _ in range(3)]
    assert losses[2] < 0.95 * losses[0]
    recipe.train_one(options, training.Log(tmp_path / "towers"), model, clips)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]), name
    log = (tmp_path / "towers" / "training.jsonl").read_text()
    rows = [json.loads(line) for line in log.splitlines()]
    stages = {row["stage"]: row for row in rows}
    assert {"full", "dropped", "riformer-2", "held-out", "saved"} <= set(stages)
    assert stages["dropped"]["flops"] < 0.8 * stages["full"]["flops"]
    path = file_of(tmp_path, 2)
    assert read(path).blocks == [1, 2]
    with folded_tower(model, f"riformer:2?path={path}", Trace()):
        mean = task.score(model)["mean"]
    assert mean == pytest.approx(stages["held-out"]["mean"], abs=0.26)


@pytest.mark.parametrize("text", ["--clips 20", "--blocks none", "--block"])
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())


def test_the_embedded_tower_answers_with_less_attention() -> None:
    clip = Path(CLIPS, "red-circle.mp4")
    stock, folded = (
        pipeline("video-qa", model="tiny-video", encoder=e) for e in (None, "riformer:2")
    )
    for question in ("Which way does the red circle move?", "What color is the circle?"):
        said = folded(clip, question)
        assert str(said) == str(stock(clip, question))
        assert "no attention in blocks 1, 2 of 4" in str(said.trace)
