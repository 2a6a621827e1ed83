"""The recipe of a draft model: FastDraft's two stages, on what the model itself writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_models import tiny as small
from torch.nn.functional import cross_entropy

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.text_chat import load_text
from mmfast.tiny.text import drafts
from mmfast.tiny.text.drafts import DraftLesson, DraftTask, draft_config
from mmfast.tiny.text.exits import written

ARGV = ["--steps", "120", "--prompts", "150", "--blocks", "60", "--context", "48"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt_neox"])
def test_a_smaller_model_of_the_same_class_and_vocabulary(name: str) -> None:
    model = small(name, num_hidden_layers=3)
    config = model.config
    draft = type(model)(draft_config(config, 2, 8))
    assert draft.num_parameters() < model.num_parameters() and draft.config.num_hidden_layers == 2
    assert config.num_hidden_layers == 3 and draft.config.num_attention_heads == 1
    found = draft.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, min_new_tokens=4)
    assert found.shape == (1, 7) and draft.config.vocab_size == config.vocab_size
    for layers, width, words in (
        (2, 9, "no multiple of 8"),
        (4, 8, "choose 1 to 3"),
        (0, 8, "choose 1 to 3"),
    ):
        with pytest.raises(ModelError, match=words):
            draft_config(config, layers, width)


def test_the_loss_is_that_of_each_text_behind_its_prompt() -> None:
    draft, options = small("llama"), drafts.arguments([])
    lessons = [
        DraftLesson(torch.tensor([3, 9, 4, 8, 5]), 2),
        DraftLesson(torch.tensor([7, 2, 8]), 2),
        DraftLesson(torch.tensor([6, 1, 2, 9, 9, 3, 1]), 6),
    ]
    task = DraftTask(draft, lessons, lessons, options)
    total, figures = task.loss(lessons)
    each, right = [], []
    with torch.no_grad():
        for lesson in lessons:
            for place in range(lesson.given, len(lesson.ids)):
                logits = draft(lesson.ids[None, :place]).logits[0, -1]
                each.append(cross_entropy(logits[None], lesson.ids[place : place + 1]))
                right.append(float(logits.argmax() == lesson.ids[place]))
    assert len(each) == 5
    torch.testing.assert_close(total.detach(), torch.stack(each).mean(), atol=1e-5, rtol=0)
    assert figures["right"] == pytest.approx(sum(right) / 5)


def test_what_the_model_writes_ends_where_it_ends_it() -> None:
    model = small("llama")
    ids = torch.tensor([[3, 4, 5, 9], [7, 2, 8, 1]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    free = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
    model.generation_config.eos_token_id = int(free[0, 6])
    model.generation_config.pad_token_id = 0
    found, counts = written(model, inputs, 12)
    for row, stock, count in zip(found, free, counts, strict=True):
        ends = (stock[4:] == free[0, 6]).nonzero().flatten().tolist()
        assert count == (5 + ends[0] if ends else 16)
        assert torch.equal(row[:count], stock[:count])


def _accepted(model: Any, ids: Any, folder: Path) -> float:
    how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 409}  # past full stops
    want = model.generate(ids, **how)
    with attach(model, decode=f"draft:{folder}?adapt=0&least=0&most=4") as trace:
        assert torch.equal(model.generate(ids, **how), want)
    (row,) = [row for row in trace.rows if row.stage == "draft"]
    return row.tokens_out / row.tokens_in


def test_training_makes_a_draft_that_agrees(tmp_path: Path) -> None:
    folder, untrained = tmp_path / "draft", tmp_path / "untrained"
    drafts.main([*ARGV, "--out", str(folder)])
    rows = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    texts, answers = [row["right"] for row in rows if row["stage"] == "held-out"]
    assert answers > texts + 0.15
    model, words = load_text("tiny-text", "cpu", "float32")
    torch.manual_seed(0)
    type(model)(draft_config(model.config, 1, 64)).save_pretrained(untrained)
    words.save_pretrained(untrained)
    ids = drafts.answers(
        model, words, drafts.arguments([*ARGV[:2], "--prompts", "2", "--seed", "9"])
    )
    prompt = ids[0].ids[None, :48]
    assert _accepted(model, prompt, folder) > 0.3 + _accepted(model, prompt, untrained)


def test_a_width_that_no_draft_has_ends_the_recipe_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        drafts.main(["--width", "50", "--out", str(tmp_path)])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: width 50 is no multiple of 32 up to 96")
