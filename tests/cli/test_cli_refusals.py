"""Options that a command would ignore, and sizes that it cannot serve, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_runs import CLIP, QUESTION, fails

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
        (("--preset", "tiny", "--frames", "1000000000"), "memory ran out on tiny"),
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
    ],
)
def test_an_option_that_would_say_nothing_is_refused(
    command: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told in fails(capsys, *command)


def test_a_suite_takes_what_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert "takes no --seconds" in fails(capsys, "eval", "--n", "1", "--seconds", "30")
    assert "scenes" in fails(capsys, "eval", "--n", "1", "--suite", "photos")
    assert "scenes" not in fails(capsys, "leaderboard", "--suites", "photos")
    assert "eval without --data does not use --csv" in fails(capsys, "eval", "--csv", "a.csv")
    for seconds in ("nan", "inf", "3"):
        told = fails(capsys, "eval", "--n", "1", "--suite", "stream", "--seconds", seconds)
        assert f"a stream of {seconds} seconds" in told
    assert "--seed -5" in fails(capsys, "eval", "--n", "1", "--seed", "-5")


def test_a_recording_of_nothing_gets_no_empty_reply(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    silence, reply = tmp_path / "silence.wav", tmp_path / "reply.wav"
    write_sound(silence, torch.zeros(16_000), 16_000)
    told = fails(capsys, "talk", str(silence), "-o", str(reply), "--whole")
    assert "nothing is heard" in told and not reply.exists()
