"""Quality against delay of simultaneous translation: figures of planted translations, and rows."""

from __future__ import annotations

import pytest
import torch

from mmfast.bench.report.docs import write_table
from mmfast.bench.suites.speech import translation as speech_translation
from mmfast.bench.suites.speech.translation import (
    RememberingListener,
    RememberingTranslator,
    judged,
    spoken_sentences,
    translation_figures,
)
from mmfast.core.errors import MmfastError
from mmfast.models.translation import Translator, load_translator
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
