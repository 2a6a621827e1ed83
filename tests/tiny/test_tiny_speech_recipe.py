"""The recipe of the speech model: data from a seed, layout of lessons, a short training."""

from __future__ import annotations

from itertools import groupby, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mmfast.core.speech import Turn
from mmfast.models.loading import embedded_path
from mmfast.models.speech.layout import SpeechGuide, SpeechLayout
from mmfast.tiny.speech import reply
from mmfast.tiny.speech.bank import (
    AUDIO,
    NONE,
    HeardSpeech,
    LineBuilder,
    SpokenText,
    interleave,
    said_lines,
    speaking,
)
from mmfast.tiny.speech.ear import EarTask, written_loss
from mmfast.tiny.speech.model import (
    TrainingModel,
    continued,
    make_backbone,
    place_codes,
    run_backbone,
)
from mmfast.tiny.speech.recordings import worsen
from mmfast.tiny.speech.text import split_of
from mmfast.tiny.speech.train import Curriculum, SpeechTask, layout, save_checkpoint
from mmfast.tiny.training import update

LAYOUT = layout(2, 16)


def made_up(rng: np.random.Generator, groups: int = 6) -> SpokenText:
    ids = [LAYOUT.group(w) for w in ("the", "red", "circle", "zebra", ",", "left")][:groups]
    sounds = [LAYOUT.base + rng.integers(0, 32, 2 * int(rng.integers(0, 5))) for _ in ids]
    return SpokenText((0, 1, 2), ids, sounds)


def hearing(rng: np.random.Generator, slots: int = 12, words: int = 2) -> HeardSpeech:
    words = [LAYOUT.group("red")[0], LAYOUT.group("circle")[0]][:words]
    count = np.minimum(np.arange(slots) // 5, len(words))
    mel = rng.standard_normal((4 * slots, 80)).astype(np.float16) - 4
    return HeardSpeech(mel, words, np.array([0, *words])[count], count)


def test_lessons_are_a_function_of_the_seed() -> None:
    assert said_lines(40, 3) == said_lines(40, 3)
    assert said_lines(40, 3) != said_lines(40, 4)


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


def test_noise_keeps_the_place_of_words() -> None:
    pcm = np.zeros(8000, np.float32)
    pcm[4000] = 1.0
    for seed in range(30):
        sound, before = worsen(pcm, np.random.default_rng(seed))
        assert np.abs(sound).max() <= 1 and np.isfinite(sound).all()
        assert abs(int(np.abs(sound - np.median(sound)).argmax()) - before - 4000) < 40


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


def test_codes_lie_where_their_sound_does() -> None:
    model = TrainingModel(small_backbone(), LAYOUT)
    before = model.embed[: LAYOUT.base].clone()
    vectors = torch.randn(2, 16, 9, generator=torch.Generator().manual_seed(1))
    vectors[0, 5] = vectors[0, 4]
    place_codes(model, vectors)
    assert torch.equal(model.embed[: LAYOUT.base], before)
    books = model.embed[LAYOUT.base :].unflatten(0, (2, 16))
    assert torch.allclose(books[0, 5], books[0, 4]) and books.std(1).min() > 0


def test_a_model_goes_on_with_other_words(tmp_path: Path) -> None:
    old = LAYOUT
    few = (*(row for row in old.rows if row not in ("zebra_", "circle_")), "new_")
    model = TrainingModel(small_backbone(), old)
    save_checkpoint(tmp_path, model)
    other = SpeechLayout(few, old.books, old.entries, old.voices, old.speeds, old.pitches)
    again = TrainingModel(continued(tmp_path, other, SpeechLayout.load(tmp_path)), other)
    for weights, mine in ((model.embed, again.embed), (model.head, again.head)):
        for name in ("red_", "<done>", "a"):
            near = weights[old.index[name]].half().float()
            assert torch.equal(mine[other.index[name]], near), name
        assert torch.equal(mine[other.texts :], weights[old.texts :].half().float())
    assert again.embed[other.index["new_"]].std() > 0.1


def short_run(steps: int) -> list[float]:
    rng = np.random.default_rng(0)
    said = [made_up(rng) for _ in range(12)]
    lessons = Curriculum(LAYOUT, said, 0, 200, held=2)
    torch.manual_seed(0)
    lm = make_backbone(LAYOUT, 64, 2, 96)
    task = SpeechTask(TrainingModel(lm, LAYOUT), lessons, 4e-3)
    found = []
    for step in range(steps):
        row = update(task, task.batches(step, 0.3), 1.0)
        found.append(row["say book0"][0])
    return found


def test_training_learns_and_repeats() -> None:
    first = short_run(30)
    assert first[-1] < 0.6 * first[0]
    assert short_run(3) == first[:3]


def test_the_ear_learns_words_and_silence() -> None:
    rng = np.random.default_rng(0)
    heard = [hearing(rng, words=i % 3) for i in range(40)]
    task = EarTask(LAYOUT, heard, 0, 3e-3, held=4)
    first = [update(task, task.batches(step, 0.1), 1.0)["ctc"] for step in range(12)]
    assert first[-1] < 0.7 * first[0]
    assert task.look().keys() == {"whole", "wordless"}


def test_the_loss_of_the_ear_is_that_of_all_paths() -> None:
    """Against a sum over every way to write one word in three frames."""
    logits = torch.randn(1, 3, LAYOUT.texts, generator=torch.Generator().manual_seed(2))
    word = LAYOUT.group("red")[0]
    each = HeardSpeech(np.zeros((12, 80), np.float16), [word], np.zeros(3, int), np.zeros(3, int))
    chances = logits[0].double().softmax(-1)
    ways = [p for p in product((0, word), repeat=3) if [k for k, _ in groupby(p) if k] == [word]]
    total = sum(chances[0, a] * chances[1, b] * chances[2, c] for a, b, c in ways)
    assert len(ways) == 6
    assert float(written_loss(logits, [each])) == pytest.approx(-float(total.log()) / 2, rel=1e-4)


def test_lessons_of_replies_are_judged_on_whole_replies() -> None:
    turns = [Turn("user", "hello."), Turn("assistant", "good"), Turn("user", "thank you."),
             Turn("assistant", "you are welcome.")]  # fmt: skip
    ids, weights = reply.lesson(LAYOUT, turns)
    said = [LAYOUT.rows[i] for i, weight in zip(ids, weights, strict=True) if weight == 1]
    assert said == ["you_", "are_", "welcome_", ".", "<done>"]
    words = [LAYOUT.rows[i] for i, w in zip(ids, weights, strict=True) if w == reply.ASKED]
    assert words == ["hello_", "<done>", "thank_", "you_", "<done>"]
    asked = LAYOUT.text(ids[: ids.index(LAYOUT.id("<done>"))])
    assert asked == "hello"


@pytest.mark.slow
def test_replies_are_learned() -> None:
    task = reply.ReplyTask(layout(1, 1), 0, 3e-3)
    rows = [update(task, task.batches(step, 0.1)[:1], 1.0) for step in range(4)]
    assert rows[-1]["reply"][0] < 0.95 * rows[0]["reply"][0]
    loss, share, whole, asked = task.look()["reply"]
    assert 0 <= whole <= share <= 1 and 0 < loss < 10 and 0 < asked < 10


def test_replies_go_on_from_those_of_a_folder() -> None:
    folder = embedded_path("tiny-speech")
    shipped = SpeechLayout.load(folder)
    task = reply.ReplyTask(shipped, 0, 1e-3, folder)
    stock = AutoModelForCausalLM.from_pretrained(folder / reply.FOLDER, dtype=torch.float32)
    for name, value in stock.state_dict().items():
        assert torch.equal(task.lm.state_dict()[name], value), name
    assert task.look()["reply"][1] > 0.99
