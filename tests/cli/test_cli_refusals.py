"""Options that a command would ignore, and sizes that it cannot serve, are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cli_runs import CLIP, QUESTION, ROOT, fails, run

from mmfast.cli import COMMANDS, load
from mmfast.core.errors import MmfastError
from mmfast.frontends.audio.wav import write_sound


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--preset", "tiny", "--model", "tiny-video"), "--preset does not use --model;"),
        ((CLIP, "--preset", "tiny"), "--preset does not use MEDIA;"),
        ((CLIP, "--out", "rows.jsonl"), "plan does not use --out;"),
        (("--check-all", "--quality", "fast"), "--check-all does not use --quality;"),
        ((), "give a media file, or --preset"),
        (("--preset", "tiny", "--max-new-tokens", "0"), "--max-new-tokens 0 answers nothing"),
        (("--preset", "tiny", "--frames", "1000000000"), "give at most 2048"),
        (("--preset", "tiny", "--max-new-tokens", "99999"), "more than the 32,768 positions of"),
    ],
)
def test_a_plan_uses_what_it_is_given(
    given: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fails(capsys, "plan", *given)


@pytest.mark.parametrize("threads", ["0", "-1", "100000"])
@pytest.mark.parametrize("command", [("profile", CLIP, QUESTION), ("peers",), ("bench",)])
def test_threads_are_as_many_as_a_machine_bears(
    command: tuple[str, ...], threads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = fails(capsys, *command, "--threads", threads)
    assert f"--threads {threads} is out of reach; give a number from 1 to " in told


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("peers", "--engines", ","), "unknown engine ''; choices: mmfast, openvino"),
        (("eval", "--n", "1", "--reduce", ""), "--reduce is empty; give a value, or leave it out"),
        (("eval", "--n", "1", "--cache", " "), "--cache is empty"),
        (("profile", CLIP, QUESTION, "--reduce", ""), "--reduce is empty"),
        (("ask", CLIP, QUESTION, "--cache="), "--cache is empty"),
        (("codec", CLIP, "-o", "sound.wav", "--model", " "), "--model is empty"),
        (("serve", "--dry-run", "--reduce", ""), "--reduce is empty"),
        (("transcribe", CLIP, "--listener", ""), "--listener is empty"),
        (("bench", "--compare", "rows.jsonl"), "2 arguments: two files of rows, the older one"),
        (("bench", "--reduce", "evs:0.5", "--keep", "0.1"), "evs:0.5 has one; leave --keep out"),
        (("leaderboard", "--compare", "a", "b", "--no-speed"), "does not use --no-speed; leave"),
        (("leaderboard", "--compare", "a"), "2 arguments: two leaderboard.json files"),
        (("methods", "--kind", "cache", "--sort", "ttft"), "not cache; give --for kv"),
        (("eval", "--data", "mine.jsonl", "--seed", "-1"), "--seed -1 is no seed; give 0 or more"),
        (("ask", CLIP, QUESTION, "--reuse-folder", "."), "without --reuse; give --reuse prefix"),
        (("eval", "--no-resume"), "--no-resume asks again what --out has; give --out, too"),
        (("ask", CLIP, QUESTION, "--frames", "4", "--fps", "2"), "two ways to sample a clip"),
        (("profile", CLIP, QUESTION, "--fps", "2", "--frames", "4"), "two ways to sample a clip"),
        (("batch", ".", "-q", "?", "--fps", "2", "--frames", "4"), "two ways to sample a clip"),
        (("bench", "--frames", "100000"), "are more than the 32,768 positions of tiny; give"),
        (("bench", "--out", f"{ROOT}/pyproject.toml"), "pyproject.toml' is no file of rows; name"),
        (("peers", "--out", f"{ROOT}/README.md"), "README.md' is no file of rows; name"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused(
    command: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fails(capsys, *command)


def number_options() -> list[tuple[str, str, type]]:
    """Every command with every option of it that takes a number."""
    found = [(name, option) for name in COMMANDS for option in load(name).params]
    kinds = [getattr(option, "type_descriptor", None) for _, option in found]
    return [
        (name, option.opts[0], kind.annotation)
        for (name, option), kind in zip(found, kinds, strict=True)
        if kind is not None and kind.annotation in (int, float)
    ]


def test_numbers_out_of_all_reach_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"ask": (CLIP, QUESTION), "batch": (".", "-q", "?"), "watch": (CLIP,)}
    given |= {"say": ("hello", "-o", "a.wav"), "talk": (CLIP, "-o", "a.wav"), "serve": ()}
    given |= {"transcribe": (CLIP,), "profile": (CLIP, QUESTION), "calibrate": ("x",)}
    given |= {"codec": (CLIP, "-o", "a.wav"), "translate": ("--text", "hello")}
    options = number_options()
    assert len(options) > 60 and ("plan", "--max-new-tokens", int) in options
    for command, option, kind in options:
        for value in ("nan", "-inf", "1e300") if kind is float else (f"{10**21}", f"-{10**21}"):
            told = fails(capsys, command, *given.get(command, ()), f"{option}={value}")
            assert option in told and f"{kind(value)}" in told


@pytest.mark.parametrize("value", ["many", "1.5", ""])
def test_a_number_that_is_none_is_named(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = fails(capsys, "ask", CLIP, QUESTION, "--frames", value)
    assert repr(value) in told and "'--frames'" in told and "(see mmfast ask --help)" in told


def test_a_picture_is_not_sampled_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmfast.pipelines.pipeline", Mock(side_effect=MmfastError("no model")))
    picture = str(ROOT / "assets" / "clips" / "picture.jpg")
    for command in ("ask", "profile", "plan"):
        code, _, err = run(capsys, command, picture, "What is it?", "--frames", "4")
        assert code == 2 and "note: --frames samples clips; a picture is taken as it is" in err


def test_a_spec_that_is_given_twice_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    again = ("--reduce", "uniform:0.5", "--reduce", "uniform:0.5")
    code, out, _ = run(capsys, "eval", "--n", "1", *again, "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [row["reduce"] for row in rows] == [None, "uniform:0.5"]


def test_a_suite_takes_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes no --seconds" in fails(capsys, "eval", "--n", "1", "--seconds", "30")
    assert "scenes" in fails(capsys, "eval", "--n", "1", "--suite", "photos")
    assert "scenes" not in fails(capsys, "leaderboard", "--suites", "photos")
    assert "eval without --data does not use --csv" in fails(capsys, "eval", "--csv", "a.csv")
    told = fails(capsys, "eval", "--n", "1", "--suite", "stream", "--seconds", "3")
    assert "a stream of 3 seconds" in told
    assert "--seed -5" in fails(capsys, "eval", "--n", "1", "--seed", "-5")


def test_a_recording_of_nothing_gets_no_empty_reply(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    silence, reply = tmp_path / "silence.wav", tmp_path / "reply.wav"
    write_sound(silence, torch.zeros(16_000), 16_000)
    told = fails(capsys, "talk", str(silence), "-o", str(reply), "--whole")
    assert "nothing is heard" in told and not reply.exists()
    code, _, err = run(capsys, "transcribe", str(silence))
    assert code == 0 and f"note: nothing is heard in {str(silence)!r}" in err
    for command in ("transcribe", "translate"):
        found = json.loads(run(capsys, command, str(silence), "--json")[1])
        assert found["notes"] == [f"nothing is heard in {str(silence)!r}"]
    code, printed, err = run(capsys, "translate", "--text", "the red xylophone", "--json")
    assert json.loads(printed)["notes"] == ["the translator does not know: xylophone"]
    assert err == "mmfast: note: the translator does not know: xylophone\n"
