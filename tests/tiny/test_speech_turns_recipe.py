"""Generated turns: pauses are where they are said to be, and the recipe learns from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("espeakng_loader")

from mmfast.models.speech.turn_end import SILENCES, load_turn_end
from mmfast.tiny.speech.recordings import QUIET, RATE, EspeakVoice
from mmfast.tiny.speech.text import groups
from mmfast.tiny.speech.turns import (
    HELD_VOICES,
    PAUSE,
    Example,
    ending_lesson,
    planned,
    spoken_turn,
    turn_text,
    turn_voice,
    varied,
)


def test_a_plan_adds_pauses_and_hesitations_and_takes_nothing_away() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        text = turn_text(rng, "eval")
        parts, kinds = planned(text, rng)
        left = iter(parts)
        assert all(part in left for part in groups(text))  # in their order
        for place, kind in kinds.items():
            assert 0 <= place < len(parts) - 1  # inside: the end is no pause
            assert (parts[place] == ",") == (kind != "word")


def test_pauses_are_silent_and_as_long_as_asked_and_speech_goes_on_behind_them() -> None:
    turns = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        voice = EspeakVoice("en-us", 165)
        turns.append(spoken_turn("which way does the red circle move?", voice, rng))
    assert sum(len(turn.pauses) for turn in turns) >= 4
    for turn in turns:
        assert np.abs(turn.pcm[-200:]).max() > QUIET / 10  # ends with its last sound
        assert turn.before(len(turn.pcm)).split()[-1] == "move"
        for pause in turn.pauses:
            silent = turn.pcm[pause.start : pause.stop]
            assert not (np.abs(silent) > QUIET).any()
            assert PAUSE[0] * RATE - 1 <= len(silent) <= (PAUSE[1] + 0.3) * RATE
            assert (np.abs(turn.pcm[pause.stop : pause.stop + 8000]) > QUIET).any()
            assert 0 < len(turn.before(pause.start)) < len(turn.before(len(turn.pcm)))


def test_voices_of_the_evaluation_are_not_trained_on() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        assert turn_voice(rng, "eval").name in HELD_VOICES
        assert turn_voice(rng, "train").name not in HELD_VOICES


def test_a_silence_that_is_over_teaches_nothing_of_longer_ones() -> None:
    pcm = torch.randn(8000, generator=torch.Generator().manual_seed(0))
    found = [Example(pcm, 0.3, "which way", False), Example(pcm, float("inf"), "which way", True)]
    lesson = ending_lesson(found, lambda words: 0.5, np.random.default_rng(0))
    assert len(lesson.x) == 4 and torch.equal(lesson.x[:2], lesson.x[2:])
    assert lesson.counted[0].tolist() == [float(ms < 300) for ms in SILENCES]
    assert lesson.counted[1].all() and lesson.target[1].all() and not lesson.target[0].any()
    assert lesson.facts[0, 0] == 1 and lesson.facts[2, 0] == 0  # without words, and with them


def test_what_is_varied_keeps_its_end() -> None:
    x = torch.zeros(64, 23, 160)
    x[:, 20, 150:] = 1.0
    out = varied(x, torch.Generator().manual_seed(0))
    assert out.shape == x.shape and not torch.equal(out, x)
    assert (out[:, 20, 150:].mean(1) > 0.8).all()
    cut = (out[:, 20, :40] == -1.0).all(1)
    assert 0 < int(cut.sum()) < 64


def test_the_shipped_networks_are_small_and_say_what_they_were_trained_on() -> None:
    ends = load_turn_end()
    folder = Path(__file__).parents[2] / "assets/models/tiny-turns"
    assert (folder / "model.safetensors").stat().st_size < 100_000
    assert tuple(json.loads((folder / "config.json").read_text())["silences"]) == SILENCES
    assert "tiny.speech.turns" in (folder / "README.md").read_text()
    assert len(ends.scores(torch.zeros(RATE))) == len(SILENCES)
