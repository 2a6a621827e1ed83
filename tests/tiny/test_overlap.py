"""Two voices at once: mixtures, errors without names, the ear for two and its training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import mmfast
from mmfast.cli import main
from mmfast.cli.voice import print_speakers
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.decoding.serialised import CHANGE, TimedWord, serialise_channels
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.loading import embedded_path, part_of
from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.overlap import (
    FRAME,
    OverlapEar,
    SpeakerParter,
    SpeakerWord,
    load_overlap,
    read_overlap,
    save_overlap,
    speaker_texts,
    widened,
)
from mmfast.tiny.speech import train_overlap
from mmfast.tiny.speech.ear import make_ear
from mmfast.tiny.speech.overlap import cp_errors, mixed, timed, unseen_mixtures
from mmfast.tiny.speech.recordings import EspeakVoice, say
from mmfast.tiny.speech.text import split_of
from mmfast.tiny.speech.train_overlap import OverlapTask, lesson, placed_stream
from mmfast.tiny.training import update

FOLDER = embedded_path("tiny-speech")
LAYOUT = SpeechLayout.load(FOLDER)
TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=5), max_size=3)


def distance(one: Sequence[str], two: Sequence[str]) -> int:
    """Edits by the definition: the last words are alike, or one of three edits was the last."""

    @cache
    def least(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        same = least(i - 1, j - 1) + (one[i - 1] != two[j - 1])
        return min(same, least(i - 1, j) + 1, least(i, j - 1) + 1)

    return least(len(one), len(two))


def by_force(said: list[list[str]], heard: list[list[str]]) -> int:
    """The least errors over all ways to give each speaker one heard text, or none, and reversed."""
    longest, shortest = sorted((said, heard), key=len, reverse=True)
    ways = permutations(longest, len(shortest))
    left = sum(map(len, longest))
    return min(
        sum(distance(a, b) for a, b in zip(way, shortest, strict=True)) + left - sum(map(len, way))
        for way in ways
    )


@settings(max_examples=40, deadline=None)
@given(TEXTS, TEXTS)
def test_errors_are_those_of_the_best_assignment(
    said: list[list[str]], heard: list[list[str]]
) -> None:
    assert cp_errors(said, heard) == (by_force(said, heard), sum(map(len, said)))


def test_errors_know_no_names_but_know_who_said_what() -> None:
    said = [["red", "circle"], ["blue", "star"]]
    assert cp_errors(said, said[::-1]) == (0, 4)
    assert cp_errors(said, [["red", "star"], ["blue", "circle"]]) == (2, 4)
    assert cp_errors(said, [["red", "circle", "blue", "star"]]) == (4, 4)  # two more, two missing
    with pytest.raises(SpecError, match="7 speakers"):
        cp_errors([[]] * 7, [])


def test_a_mixture_is_the_sum_of_its_voices_with_their_times() -> None:
    one = say("the red circle moves left.", EspeakVoice("en-us+m3"))
    two = say("hello.", EspeakVoice("en-us+f2", pitch=65))
    for seed in range(3):
        found = mixed(one, two, np.random.default_rng(seed))
        own = timed(one)
        assert own in found.channels and found.channels[0][0].at <= found.channels[1][0].at
        rest = torch.from_numpy(found.pcm.copy())
        rest[: len(one.pcm)] -= one.pcm  # what is left is the second, louder or softer, later
        other = next(c for c in found.channels if c != own)
        start = round(other[0].at * 16000) - two.words[0].stop
        assert float(rest[:start].abs().max() if start else 0) < 1e-6
        left = rest[start : start + len(two.pcm)]
        gain = float(left @ two.pcm / two.pcm.square().sum())
        assert 10**-0.25 < gain < 10**0.25 and torch.allclose(left, gain * two.pcm, atol=1e-5)
    alone = mixed(one, None, np.random.default_rng(0))
    assert alone.channels == (timed(one),) and alone.overlap == 0


def test_unseen_mixtures_are_of_the_evaluation_half_and_a_function_of_the_seed() -> None:
    first, again = unseen_mixtures(2, 5), unseen_mixtures(2, 5)
    assert [m.words for m in first] == [m.words for m in again]
    assert all(np.array_equal(a.pcm, b.pcm) for a, b in zip(first, again, strict=True))
    said = [" ".join(words) for each in first for words in each.words]
    assert len(said) == 4 and all(split_of(text) == "eval" for text in said)
    assert unseen_mixtures(1, 6)[0].words != first[0].words


def test_every_word_of_a_lesson_has_a_frame_of_its_own() -> None:
    words = serialise_channels(
        [[TimedWord("the", 0.4), TimedWord("star", 0.8)], [TimedWord("red", 0.4)]]
    )
    found = placed_stream(LAYOUT, words, 40)
    the, red, star = (LAYOUT.group(w)[0] for w in ("the", "red", "star"))
    assert found.words == [the, LAYOUT.texts, red, LAYOUT.texts, star]
    ended = np.flatnonzero(np.diff(found.count, prepend=0))
    assert np.diff(found.count, prepend=0).max() == 1
    assert found.last[ended].tolist() == found.words
    assert ended[0] == int(0.4 * 16000 / FRAME) and ended[-1] == 20  # 0.8 s


@pytest.fixture(scope="module")
def random_ear() -> OverlapEar:
    """The embedded ear with a class more, whose frames are never the same as their neighbours."""
    torch.manual_seed(0)
    model = widened(part_of(FOLDER, "ear", "AutoModelForCTC").float(), LAYOUT.texts + 1).eval()
    with torch.no_grad():
        model.ctc_head.bias[-1] = float(model.ctc_head.bias[0]) - 2
    return OverlapEar(model, LAYOUT)


def test_a_stream_is_the_whole_whatever_its_chunks(random_ear: OverlapEar) -> None:
    pcm = torch.from_numpy(unseen_mixtures(1, 3)[0].pcm)
    whole = random_ear.words(pcm)
    assert whole and all(isinstance(word, SpeakerWord) for word in whole)
    for size in (700, 16000):
        assert list(random_ear.stream(pcm.split(size), chunk=0.6, context=12.0)) == whole
    short = [list(random_ear.stream(pcm.split(size), context=1.0)) for size in (333, 8000)]
    assert short[0] == short[1]  # context that is too short may hear otherwise, but always alike
    assert random_ear.words(torch.zeros(8000)) == [] and random_ear.transcribe(torch.zeros(9)) == ""
    assert list(random_ear.stream([torch.zeros(9000)])) == []
    long = torch.cat([pcm, torch.zeros(45 * 16000), pcm])  # of more frames than the model has
    assert [word.text for word in random_ear.words(long)][: len(whole) - 2] == [
        word.text for word in whole[:-2]
    ]
    for wrong in (0.0, 13, True, "1", float("nan")):
        with pytest.raises(SpecError, match=r"chunk=.* seconds from 0\.04 to 12"):
            random_ear.stream([pcm], chunk=wrong)  # type: ignore[arg-type]


def test_words_come_before_the_end(random_ear: OverlapEar) -> None:
    pcm = torch.from_numpy(np.tile(unseen_mixtures(1, 3)[0].pcm, 3))
    pushed = 0

    def chunks() -> Any:
        nonlocal pushed
        for part in pcm.split(800):
            pushed += len(part)
            yield part

    first = next(iter(random_ear.stream(chunks(), chunk=0.4, context=0.8)))
    assert pushed < len(pcm) / 2 and pushed / 16000 - first.at < 0.4 + 0.8 + 0.4


def test_marks_part_the_words_and_letters_of_each_speaker() -> None:
    red, zoe, star = (LAYOUT.group(word) for word in ("red", "zoe", "star"))
    written = [*red, 0, *zoe[:1], *zoe, 0, *star]
    marks = [0.0, 0.1, 0.15, *[0.05] * len(zoe), 0.2, 0.0]  # enough before zoe and star
    frames = list(zip(written, marks, strict=True))
    parter = SpeakerParter(LAYOUT, 0)
    found = [*parter.push(frames[:2]), *parter.push(frames[2:])]
    assert speaker_texts(found) == ("red star", "zoe") and not [*parter.finish()]
    assert [word.at for word in found] == sorted(word.at for word in found)


def test_a_word_that_the_end_cuts_is_what_was_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recording as in a stream; the ear hears "red", and "zo" of zoe."""
    ear = OverlapEar(None, LAYOUT)
    ids = [*LAYOUT.group("red"), *LAYOUT.group("zoe")[:2]]
    frames = [(id, 0.0) for id in ids]
    silence = [(ear.blank, 0.0)] * 1000
    monkeypatch.setattr(ear, "frames", lambda pcm: [*frames, *silence][: len(pcm) // 640])
    whole = ear.words(torch.ones(8000))
    assert [word.text for word in whole] == ["red", "zo"] and whole[1].at < 0.5
    assert list(ear.stream(torch.ones(8000).split(999))) == whole


def test_weights_are_kept_in_four_bits(
    random_ear: OverlapEar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "model"
    home.mkdir()
    for name in ("ear", "speech.json"):
        target = home / name
        if (FOLDER / name).is_dir():
            target.mkdir()
            for file in ("config.json", "model.safetensors"):
                (target / file).symlink_to(FOLDER / name / file)
        else:
            target.symlink_to(FOLDER / name)
    with pytest.raises(ModelError, match="no ear for two speakers") as told:
        load_overlap(home)
    command = re.search(r"python -m ([\w.]+)", str(told.value))
    assert command and command[1] == train_overlap.__name__
    base = read_overlap(home, LAYOUT, None).float().state_dict()
    save_overlap(random_ear.model, base, home / "ear")
    assert (home / "ear" / "overlap.safetensors").stat().st_size < 1.6e6
    back, was = load_overlap(home).model.state_dict(), random_ear.model.state_dict()
    for name, value in was.items():
        error, gap = (back[name] - value).abs().flatten(), (value - base[name]).abs().flatten()
        if value.ndim > 1:
            gap = F.pad(gap, (0, -len(gap) % 32)).view(-1, 32).amax(1).repeat_interleave(32)
            assert bool((error <= 0.51 * gap[: len(error)] / 7 + 1e-6).all()), name
        else:
            assert not error.any(), name
    other = {name: value + 1 for name, value in base.items()}
    save_overlap(random_ear.model, other, home / "ear")
    with pytest.raises(ModelError, match="from another ear for one"):
        load_overlap(home)
    (home / "ear" / "overlap.safetensors").write_bytes(b"none")
    with pytest.raises(ModelError, match="train it again"):
        load_overlap(home)


class FewLines:
    """A corpus of two recordings."""

    def __init__(self) -> None:
        lines = ("the red circle.", EspeakVoice()), ("two stars.", EspeakVoice("en-us+f2"))
        self.spoken = [say(*line) for line in lines]
        names = [voice for _, voice in lines]
        row = lambda i: type("Row", (), {"voice": names[i], "words": self.spoken[i].words})()
        self.recordings = [row(0), row(1)]

    def __getitem__(self, index: int) -> Any:
        return self.spoken[index]


def test_the_embedded_ear_parts_two_voices(tmp_path: Path, capsys: Any) -> None:
    """The words of two voices, and the same from the command line, of a file and of a stream."""
    parts = ("how many objects are there now?", "en-us+m3"), ("hello anna.", "en-us+f2")
    one, two = (say(text, EspeakVoice(voice)).pcm for text, voice in parts)
    mfile = tmp_path / "two.wav"
    write_sound(mfile, torch.cat([one, torch.zeros(4000), two]), 16000)
    pipe = mmfast.pipeline("speech-to-text", speakers=2)
    found = pipe(str(mfile))
    said = [text.split() for text in found.speakers]
    assert cp_errors([parts[0][0][:-1].split(), parts[1][0][:-1].split()], said)[0] <= 3, said
    document = found.to_dict()
    assert document["speakers"] == list(found.speakers) and found.text == "\n".join(
        filter(None, found.speakers)
    )
    assert [word["at"] for word in document["words"]] == sorted(
        word["at"] for word in document["words"]
    )
    with pytest.raises(SystemExit) as end:
        main(["transcribe", str(mfile), "--speakers", "2"])
    assert end.value.code == 0 and capsys.readouterr().out.strip() == found.text
    print_speakers(pipe.stream(str(mfile), context=9.0))
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("1: how many ") and told[-1].startswith(("1: ", "2: "))
    with pytest.raises(MmfastError, match="chunk are of a stream"):
        pipe(str(mfile), chunk=1.0)


@pytest.mark.slow
def test_training_lowers_the_loss() -> None:
    torch.manual_seed(0)
    ear = widened(make_ear(LAYOUT), LAYOUT.texts + 1)
    task = OverlapTask(LAYOUT, ear, FewLines(), 0, 3e-3, held=0)  # type: ignore[arg-type]
    mixture = mixed(task.corpus[0], task.corpus[1], np.random.default_rng(1))
    batch = [[lesson(LAYOUT, mixture, np.random.default_rng(2))]]
    losses = [update(task, batch, 1.0)["ctc"] for _ in range(5)]
    assert losses[-1] < 0.8 * losses[0], losses
    assert CHANGE in [word.text for word in serialise_channels(mixture.channels)]
    assert LAYOUT.texts in batch[0][0].words


def test_what_two_speakers_do_not_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, said in (
        ({"speakers": 3}, "speakers=3 is not allowed; give 1 or 2"),
        ({"speakers": True}, "speakers=True is not allowed"),
        ({"speakers": 2, "model": object()}, "not of object"),
        ({"speakers": 2, "language": "en"}, "takes no language"),
        ({"speakers": 2, "model": str(tmp_path)}, "speech"),
    ):
        with pytest.raises(MmfastError, match=said):
            mmfast.pipeline("speech-to-text", **options)
    with pytest.raises(SystemExit):
        main(["transcribe", str(tmp_path / "no.wav"), "--speakers", "2"])
    assert "no.wav" in capsys.readouterr().err
