"""Recordings by espeak-ng: repeatable, timed word by word, and clear about what is wrong."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from mmfast.core.errors import MmfastError, SpecError
from mmfast.tiny.speech import recordings
from mmfast.tiny.speech.bank import heard_lines, said_lines
from mmfast.tiny.speech.recordings import QUIET, RATE, Corpus, EspeakVoice, build_corpus, say

TEXT = "the red circle, at the top of the screen, moves left. then it stops."


def test_the_same_text_sounds_the_same_whatever_was_said_before():
    first = say(TEXT)
    say("something else altogether", EspeakVoice("en-us+f2", 200, 80))
    assert torch.equal(first.pcm, say(TEXT).pcm)
    assert not torch.equal(first.pcm[:8000], say(TEXT, EspeakVoice(pitch=80)).pcm[:8000])


def test_another_process_says_the_same():
    place = "from mmfast.tiny.speech.recordings import say"
    code = f"{place}; print(float(say('two stars.').pcm.abs().sum()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) == float(say("two stars.").pcm.abs().sum())


def test_words_cover_the_recording_in_order():
    speech = say(TEXT)
    said = " ".join(word.text for word in speech.words)
    assert said == "the red circle , at the top of the screen , moves left . then it stops ."
    assert speech.words[0].start == 0
    assert speech.words[-1].stop == len(speech.pcm)
    for one, after in pairwise(speech.words):
        assert one.stop == after.start
    assert all(word.stop > word.start for word in speech.words if word.text.isalpha())


def test_marks_are_silent_and_words_are_not():
    speech = say(TEXT)
    for word in speech.words:
        part = speech.pcm[word.start : word.stop]
        if word.text in ",.":
            assert part.abs().max() <= QUIET
            assert len(part) > RATE // 20
        else:
            assert part.abs().max() > 0.02


def test_word_times_are_those_of_the_sound():
    """What is before a word's start is the same without the word and all behind it."""
    whole, part = say("one two three"), say("one two")
    assert whole.words[1].start == pytest.approx(part.words[1].start, abs=0.03 * RATE)
    longer = say("one two three", EspeakVoice(rate=100))
    assert longer.words[2].start > 1.3 * whole.words[2].start


def test_pcm_is_16_khz_mono_float():
    pcm = say("hello").pcm
    assert pcm.dtype == torch.float32
    assert pcm.ndim == 1
    assert 0.05 < pcm.abs().max() <= 1
    assert 0.4 * RATE < len(pcm) < RATE
    spectrum = torch.fft.rfft(say(TEXT).pcm.double()).abs() ** 2
    assert spectrum[int(0.98 * len(spectrum)) :].sum() < 1e-3 * spectrum.sum()  # no images


@pytest.mark.parametrize(
    ("text", "voice", "says"),
    [
        ("hello", EspeakVoice("nobody"), "nobody"),
        ("hello", EspeakVoice(rate=1000), "80 to 450"),
        ("hello", EspeakVoice(pitch=-1), "0 to 99"),
        ("", None, "words"),
        ("...", None, "no word"),
        ("a\0b", None, "words"),
    ],
)
def test_errors_are_one_line(text, voice, says):
    with pytest.raises(MmfastError, match=says) as caught:
        say(text, voice)
    assert "\n" not in str(caught.value)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "espeakng_loader", None)
    with pytest.raises(MmfastError, match=r"mmfast\[speech-eval\]"):
        say("hello")


def test_an_error_leaves_no_voice_behind():
    before = say("one")
    with pytest.raises(SpecError):
        say("one", EspeakVoice("nobody"))
    assert torch.equal(say("one").pcm, before.pcm)


def test_a_corpus_keeps_sound_and_times(tmp_path, monkeypatch):
    monkeypatch.setattr("mmfast.tiny.speech.recordings.SHARD", 3)
    said = [*said_lines(3, 0)[0], *heard_lines(2, 0)]
    seen = []
    corpus = build_corpus(tmp_path / "said", said, 1, lambda done, _: seen.append(done))
    again = Corpus(tmp_path / "said")
    assert seen == [3, 5]
    assert len(corpus) == len(again) == 5
    for i, (text, voice) in enumerate(said):
        fresh = recordings.say(text, voice)
        assert again[i].words == fresh.words
        assert (again[i].pcm - fresh.pcm).abs().max() <= 0.51 / 32767
        assert (again.recordings[i].text, again.recordings[i].voice) == (text, voice)
    assert again.seconds == pytest.approx(sum(len(again[i].pcm) for i in range(5)) / RATE)


def test_no_corpus_is_one_line(tmp_path):
    with pytest.raises(MmfastError, match="no recordings"):
        Corpus(tmp_path)
