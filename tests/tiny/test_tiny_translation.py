"""Lessons of the translators: alignments of the grammar, sequences, recipes of seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mmfast
from mmfast.decoding.serialised import HEARD, SAID, Demultiplexer
from mmfast.models.stability import StabilityHead, load_head
from mmfast.models.translation import load_translator
from mmfast.tiny.translation import train_interleaved, train_stability
from mmfast.tiny.translation.grammar import AlignedPair, aligned, sentence
from mmfast.tiny.translation.serial import LATES, interleaved, own_places
from mmfast.tiny.translation.train_stability import StabilityLessons, agreed, area, fit, judged_head


def some_pairs(count: int, seed: int = 0) -> list[AlignedPair]:
    rng = np.random.default_rng(seed)
    return [aligned(rng) for _ in range(count)]


def contradictions(pairs: list[AlignedPair]) -> int:
    """How many beginnings that two sentences share have two translations."""
    known, found = dict[str, str](), 0
    for pair in pairs:
        source, target = pair.english.split(), pair.velda.split()
        assert len(pair.needs) == len(target) and list(pair.needs) == sorted(pair.needs)
        for read in range(1, len(source) + 1):
            words = " ".join(target[: sum(need <= read for need in pair.needs)])
            found += known.setdefault(" ".join(source[:read]), words) != words
    return found


def test_what_is_read_decides_what_is_written() -> None:
    pairs = some_pairs(4000)
    assert contradictions(pairs) == 0
    early = [pair._replace(needs=tuple(max(1, need - 1) for need in pair.needs)) for pair in pairs]
    assert contradictions(early) > 100  # one word less would be a guess
    one, other = np.random.default_rng(4), np.random.default_rng(4)
    assert [tuple(aligned(one)[:2]) for _ in range(20)] == [sentence(other) for _ in range(20)]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("late", [0, 2, LATES[-1]])
def test_sequences_hold_both_texts(late: int, joint: bool) -> None:
    """The speaker's words are the source; those written at a place are those that are due."""
    for pair in some_pairs(60, seed=late):
        words = interleaved(pair, late, joint)
        own = own_places(words)
        assert words[0] == f"<late:{late}>" and (words[1] == "<joint>") is joint
        read, parts, due = 0, Demultiplexer(), []
        for word, mine in zip(words[1 + joint :], own[1 + joint :], strict=True):
            if not mine and word not in ("<write>", "<read>", "<end>"):
                assert word == pair.english.split()[read]
                read += 1
            elif word not in ("<write>", "<read>", "<end>", "</s>"):
                mark = parts.push(word, read) if joint else SAID
                due += [(word, read)] if mark == SAID else []
        target, last = pair.velda.split(), len(pair.english.split())
        times = [min(need + late, last) for need in pair.needs]
        assert due == list(zip(target, times, strict=True))
        if joint:
            assert parts.text(HEARD) == pair.english and parts.text(SAID) == pair.velda


def test_the_recipe_makes_a_checkpoint(tmp_path: Path) -> None:
    argv = ["--out", str(tmp_path), "--minutes", "0.05", "--note", "a run of seconds"]
    train_interleaved.main(argv)
    card = (tmp_path / "README.md").read_text()
    assert "(0 to 6)" in card and "A run of seconds." in card and "{" not in card
    log = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert log[-1]["stage"] == "end" and log[-2]["stage"] == "held-out"
    pipe = mmfast.pipeline("speech-translation", tmp_path)
    assert pipe.policy.name == "interleaved:1"
    assert list(pipe.stream_text(["the", "red", "circle"]))[-1].final


def test_training_lowers_the_loss() -> None:
    task = train_interleaved.InterleavedTask(0, 3e-3)
    before = task.look()["interleaved"][0]
    from mmfast.tiny import training

    for step in range(12):
        training.update(task, task.batches(step, 0.0), 1.0)
    assert task.look()["interleaved"][0] < before - 1


def test_labels_are_beginnings_in_common() -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(200):
        one, other = (
            torch.randint(2, (int(n),), generator=rng)
            for n in torch.randint(7, (2,), generator=rng)
        )
        same = [one[: n + 1].tolist() == other[: n + 1].tolist() for n in range(len(one))]
        assert agreed(one, other).tolist() == same


def test_area_counts_pairs() -> None:
    scores, marks = torch.tensor([0.1, 0.9, 0.4, 0.8]), torch.tensor([False, True, True, False])
    assert area(scores, marks) == 3 / 4


def test_a_head_learns_what_stays(tmp_path: Path) -> None:
    """A planted direction of the states decides; chances tell nothing."""
    rng = torch.Generator().manual_seed(0)
    states, chances = torch.randn(3000, 16, generator=rng), torch.rand(3000, generator=rng)
    lessons = StabilityLessons(states, chances, states[:, 3] > 0.2)
    head = fit(lessons, seed=0, steps=200)
    figures = judged_head(head, lessons)
    assert figures["auc"] > 0.95 and 0.45 < figures["auc_chance"] < 0.55
    head.save(tmp_path)
    again = load_head(tmp_path)
    assert isinstance(again, StabilityHead)
    assert torch.equal(again(states, chances), head(states, chances))
    assert load_head(tmp_path / "nowhere") is None


@pytest.mark.slow
def test_the_recipe_of_the_head(tmp_path: Path) -> None:
    """Any encoder-decoder learns from sentences of its source alone."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(pair.english for pair in some_pairs(10)))
    train_stability.main(["--texts", str(texts), "--out", str(tmp_path)])
    row = json.loads((tmp_path / "stability.jsonl").read_text())
    assert row["sentences"] == 9 and row["tokens"] > 100
    assert load_head(tmp_path) is not None


def test_the_embedded_head_knows_more_than_chances() -> None:
    translator = load_translator()
    exam = train_stability.gather(translator, train_stability.new_texts(12, 9, "eval"))
    figures = judged_head(translator.head, exam)
    assert figures["auc"] > figures["auc_chance"] + 0.03
