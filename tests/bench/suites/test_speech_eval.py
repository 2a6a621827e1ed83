"""The evaluation of speech models, on models whose results are known beforehand."""

import json

import pytest
import torch
from cli_runs import fails
from speech_fakes import Parrot, fingerprint

from mmfast.bench.report.docs import write_table
from mmfast.bench.results import append, environment, load
from mmfast.bench.suites.speech import quality as speech_quality
from mmfast.bench.suites.speech.quality import (
    MODES,
    CachedRecogniser,
    run_speech_eval,
    speech_eval_rows,
    unseen_lines,
    unseen_questions,
)
from mmfast.bench.suites.speech.replies import content_questions, follow_ups, reply_rows
from mmfast.core.errors import MmfastError
from mmfast.core.speech import Sound
from mmfast.pipelines.omni_chat import written
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.speech.text import split_of

N = 6


@pytest.fixture(scope="module")
def asked():
    return unseen_questions(N, 0)


@pytest.fixture(scope="module")
def spoken(asked):
    return [(fingerprint(say(each.text, each.voice).pcm), each.text) for each in asked]


def _hear(lines):
    """A recogniser that knows the recordings by heart, and takes what comes near them for them."""
    known = [(line.text, say(line.text, line.voice).pcm) for line in lines]

    def hear(pcm):
        for text, sound in known:
            if len(sound) == len(pcm) and (sound - pcm).abs().max() < 0.01:
                return text
        return "zero"

    return hear


def test_sentences_are_unseen_and_different():
    lines = unseen_lines(40, 0)
    assert len({line.text for line in lines}) == 40
    assert {split_of(line.text) for line in lines} == {"eval"}
    assert len({line.voice.name for line in lines}) == 4
    assert [line.text for line in unseen_lines(40, 0)] == [line.text for line in lines]
    assert {line.text for line in unseen_lines(40, 1)} != {line.text for line in lines}


def test_word_errors_are_those_of_each_mode():
    lines = unseen_lines(3, 0)
    model = Parrot(lisp=True)
    rows = run_speech_eval(3, 0, model, tasks=("speaking",), recognise=_hear(lines))["rows"]
    found = {row["mode"]: row for row in rows}
    assert list(found) == ["recordings", "codec", *MODES]
    assert [found[name]["wer"] for name in found if name != "raw"] == [0.0] * 8
    assert found["raw"]["wer"] > 0.8
    assert found["raw"]["identical"] == 0
    assert found["exact"]["identical"] == found["vanilla"]["identical"] == 1
    assert found["raw"]["tokens_per_pass"] == 11
    assert found["vanilla"]["tokens_per_pass"] == 1
    assert [how for text, how in model.calls if text == lines[0].text] == list(MODES.values())
    assert {name for name in MODES if found[name]["verify"] == "none"} == {
        "raw", "raw balance", "raw boost",
    }  # fmt: skip
    assert found["codec"]["seconds"] == pytest.approx(found["recordings"]["seconds"])
    words = found["recordings"]["words"]
    assert sum(found[m]["errors"] for m in found) == found["raw"]["errors"] <= 2 * words
    for row in rows:
        low, high = row["interval"]
        assert low <= min(1.0, row["wer"]) <= high
        assert set(row["by_voice"]) == {line.voice.name for line in lines}


def test_a_listener_that_hears_all_is_as_good_as_typing(asked, spoken):
    answers = {written(each.text): each.case.answer for each in asked}
    document = run_speech_eval(
        N, 0, Parrot(known=spoken), tasks=("listening",),
        answer=lambda cases: [_answer(answers, case) for case in cases],
    )  # fmt: skip
    first, second = document["rows"]
    assert (first["mode"], second["mode"]) == ("typed", "spoken")
    assert first["accuracy"] == second["accuracy"] == second["relative"] == second["exact"] == 1
    assert second["wer"] == 0
    assert first["questions"] == N


def _answer(answers, case):
    """The answer to a question typed in any form; "" for what is no question of these."""
    bare = {_bare(text): answer for text, answer in answers.items()}
    return bare.get(_bare(case.question), "")


def _bare(text):
    return "".join(c for c in text.lower().replace("color ", "colour ") if c.isalpha() or c == " ")


def test_a_deaf_listener_is_not(asked, spoken):
    answers = {written(each.text): each.case.answer for each in asked}
    deaf = [(key, "zero") for key, _ in spoken[: N // 2]] + spoken[N // 2 :]
    _, row = run_speech_eval(
        N, 0, Parrot(known=deaf), tasks=("listening",),
        answer=lambda cases: [_answer(answers, case) for case in cases],
    )["rows"]  # fmt: skip
    assert row["accuracy"] == row["relative"] == 0.5
    assert row["wer"] > 0.3
    assert row["exact"] == 0.5


def test_questions_are_unseen_and_about_their_clips(asked):
    assert {split_of(each.text) for each in asked} == {"eval"}
    for each in asked:
        assert _bare(written(each.text)) == _bare(each.case.question)
    assert len({each.case.kind for each in asked}) > 2


def test_equal_sound_is_heard_once():
    heard = []
    ear = CachedRecogniser(lambda pcm: heard.append(len(pcm)) or "one")
    assert [ear(torch.zeros(5)), ear(torch.zeros(5)), ear(torch.ones(5))] == ["one"] * 3
    assert heard == [5, 5]


def test_rows_are_kept_and_make_a_table(tmp_path, asked, spoken):
    lines = unseen_lines(N, 0)
    document = run_speech_eval(
        N, 0, Parrot(known=spoken), ("vanilla", "exact"), recognise=_hear(lines),
        tasks=("speaking", "listening"),
        answer=lambda cases: [case.answer for case in cases],
    )  # fmt: skip
    json.dumps(document, allow_nan=False)
    append(tmp_path / "rows.jsonl", speech_eval_rows(document, environment()))
    rows = load(tmp_path / "rows.jsonl")
    assert {row["suite"] for row in rows} == {"speech"}
    assert all(row["model"] == "parrot" and row["versions"] and "score" in row for row in rows)
    text = "\n".join(write_table("speech", rows))
    for part in ("espeak-ng itself", "the codec alone", "`exact`", "100 % as vanilla", "typed"):
        assert part in text
    assert write_table("speech", []) == ["Not measured."]


class Scholar:
    """Knows every recording and its right reply; `late` says the reply of the one before."""

    def __init__(self, turns, late=False):
        self.known = {fingerprint(say(each.text, each.voice).pcm): each for each in turns}
        self.late, self.before = late, "nothing."

    def reply(self, pcm, rate=16000, history=()):
        each = self.known.get(fingerprint(pcm))
        said = "" if each is None else self.before if self.late else each.reply
        self.before = said
        yield Sound(torch.zeros(0), rate, heard="" if each is None else each.text)
        yield Sound(torch.zeros(0), rate, text=said.upper())


def test_replies_are_right_by_their_words():
    every = content_questions(6, 3) + [turn for turns in follow_ups(3, 3) for turn in turns]
    single, following, other = reply_rows(Scholar(every), 6, 3, lambda *_: None)
    assert single["accuracy"] == following["accuracy"] == other["accuracy"] == single["exact"] == 1
    assert other["invented"] == 0
    single, following, _ = reply_rows(Scholar(every, late=True), 6, 3, lambda *_: None)
    assert single["accuracy"] == following["accuracy"] == 0
    *_, other = reply_rows(Parrot(), 6, 3, lambda *_: None)
    assert other["invented"] == other["questions"] == 3


def test_content_is_unseen_and_runs_out_of_no_kind():
    asked = content_questions(120, 1)
    assert len({each.text for each in asked}) == 120
    assert {split_of(each.text) for each in asked} == {"eval"}
    assert len({each.voice.name for each in asked}) == 4


def test_unknown_names_are_one_line():
    with pytest.raises(MmfastError, match="turbo") as caught:
        run_speech_eval(1, 0, Parrot(), ("turbot",))
    assert "\n" not in str(caught.value)
    with pytest.raises(MmfastError, match="listening"):
        run_speech_eval(1, 0, Parrot(), tasks=("hearing",))


def test_the_command_prints_a_document(monkeypatch, capsys, tmp_path):
    from mmfast.cli import own_suites

    lines = unseen_lines(2, 7)
    real = run_speech_eval

    def fake(n, seed, model, progress):
        return real(
            n, seed, Parrot(), ("vanilla",), ("speaking",), progress, recognise=_hear(lines)
        )

    monkeypatch.setattr(speech_quality, "run_speech_eval", fake)
    given = {"suite": "speech", "n": 2, "seed": 7, "model": None, "out": tmp_path / "rows.jsonl",
             "as_json": True, "resume": True}  # fmt: skip
    own_suites.eval_speech(given)
    printed = json.loads(capsys.readouterr().out)
    assert [row["mode"] for row in printed["rows"]] == ["recordings", "codec", "vanilla"]
    assert len(load(tmp_path / "rows.jsonl")) == 3
    monkeypatch.setattr(speech_quality, "run_speech_eval", None)  # nothing is measured again
    own_suites.eval_speech(given | {"as_json": False})
    assert "vanilla" in capsys.readouterr().out


def test_the_command_says_what_it_does_not_take(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--suite", "speech", "--reduce", "divprune:0.5", "--n", "1")
    assert "--reduce" in fails(capsys, "eval", *options)
