"""Weights of `top` and `bavit` that come with `tiny-video`: found by name, better than chance."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mmfast
from mmfast.attach import attach
from mmfast.cli import main
from mmfast.core.errors import ModelError
from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import embedded_path
from mmfast.tiny.evaluate import Subject
from mmfast.tiny.suites import suite, suite_of

HOME = embedded_path("tiny-video")
CLIP = Path(__file__).parents[2] / "assets" / "clips" / "red-circle.mp4"
FILES = {"top": "top-2.safetensors", "bavit": "bavit.safetensors"}
BUDGET, QUESTIONS, SEED = 0.1, 32, 500


@lru_cache(maxsize=1)
def school() -> tuple[Subject, list[Any], Any]:
    subject = Subject("tiny-video", "cpu", suite_of("video"))
    cases = suite(QUESTIONS, SEED, "video")
    return subject, cases, subject.inputs(cases)


@lru_cache(maxsize=8)
def right(spec: str) -> int:
    """Right answers on the fixed questions."""
    subject, cases, inputs = school()
    with torch.inference_mode(), attach(subject.model, spec):
        found = subject.answers(inputs)
    return sum(mine == case.answer for mine, case in zip(found, cases, strict=True))


def shuffled(name: str, folder: Path) -> str:
    """The spec of the same weights, the numbers of each tensor in another order."""
    source, path = HOME / "rankers" / FILES[name], folder / FILES[name]
    made = torch.Generator().manual_seed(0)
    mixed = {
        key: value.flatten()[torch.randperm(value.numel(), generator=made)].view(value.shape)
        for key, value in load_file(source).items()
    }
    with safe_open(source, "pt") as file:
        save_file(mixed, path, file.metadata())
    return f"{name}:{BUDGET}?path={path}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_shipped_weights_are_better_than_chance_and_shuffled_ones_are_not(
    name: str, tmp_path: Path
) -> None:
    chance = right(f"random:{BUDGET}")
    mine = right(f"{name}:{BUDGET}")
    assert mine >= chance + 3
    assert right(shuffled(name, tmp_path)) <= mine - 5  # a planted fault


@pytest.mark.parametrize("name", FILES)
def test_shipped_weights_are_found_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec, question = f"{name}:0.25", "Which way does the red circle move?"
    answer = mmfast.pipeline("video-qa", "tiny-video", reduce=spec)(CLIP, question)
    assert (answer.text, answer.kept_tokens) == ("left", answer.visual_tokens // 4)
    with pytest.raises(SystemExit, match="0"):
        main(["ask", str(CLIP), question, "--model", "tiny-video", "--reduce", spec, "--json"])
    assert json.loads(capsys.readouterr().out)["answer"] == "left"


@pytest.mark.parametrize("name", FILES)
def test_shipped_weights_are_small_and_say_how_they_were_made(name: str) -> None:
    folder = HOME / "rankers"
    rows = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    assert any(row.get("file") == FILES[name] for row in rows)
    assert (folder / FILES[name]).stat().st_size < 2e5
    assert sum(file.stat().st_size for file in HOME.rglob("*") if file.is_file()) < 24e6


def test_a_model_without_them_is_named_in_the_command_that_trains_them() -> None:
    with pytest.raises(ModelError, match=r"--layers 2 --ranker top --model \S*tiny-scenes`"):
        mmfast.pipeline("video-qa", device="cpu", reduce="top:0.25")(CLIP, "What moves?")


def test_a_stream_finds_the_weights_of_its_model_by_name() -> None:
    with mmfast.pipeline("video-stream", "tiny-video", reduce="bavit:0.25").open() as session:
        for frame in read_video(str(CLIP), frames=3).frames:
            session.push(frame)
        stats = session.stats()
        assert stats["frames"] == 3 and stats["tokens"] == 3 * 9
        assert "".join(session.ask("What colour is the circle?")) == "red"
