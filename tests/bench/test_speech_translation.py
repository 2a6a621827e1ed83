"""Quality against delay of simultaneous translation: figures of planted translations, and rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mmfast.bench.report.docs import write_table
from mmfast.bench.suites.speech import translation as speech_translation
from mmfast.bench.suites.speech.translation import (
    RememberingListener,
    RememberingTranslator,
    RightEar,
    SpokenPair,
    judged,
    judged_pair,
    pair_figures,
    spoken_pairs,
    spoken_sentences,
    translation_figures,
)
from mmfast.core.errors import MmfastError
from mmfast.decoding.serialised import TimedWord
from mmfast.models.translation import Translator, load_translator
from mmfast.tiny.speech.overlap import VoiceMixture
from mmfast.tiny.translation.grammar import split_of, vocabulary
from mmfast.voice.interpreter import Translated


def test_errors_and_lag_of_planted_pieces() -> None:
    """Four words in four seconds: each in time, two of them wrong, or all at the end."""
    in_time = [Translated(f" w{i}", i + 1.0, 1, "") for i in range(4)]
    assert judged("w0 w1 w2 w3", in_time, 4.0)[:3] == (0, 4, 1.0)
    assert judged("w0 w1 x y", in_time, 4.0)[:3] == (2, 4, 1.0)
    late = [Translated("w0 w1 w2 w3", 4.6, 4, "", final=True)]
    found = [judged("w0 w1 w2 w3", pieces, 4.0) for pieces in (late, in_time)]
    assert found[0][:3] == (0, 4, 4.0)  # silence behind the sentence is no lag
    figures = translation_figures(found)
    assert figures["score"] == figures["whole"] == 1 and figures["lag_share"] == 2.5 / 4
    parts = [Translated("w0", 1.0, 1, "", final=True), Translated("w1", 2.0, 1, "", final=True)]
    assert judged("w0 w1", parts, 2.0).errors == 0


def test_sentences_are_unseen_and_of_the_vocabulary() -> None:
    words = set(vocabulary())
    for spoken in spoken_sentences(5, seed=3):
        assert split_of(spoken.english) == "eval" and len(spoken.pcm) > 16_000
        assert {*spoken.english.split(), *spoken.velda.split()} <= words


@pytest.mark.slow
def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_translation, "POLICIES", ("offline", "wait:5"))
    monkeypatch.setattr(speech_translation, "SPOKEN", ("offline",))
    rows = [*speech_translation.translation(lambda *_: None, count=3)]
    assert [row["job"] for row in rows] == [
        "offline, text, words",
        "offline, speech, s",
        "wait:5, text, words",
    ]
    assert rows[0]["score"] == 1 and rows[0]["lag_share"] == 1
    assert 0 < rows[2]["lag_share"] < 1 and rows[2]["score"] < 1
    again = [*speech_translation.translation(lambda *_: None, count=3, only=["wait:5"])]
    assert again == rows[2:]
    with pytest.raises(MmfastError, match="wait:6"):
        next(speech_translation.translation(lambda *_: None, only=["wait:6"]))
    shared = {"processor": "p", "date": "2026-01-01", "commit": "c", "suite": "speech"}
    lines = write_table("speech_cost", [{**row, **shared, "bench": "translation"} for row in rows])
    assert any("`wait:5`" in line for line in lines)


def test_the_same_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = load_translator()
    assert isinstance(translator, Translator)
    remembering = RememberingTranslator(translator)
    wanted = translator.hypothesis("the red circle moves")
    assert remembering.hypothesis("the red circle moves") == wanted
    monkeypatch.setattr(Translator, "hypothesis", lambda *_: None)
    assert remembering.hypothesis("the red circle moves") == wanted
    assert remembering.hypothesis("the red circle moves", wanted.ids[0]) is None
    sounds = [torch.zeros(10), torch.ones(10), torch.zeros(10)]
    heard = CountingListener()
    once = RememberingListener(heard)
    assert [once.transcribe(pcm) for pcm in sounds] == ["0.0", "1.0", "0.0"] and heard.count == 2


class CountingListener:
    """Hears how loud a sound is."""

    count = 0

    def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
        self.count += 1
        return str(float(pcm.max()))


def planted_pair() -> SpokenPair:
    """Two voices of three words each, of which the second begins a second later."""
    channels = tuple(
        tuple(TimedWord(f"{name}{i}", start + i) for i in range(3))
        for name, start in (("a", 1.0), ("b", 2.0))
    )
    return SpokenPair(VoiceMixture(np.zeros(64_000, np.float32), channels, 0.4), ("x y", "z"))


def test_pairs_are_judged_by_the_best_assignment() -> None:
    """The speakers' numbers do not matter, their words do; delays are from their first words."""
    pieces = [
        Translated("z", 3.5, 1, "", final=True, speaker=0),
        Translated("x", 2.0, 1, "", speaker=1),
        Translated(" y", 4.0, 1, "", final=True, speaker=1),
    ]
    first, second = judged_pair(planted_pair(), pieces)
    assert (first.errors, first.words, first.length) == (0, 2, 2.0)
    assert first.lag == (1.0 + (3.0 - 1.0)) / 2  # 1 and 3 seconds late, at a pace of 1
    assert (second.errors, second.words, second.lag) == (0, 1, 1.5)
    mixed_up = [replace(piece, speaker=0) for piece in pieces]
    assert sum(each.errors for each in judged_pair(planted_pair(), mixed_up)) == 2  # z twice
    figures = pair_figures([planted_pair()], [[first, second]])
    assert figures["score"] == 1 and figures["by_overlap"] == {"under half": 1.0}
    row = {**figures, "suite": "speech", "bench": "overlap", "device": "cpu", "job": "offline"}
    row |= {"policy": "offline", "source": "ear for two", "processor": "p", "date": "2026-01-01"}
    row |= {"commit": "c", "by_overlap": {"apart": -0.0833, "over half": 1.0}}
    table = write_table("speech_cost", [row])
    assert any("| apart -8 %, over half 100 % |" in line for line in table)


def test_the_right_ear_gives_each_word_when_it_ends() -> None:
    ear = RightEar(planted_pair().mixture).open(1.0, 2.0)
    windows = [w for part in torch.zeros(64_000).split(8_000) for w in ear.push(part)]
    words = [(word.speaker, word.text, window.at) for window in windows for word in window.words]
    assert words[:3] == [(0, "a0", 1.0), (0, "a1", 2.0), (1, "b0", 2.0)] and len(words) == 6
    assert windows[-1].until == 4.0 and not list(ear.finish())


@pytest.mark.slow
def test_rows_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [*speech_translation.overlap(lambda *_: None, count=2, only=["offline"])]
    assert [row["source"] for row in rows] == ["right words", "ear for two", "ear for one"]
    assert rows[0]["score"] == 1 and rows[0]["n"] == 4 > rows[0]["lag"] > 0
    with pytest.raises(MmfastError, match="wait:6"):
        next(speech_translation.overlap(lambda *_: None, only=["wait:6"]))
    for pair in spoken_pairs(2, 3):
        assert all(split_of(" ".join(words)) == "eval" for words in pair.mixture.words)
    shared = {"processor": "p", "date": "2026-01-01", "commit": "c", "suite": "speech"}
    lines = write_table("speech_cost", [{**row, **shared, "bench": "overlap"} for row in rows])
    assert any("ear for two" in line and "%" in line for line in lines)
