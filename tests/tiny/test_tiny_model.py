"""The embedded video model itself: size, loading, what it answers; and that training trains."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, LlavaOnevisionForConditionalGeneration

from mmfast.models.loading import embedded_path
from mmfast.tiny.card import write_card
from mmfast.tiny.evaluate import Subject, run_eval, suite
from mmfast.tiny.suites import SuiteCase
from mmfast.tiny.training import Course, train, update
from mmfast.tiny.video.clips import Bank, make_row
from mmfast.tiny.video.lessons import ClipSampler
from mmfast.tiny.video.model import make_model, make_processor, make_tokenizer
from mmfast.tiny.video.questions import still_facts
from mmfast.tiny.video.scene import TRAIN, make_scene
from mmfast.tiny.video.tower import TowerTask, encode_bank
from mmfast.tiny.video.train import LanguageTask, StagePlan, stills

HOME = embedded_path("tiny-video")
CLIPS = HOME.parents[1] / "clips"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject()


@pytest.fixture(scope="module")
def bank() -> Bank:
    rows = [make_row(make_scene(TRAIN, 9, i)) for i in range(20)]
    frames, patches, cells = (
        torch.stack([torch.from_numpy(getattr(r, name)) for r in rows])
        for name in ("frames", "patches", "cells")
    )
    return Bank(frames, patches, cells, [r.table for r in rows])


def test_checkpoint_is_small_ordinary_and_fp32() -> None:
    assert sum(f.stat().st_size for f in HOME.iterdir()) < 16e6
    assert (HOME / "model.safetensors").stat().st_mode & 0o044 == 0o044
    model, info = LlavaOnevisionForConditionalGeneration.from_pretrained(
        HOME, output_loading_info=True, local_files_only=True
    )
    assert model.dtype == torch.float32
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert json.loads((HOME / "generation_config.json").read_text())["eos_token_id"] == 0


def test_saved_processor_equals_the_recipe() -> None:
    saved, made = AutoProcessor.from_pretrained(HOME), make_processor()
    assert saved.tokenizer.get_vocab() == made.tokenizer.get_vocab()
    assert saved.chat_template == made.chat_template
    assert saved.video_processor.to_dict() == made.video_processor.to_dict()


def test_card_shows_the_figures_of_its_log(tmp_path: Path) -> None:
    for name in ("training.jsonl", "model.safetensors"):
        (tmp_path / name).symlink_to(HOME / name)
    write_card(tmp_path, "tiny-video")
    assert (tmp_path / "README.md").read_text() == (HOME / "README.md").read_text()


@pytest.mark.slow
def test_clips_have_true_answers_and_the_model_knows_them(subject: Subject) -> None:
    listing = json.loads((CLIPS / "clips.json").read_text())
    assert {p.name for p in CLIPS.glob("*.mp4")} == set(listing)
    assert sum(p.stat().st_size for p in CLIPS.iterdir()) < 4e6
    cases = [
        SuiteCase(((CLIPS / name).read_bytes(),), q["question"], q["answer"], q["kind"])
        for name, questions in listing.items()
        for q in questions
    ]
    answers = subject.answers(subject.inputs(cases))
    right = [a == c.answer for a, c in zip(answers, cases, strict=True)]
    assert sum(right) >= 0.9 * len(right)
    shown = ("Which way does the red circle move?", True)
    assert shown in [(c.question, r) for c, r in zip(cases, right, strict=True)]


def test_case_and_punctuation_do_not_matter(subject: Subject) -> None:
    clip = (CLIPS / "red-circle.mp4").read_bytes()
    asked = "Which way does the red circle move?"
    forms = [asked, asked.upper(), asked.rstrip("?"), f"  {asked} "]
    answers = subject.answers(subject.inputs([SuiteCase((clip,), q, "", "") for q in forms]))
    assert len(set(answers)) == 1


@pytest.mark.slow
def test_unseen_questions() -> None:
    done: list[int] = []
    found = run_eval([], 48, 1234, progress=lambda _, part, total: done.append(part))
    assert found["suite"] == "video" and found["n"] == 48 and done[-1] == 48
    (row,) = found["rows"]
    assert row["reduce"] is None and row["kept"] == 288 and row["ttft_ms"] > 0
    assert row["accuracy"] >= 0.9
    assert len(row["by_kind"]) == 8


def test_batch_equals_one_by_one(subject: Subject) -> None:
    cases = suite(8, 55)
    together = subject.answers(subject.inputs(cases))
    assert together == [subject.answers(subject.inputs([case]))[0] for case in cases]


@pytest.mark.slow
def test_a_few_steps_lower_the_losses(bank: Bank) -> None:
    torch.manual_seed(0)
    model = make_model(len(make_tokenizer()), 0)
    log: list[dict[str, object]] = []
    train(TowerTask(model, bank, 0, size=8), Course("tower", steps=12, every=3), log.append)
    assert float(str(log[-1]["loss"])) < 0.8 * float(str(log[0]["loss"]))
    tokens = encode_bank(model, bank)
    assert tokens.shape == (20, 8, 36, 192)
    pictures = stills(model, bank, 20, make_tokenizer(), 0)
    plan = StagePlan(batch=4, questions=3, held=4, warm=2, stills=0.3, names=True)
    clips = ClipSampler(bank, tokens, make_tokenizer(), 0)
    task = LanguageTask(model, clips, plan, 0, pictures)
    losses = [update(task, task.batches(i, 0.1), 1.0)["loss"] for i in range(12)]
    assert set(task.look()) == {"mean", "kinds", "quarter"}
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3])


def test_picture_lessons_follow_the_image_path(bank: Bank) -> None:
    model, processor = make_model(len(make_tokenizer()), 0).eval(), make_processor()
    pictures = stills(model, bank, 20, make_tokenizer(), 0)
    chosen = pictures.draw(2)
    lesson = pictures.lesson(chosen, 3)
    times = np.random.default_rng([0, 1]).integers(8, size=20)
    picture = bank.frames[chosen[0], times[chosen[0]]]
    batch = processor(text=["<image>"], images=[picture], return_tensors="pt")
    stock = model.get_image_features(batch["pixel_values"], batch["image_sizes"]).pooler_output[0]
    assert batch["input_ids"].shape[1] == len(stock) == lesson.tokens.shape[2] + 1
    assert torch.allclose(stock[:-1], lesson.tokens[0, 0], atol=2e-2)  # kept as half precision
    assert any(list(still_facts(t, 0)) for t in bank.tables)
