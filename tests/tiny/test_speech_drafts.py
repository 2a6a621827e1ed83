"""Chained draft modules learn on single places what they are asked for while drafting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from speech_fakes import random_speech_model

from mmfast.heads.base import causal_mask
from mmfast.tiny.speech import drafts
from mmfast.tiny.speech import train as speech
from mmfast.tiny.speech.bank import SpokenText
from mmfast.tiny.speech.drafts import ChainedTask, ParallelTask, make_places
from mmfast.tiny.training import Course, train, update

WORDS = ("the", "red", "circle", "moves", "left", ".")


@pytest.fixture(scope="module")
def parts() -> tuple[Any, list[SpokenText]]:
    """A random model, and texts with random sound."""
    model, rng = random_speech_model(), np.random.default_rng(0)
    layout = model.layout
    groups = [layout.group(word) for word in WORDS]
    said = []
    for _ in range(6):
        sounds = [rng.integers(layout.base, layout.total, rng.integers(2, 12)) for _ in groups]
        said.append(SpokenText((0, 1, 1), groups, sounds))
    return model, said


def test_places_are_what_the_backbone_says_of_them(parts: Any) -> None:
    model, said = parts
    lm = model.backbone.model
    data = make_places(lm, model.layout, said, 0)
    texts = model.layout.texts
    assert len(data.hidden) == len(data.ids) == len(data.chosen) == len(data.run)
    assert torch.equal((data.hidden @ lm.lm_head.weight[texts:].T).argmax(-1), data.chosen)
    owing = torch.nonzero(data.run).flatten()
    assert (data.ids[owing + 1] >= texts).all()  # what such a place owes is sound
    going_on = owing[data.run[owing] > 1]
    assert torch.equal(data.run[going_on + 1], data.run[going_on] - 1)
    sounds = sum(len(s) + 1 for each in said for s in each.sounds)
    assert sounds <= len(owing) <= 2 * sounds  # each text once, some once more


def test_modules_learn_what_drafting_computes(parts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "CHAINED", 4)
    monkeypatch.setattr(drafts, "REPEATS", 1)
    monkeypatch.setattr(drafts, "CHAINED_INNER", 24)
    model, said = parts
    lm = model.backbone.model
    data = make_places(lm, model.layout, said, 0)
    task = ChainedTask(model.backbone, model.layout, data, data, 0)
    at = int(torch.nonzero(data.run > 5)[0])
    total, right = task.judge(data, torch.tensor([at]))
    line = torch.arange(at, at + 7)
    hidden, embeds = data.hidden[line][None], lm.model.embed_tokens.weight[data.ids[line]][None]
    head, texts = task.head.eval(), model.layout.texts
    mask = causal_mask(7, hidden, 1)
    want = torch.zeros(())
    for k, states in enumerate(head(hidden, embeds, mask)[:5]):
        logits = head.output(k, states[:, 0], slice(texts, None))
        label = data.chosen[at + k + 1][None]
        want += drafts.CHAINED_FADE**k * torch.nn.functional.cross_entropy(logits, label)
        assert right[k] == float(logits.argmax(-1) == label)
    torch.testing.assert_close(total, want, atol=1e-4, rtol=1e-4)


def test_they_get_better_and_are_judged_on_other_texts(parts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "CHAINED", 3)
    monkeypatch.setattr(drafts, "CHAINED_BATCH", 64)
    model, said = parts
    lm = model.backbone.model
    data, held = (make_places(lm, model.layout, s, 0) for s in (said[1:], said[:1]))
    task, rows = ChainedTask(model.backbone, model.layout, data, held, 0, 5e-3), list[Any]()
    places = torch.arange(len(data.run))[data.run > 1]
    before = task.judge(data, places)[1]
    train(task, Course("drafts", steps=40), rows.append)
    after = task.judge(data, places)[1]
    assert sum(after) > sum(before) + 0.3
    assert rows[-1]["stage"] == "held-out" and rows[-1]["mctp"] == task.look()["mctp"]


def test_the_last_module_alone_learns_to_run_again(parts: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(drafts, "CHAINED", 3)
    monkeypatch.setattr(drafts, "REPEATS", 2)
    monkeypatch.setattr(drafts, "CHAINED_BATCH", 64)
    model, said = parts
    data = make_places(model.backbone.model, model.layout, said, 0)
    given = (model.backbone, model.layout, data, data, 0, 5e-3)
    whole = ChainedTask(*given)
    old = {name: value.clone() for name, value in whole.head.state_dict().items()}
    task, rows = ChainedTask(*given, head=whole.head), list[Any]()
    before = task.look()["again"]
    train(task, Course("again", steps=40), rows.append)
    after = task.look()["again"]
    assert len(before) == len(after) == 3 and sum(after) > sum(before) + 0.3
    for name, value in task.head.state_dict().items():
        kept = ".2." not in name or "q_proj" in name or "k_proj" in name
        assert torch.equal(value, old[name]) == kept, name
    alike = whole.judge(data, torch.arange(len(data.run))[data.run > 3])[1]
    assert before == pytest.approx(alike[2:], abs=1e-3)  # the places from the third module on


def test_independent_modules_learn_too(parts: Any) -> None:
    model, said = parts
    task = ParallelTask(model.backbone, model.layout, said, 0, 5e-3)
    rows = [update(task, task.batches(i, 0.5), 1.0)["mtp"] for i in range(30)]
    assert np.mean(rows[-3:]) > np.mean(rows[:3]) + 0.1


def test_going_on_needs_a_model_to_go_on_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speech.main(["--again", "1"])
    assert "name its folder with --start" in capsys.readouterr().err
