"""The recipe of the learned compressors: lessons taken apart, and a loss that falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clip_lessons import clip_lessons

from mmfast.compressors.base import Compressed, Compressor, load
from mmfast.compressors.query_compressor import QueryCompressor
from mmfast.models.loading import embedded_path
from mmfast.models.loading import load as load_model
from mmfast.tiny import training
from mmfast.tiny.video import compressors as recipe
from mmfast.tiny.video import scene
from mmfast.tiny.video.lessons import ClipSampler, answer, answer_loss

HELD = 4


@pytest.fixture(scope="module")
def school() -> tuple[Any, ClipSampler]:
    """The model, and sixteen clips with their features."""
    model, processor = load_model(embedded_path("tiny-video"), "cpu", "float32")
    return model, clip_lessons(model, processor, 16)


class Everything(Compressor, name="everything"):
    """All patches as they are."""

    def forward(self, x: Any, question: Any = None, known: Any = None) -> Any:
        x = x.expand(*question.shape[:-2], *x.shape[-3:])
        place = torch.arange(x.shape[-2]).expand(x.shape[:-1])
        return Compressed(x, place, place)


@torch.no_grad()
def test_questions_alone_are_answered_as_in_their_lesson(school: tuple[Any, ClipSampler]) -> None:
    model, clips = school
    lesson = clips.lesson([0, 1, 2], 5, dict.fromkeys(recipe.KINDS, 1.0))
    packed = recipe.alone(lesson)
    states, out = recipe.respond(model, Everything(), lesson.tokens, packed)
    assert out.score is None
    whole = answer(model, lesson, lesson.every).states
    mine, theirs = packed.labels != scene.IGNORE, lesson.packed.labels != scene.IGNORE
    assert int(mine.sum()) == int(theirs.sum()) > 0
    torch.testing.assert_close(states[mine], whole[theirs], rtol=1e-4, atol=1e-4)
    assert [len(row) for row in packed.correct(model.lm_head(states).argmax(-1))].count(0) == len(
        packed.ids
    ) - sum(map(len, lesson.kinds))


def test_the_loss_falls_and_the_model_stays(
    school: tuple[Any, ClipSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clips = school
    monkeypatch.setattr(recipe, "CLIPS", 2)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    torch.manual_seed(0)
    task = recipe.CompressorTask(
        model, QueryCompressor(192, 1, (6, 6)), clips, 0, held=2, questions=4
    )
    (lesson,) = task.batches(0, 0.0)

    def loss() -> float:
        packed = recipe.alone(lesson)
        with torch.no_grad():
            states, _ = recipe.respond(model, task.compressor, lesson.tokens, packed)
            return float(answer_loss(model, states, packed.labels))

    first = loss()
    for _ in range(5):
        training.update(task, [lesson], 1.0)
    assert loss() < 0.95 * first
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name]), name
    assert 0 <= task.look()["mean"] <= 1


def test_a_run_leaves_a_file_and_a_log(
    school: tuple[Any, ClipSampler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, clips = school
    monkeypatch.setattr(recipe, "CLIPS", 2)
    options = recipe.arguments(["--out", str(tmp_path), "--tokens", "4", "--steps", "1"])
    options.held = HELD
    log = training.Log(tmp_path / "compressors")
    recipe.train_all(options, log, model, clips)
    made = load(tmp_path / "compressors" / "query_compressor-4.safetensors")
    assert made.config["tokens"] == 4 and made.config["asks"]
    start = embedded_path("tiny-video") / "compressors" / "query_compressor-1.safetensors"
    torch.manual_seed(0)
    grown = QueryCompressor(192, 4, (6, 6))
    recipe.go_on(grown, start)
    one, four = load(start).state_dict(), grown.state_dict()
    assert all(torch.equal(one[name], four[name]) for name in one if name != "learned")
    assert 0 < (four["learned"] - one["learned"]).abs().max() < 0.1
    rows = [json.loads(line) for line in log.path.read_text().splitlines()]
    assert {"query_compressor-4", "held-out", "saved"} <= {row["stage"] for row in rows}


def test_shipped_weights_are_small_and_say_how_they_were_made() -> None:
    folder = embedded_path("tiny-video") / "compressors"
    rows = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    for tokens in (1, 4):
        file = folder / f"query_compressor-{tokens}.safetensors"
        assert file.stat().st_size < 3e6
        assert load(file).config["tokens"] == tokens
        assert any(row.get("file") == file.name for row in rows)


@torch.no_grad()
def test_the_teacher_says_what_it_looks_at(school: tuple[Any, ClipSampler]) -> None:
    """Against stock attention weights of one question after the other, frames in turn."""
    model, clips = school
    lesson = clips.lesson([0, 1], 3, dict.fromkeys(recipe.KINDS, 1.0))
    taught, packed = recipe.teach(model, lesson), recipe.alone(lesson)
    frames, patches = lesson.tokens.shape[1:3]
    lm = model.model.language_model
    lm.config._attn_implementation = "eager"
    try:
        done = 0
        for row, ids in enumerate(packed.ids):
            inside = packed.block[row] >= 0
            text = lm.embed_tokens(ids[inside])
            user = lm.embed_tokens(torch.tensor([recipe.USER]))
            shown = lesson.tokens[row // 3].flatten(0, 1)
            prompt = torch.cat([user, shown, model.model.image_newline[None], text])[None]
            out = lm(inputs_embeds=prompt, output_attentions=True)
            labels = packed.labels[row][inside]
            begin = prompt.shape[1] - len(labels)
            asked = [n for n in range(len(labels)) if labels[n] != scene.IGNORE]
            logits = model.lm_head(out.last_hidden_state[0, [begin + n for n in asked]])
            mine = taught.logits[done : done + len(asked)]
            torch.testing.assert_close(mine, logits, rtol=1e-3, atol=1e-3)
            done += len(asked)
            words = [n for n in asked if labels[n] != recipe.END]
            for frame in range(frames):
                at = begin + words[frame % len(words)]
                begins = 1 + frame * patches
                seen = torch.zeros(patches)
                for weight in out.attentions[1:]:
                    for line in weight[0, :, at, : 1 + frames * patches]:
                        seen += (line / line.sum())[begins : begins + patches] ** 3
                mine = taught.share[row, frame]
                torch.testing.assert_close(mine, seen / seen.sum(), rtol=1e-3, atol=1e-4)
        assert done == len(taught.logits)
    finally:
        lm.config._attn_implementation = "sdpa"


def test_guidance_is_least_where_the_choice_is_the_teachers() -> None:
    torch.manual_seed(3)
    share = torch.rand(2, 3, 6).softmax(-1)
    mass = torch.tensor([[0.2, 0.5, 0.3], [0.0, 0.0, 0.0]])  # the second row is empty
    taught = recipe.Taught(torch.zeros(0), share, mass)
    allowed = torch.tensor([[True] * 3 + [False] * 3, [False] * 3 + [True] * 3])
    score = torch.log(share)[:, :, None].masked_fill(~allowed, float("-inf"))
    least = recipe.guidance(score, taught)
    halves = share[0].unflatten(-1, (2, 3))
    weight = halves.sum(-1) * mass[0][:, None]
    inside = halves / halves.sum(-1, keepdim=True)
    by_hand = -(inside * inside.log()).sum(-1)
    torch.testing.assert_close(least, (by_hand * weight).sum() / weight.sum())
    for _ in range(5):
        assert recipe.guidance(score + torch.randn(score.shape), taught) > least
    moved = score.clone()
    moved[1] = torch.randn(moved[1].shape).masked_fill(~allowed, float("-inf"))
    assert recipe.guidance(moved, taught) == least


@pytest.mark.parametrize("text", ["--clips 20", "--tokens none", "--compresor x"])
def test_wrong_arguments_are_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        recipe.arguments(text.split())
