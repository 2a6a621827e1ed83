"""Word errors, and a recogniser that hears the domain by ear and not by its grammar."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from mmfast.bench.suites.speech import quality as speech_quality
from mmfast.bench.suites.speech.quality import (
    Recogniser,
    WordErrors,
    count_errors,
)
from mmfast.core.errors import MmfastError, SpecError
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.speech.text import VOICES, jsgf, sentence


@pytest.fixture(scope="module")
def recogniser():
    return Recogniser()


@pytest.fixture(scope="module")
def spoken():
    rng = np.random.default_rng(11)
    texts = [sentence(rng, "eval") for _ in range(8)]
    return [(text, say(text, VOICES[i * 5 % 36]).pcm) for i, text in enumerate(texts)]


def word_error_rate(recogniser, spoken):
    heard = [recogniser.transcribe(pcm) for _, pcm in spoken]
    pairs = zip([text for text, _ in spoken], heard, strict=True)
    return sum((count_errors(*pair) for pair in pairs), WordErrors()), heard


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a x c", 1),
        ("a b c", "a c", 1),
        ("a b c", "a b x c", 1),
        ("a b c", "", 3),
        ("", "a b", 2),
        ("a b c d", "b c d a", 2),
        ("a b c", "c b a", 2),
    ],
)
def test_edit_distance(said, heard, errors):
    assert count_errors(said, heard).errors == errors


def test_errors_add_up_and_marks_do_not_count():
    found = count_errors("the red circle, at night.", "the red circles at night")
    assert found == WordErrors(1, 5)
    assert (found + WordErrors(1, 5)).rate == pytest.approx(0.2)
    assert WordErrors().rate == 0


def test_recordings_are_heard(recogniser, spoken):
    total, heard = word_error_rate(recogniser, spoken)
    assert len(heard) == len(spoken)
    assert total.rate <= 0.12, list(zip([text for text, _ in spoken], heard, strict=True))


@pytest.mark.slow
def test_the_grammar_alone_hears_nothing(recogniser, spoken):
    """In noise of the same loudness, and in another sentence, the words are not there."""
    rng = torch.Generator().manual_seed(0)
    noise = [(t, torch.randn(len(p), generator=rng) * p.std()) for t, p in spoken[:3]]
    wrong, _ = word_error_rate(recogniser, noise)
    assert wrong.rate > 0.6
    pairs = pairwise(spoken[:4])
    other, _ = word_error_rate(recogniser, [(a[0], b[1]) for a, b in pairs])
    assert other.rate > 0.5


def test_what_came_before_changes_nothing(recogniser, spoken):
    _, pcm = spoken[0]
    first = recogniser.transcribe(pcm)
    recogniser.transcribe(torch.randn(8000) * 0.3)
    assert recogniser.transcribe(pcm) == first


def test_silence_nothing_and_nan_are_no_words(recogniser):
    assert len(recogniser.transcribe(torch.zeros(16000)).split()) <= 2
    assert isinstance(recogniser.transcribe(torch.zeros(0)), str)
    assert isinstance(recogniser.transcribe(torch.full((4000,), float("nan"))), str)


def test_errors_are_one_line(recogniser, monkeypatch):
    with pytest.raises(SpecError, match="16000"):
        recogniser.transcribe(torch.zeros(10), 8000)
    monkeypatch.setitem(__import__("sys").modules, "pocketsphinx", None)
    with pytest.raises(MmfastError, match=r"mmfast\[speech-eval\]"):
        Recogniser()


def test_the_grammar_takes_sentences_and_not_their_words_in_another_order():
    """Read as a regular language: every sentence of the domain is in it."""
    from grammar_reader import accepts

    rules = jsgf()
    rng = np.random.default_rng(2)
    for _ in range(150):
        words = speech_quality.spoken_words(sentence(rng, "train"))
        assert accepts(rules, words), words
    assert not accepts(rules, ["left", "the", "circle", "red", "moves"])
    assert not accepts(rules, ["the", "red", "circle", "moves"])
