"""The recipe of the speech model: data from a seed, layout of lessons, a short training."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import numpy as np
import pytest
import torch

from mmfast.models.speech.layout import LOOK_AHEAD, SpeechGuide
from mmfast.models.speech.tower import SpeechTower
from mmfast.tiny.speech.bank import (
    AUDIO,
    NONE,
    TEXT,
    HeardSpeech,
    LineBuilder,
    SpokenText,
    chats,
    interleave,
    listening,
    said_lines,
    speaking,
)
from mmfast.tiny.speech.model import TrainingModel, add_codes, make_backbone, run_backbone
from mmfast.tiny.speech.recordings import worsen
from mmfast.tiny.speech.text import split_of
from mmfast.tiny.speech.train import Curriculum, SpeechTask, layout
from mmfast.tiny.training import update

LAYOUT = layout(2, 16)


def made_up(rng: np.random.Generator, groups: int = 6) -> SpokenText:
    ids = [LAYOUT.group(w) for w in ("the", "red", "circle", "zebra", ",", "left")][:groups]
    sounds = [LAYOUT.base + rng.integers(0, 32, 2 * int(rng.integers(0, 5))) for _ in ids]
    return SpokenText((0, 1, 2), ids, sounds)


def hearing(rng: np.random.Generator, slots: int = 12) -> HeardSpeech:
    words = [LAYOUT.group("red")[0], LAYOUT.group("circle")[0]]
    count = np.minimum(np.arange(slots) // 5, 2)
    mel = rng.standard_normal((4 * slots, 80)).astype(np.float16) - 4
    return HeardSpeech(mel, words, np.array([0, *words])[count], count)


def test_lessons_are_a_function_of_the_seed() -> None:
    assert said_lines(40, 3) == said_lines(40, 3)
    assert said_lines(40, 3) != said_lines(40, 4)
    assert chats(10, 3) == chats(10, 3)


def test_texts_of_training_and_evaluation_share_none() -> None:
    train = {text for text, _ in said_lines(400, 0)[0]}
    unseen = {text for text, _ in said_lines(200, 0, "eval")[0]}
    assert not train & unseen
    assert {split_of(text) for text in train} == {"train"}
    assert {split_of(text) for text in unseen} == {"eval"}


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
def test_the_guide_lays_text_out_as_in_training(groups: int) -> None:
    said = made_up(np.random.default_rng(groups), groups)
    line = LineBuilder([], [])
    interleave(line, LAYOUT, said, repeat(1))
    guide = SpeechGuide(LAYOUT, iter(said.groups))
    ids = guide.opening()
    audio = [i for i in line.ids if i >= LAYOUT.texts]
    for token in audio:
        assert not guide.done
        ids = [*ids, *guide.forced(), token]
        guide.push([token])
    assert guide.done and ids == line.ids


def test_late_text_is_the_same_text() -> None:
    said = made_up(np.random.default_rng(0))
    for seed in range(20):
        line = speaking(LAYOUT, said, np.random.default_rng(seed))
        audio = [i for i in line.ids if i >= LAYOUT.texts]
        plain = LineBuilder([], [])
        interleave(plain, LAYOUT, said, repeat(1))
        assert audio == [i for i in plain.ids if i >= LAYOUT.texts]
        assert [k for k in line.kinds if k != NONE] == [AUDIO] * len(audio)
        behind = 0
        for token in line.ids[4:]:
            behind += token == LAYOUT.next
            given = line.ids[: line.ids.index(token)]
            assert behind <= len(said.groups) - 1, given


def test_a_guide_ends_a_sound_that_does_not_end() -> None:
    groups = [LAYOUT.group(word) for word in ("the", "red", "circle", "left")]
    guide, said = SpeechGuide(LAYOUT, iter(groups), longest=3), 0
    guide.opening()
    while not guide.done and said < 100:
        guide.forced()
        if not guide.done:
            guide.push([LAYOUT.base])
            said += 1
    assert guide.done and said == 4 * 3 * 2


def test_words_of_the_model_are_told_from_sound() -> None:
    guide = SpeechGuide(LAYOUT)
    assert guide.rows().stop == LAYOUT.texts
    for word in ("yes", "red", "zebra"):
        for token in LAYOUT.group(word):
            assert guide.rows().stop == LAYOUT.texts
            guide.push([token])
    assert guide.rows() == guide.draft_rows
    guide.push([LAYOUT.base, LAYOUT.next])
    assert guide.rows().stop == LAYOUT.texts and guide.stops(LAYOUT.next)
    guide.push([LAYOUT.id("<done>")])
    assert guide.rows() == guide.draft_rows and not guide.stops(LAYOUT.next)
    guide.push([LAYOUT.next, LAYOUT.end])
    assert guide.done and LAYOUT.text(guide.text) == "yes red zebra"
    assert LOOK_AHEAD == 2


def test_what_is_heard_owes_text_alone() -> None:
    line = listening(LAYOUT, hearing(np.random.default_rng(0)))
    assert line.ids[0] == LAYOUT.id("<listen>") and line.ids[13] == LAYOUT.id("<heard>")
    assert line.kinds[14:] == [TEXT] * 3 and not any(line.kinds[:14])


def test_noise_keeps_the_place_of_words() -> None:
    pcm = np.zeros(8000, np.float32)
    pcm[4000] = 1.0
    for seed in range(30):
        sound, before = worsen(pcm, np.random.default_rng(seed))
        assert np.abs(sound).max() <= 1 and np.isfinite(sound).all()
        assert abs(int(np.abs(sound - np.median(sound)).argmax()) - before - 4000) < 40


def test_the_tower_hears_the_same_in_pieces() -> None:
    torch.manual_seed(0)
    tower, mel = SpeechTower(), torch.randn(2, 53, 80)
    whole, state, found = tower(mel), tower.start(2), []
    assert whole.shape == (2, 13, 160)
    for piece in mel.split([1, 2, 3, 7, 40], 1):
        state, part = tower.step(state, piece)
        found.append(part)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=2e-5, rtol=0)
    later = torch.cat([mel[:, :40], mel[:, :13]], 1)
    torch.testing.assert_close(tower(later)[:, :10], whole[:, :10], atol=2e-5, rtol=0)


def small_backbone() -> Any:
    torch.manual_seed(0)
    lm = make_backbone(LAYOUT, 64, 2, 96)
    for layer in lm.model.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.1)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.1)
    return lm


def test_training_runs_the_stock_forward_pass() -> None:
    lm = small_backbone().eval()
    ids = torch.randint(LAYOUT.total, (2, 17))
    with torch.inference_mode():
        stock = lm(ids, output_hidden_states=True)
        states, middle = run_backbone(lm, lm.model.embed_tokens.weight[ids], 0)
        torch.testing.assert_close(lm.lm_head(states), stock.logits, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(middle, stock.hidden_states[1], atol=2e-5, rtol=1e-4)


def test_new_codes_keep_what_the_model_has_learned() -> None:
    small = layout(1, 1)
    model = TrainingModel(make_backbone(small, codes=False), SpeechTower(), small)
    torch.nn.init.normal_(model.lm.model.layers[3].mlp.down_proj.weight, std=0.1)
    vectors = torch.randn(2, 16, 9, generator=torch.Generator().manual_seed(1))
    larger = add_codes(model, LAYOUT, vectors)
    assert len(larger.embed) == len(larger.head) == LAYOUT.total
    assert torch.equal(larger.embed[: small.base], model.embed)
    text = torch.arange(40)[None]
    for ours, theirs in zip(
        run_backbone(larger.lm, larger.embed[text], 3),
        run_backbone(model.lm, model.embed[text], 3),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    near = larger.embed[LAYOUT.base :].unflatten(0, (2, 16)).std(1)
    assert near.min() > 0


def short_run(steps: int) -> list[float]:
    rng = np.random.default_rng(0)
    said = [made_up(rng) for _ in range(12)]
    heard = [hearing(rng) for _ in range(12)]
    lessons = Curriculum(LAYOUT, said, heard, [], 0, {"say": 200, "hear": 100}, held=2)
    torch.manual_seed(0)
    lm = make_backbone(LAYOUT, 64, 2, 96)
    model = TrainingModel(lm, SpeechTower(64, 32), LAYOUT, middle=0)
    task = SpeechTask(model, lessons, ("say", "hear"), 4e-3)
    found = []
    for step in range(steps):
        row = update(task, task.batches(step, 0.3), 1.0)
        found.append(row["say book0"][0] + row["hear text"][0])
    return found


def test_training_learns_and_repeats() -> None:
    first = short_run(30)
    assert first[-1] < 0.6 * first[0]
    assert short_run(3) == first[:3]
