"""Clips spoken over: pictures byte for byte, sentences in their time, subtitles, the command."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import cli_runs
import numpy as np
import pytest
import torch

import mmfast
from mmfast.core.errors import MediaError, MmfastError
from mmfast.core.speech import Sound
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.wav import write_sound
from mmfast.tiny.speech.recordings import RATE, say
from mmfast.tiny.video.clips import encode
from mmfast.voice.dubbing import FASTEST, clock, faster, placed, write_dubbed

FIRST, SECOND = "the red circle moves left", "peter has two black stars"
VELDA = ("ronda ruva levo mira", "peter stelan nokan du hava")


class ToneTalker:
    """Speaks every word as a tone of a given length, at a rate of its own."""

    sample_rate = 24_000

    def __init__(self, seconds: float = 0.2) -> None:
        self.seconds, self.said = seconds, list[str]()

    def speak(self, text: str, **_: Any) -> Iterator[Sound]:
        self.said.append(text)
        for word in text.split():
            time = torch.arange(int(self.seconds * self.sample_rate)) / self.sample_rate
            yield Sound(0.5 * torch.sin(2 * torch.pi * 440 * time), self.sample_rate, word)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sentences with a second of silence between, over pictures of noise."""
    folder = tmp_path_factory.mktemp("clip")
    gap = torch.zeros(RATE)
    sound = torch.cat([say(f"{FIRST}.").pcm, gap, say(f"{SECOND}.").pcm, gap])
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (int(8 * len(sound) / RATE), 32, 48, 3), dtype=np.uint8)
    silent = folder / "silent.mp4"
    silent.write_bytes(encode(iter(frames), 8))
    write_dubbed(silent, folder / "clip.mp4", sound, RATE)
    return folder / "clip.mp4"


def packets(path: Path) -> list[tuple[int, bytes]]:
    with av.open(str(path)) as box:
        video = box.streams.video[0]
        found = box.demux(video)
        return [(p.pts * p.time_base, bytes(p)) for p in found if p.size]


def test_a_clip_is_spoken_over_in_its_time(clip: Path, tmp_path: Path) -> None:
    out, talker = tmp_path / "out.mp4", ToneTalker()
    pipe = mmfast.pipeline("speech-translation")
    found = pipe.dub(clip, out, talker)
    assert tuple(each.text for each in found) == VELDA == tuple(talker.said)
    assert [each.heard for each in found] == [FIRST, SECOND]
    assert packets(out) == packets(clip)
    sound, before = load_audio(str(out), RATE), load_audio(str(clip), RATE)
    assert abs(len(sound) - len(before)) < RATE / 5
    for each, words in zip(found, (4, 5), strict=True):
        assert each.at == pytest.approx(each.start, abs=1e-3) and each.tempo == 1
        assert each.until - each.at == pytest.approx(0.2 * words, abs=0.01)
        assert each.start < each.end and abs(each.end - each.start - 0.2 * words) < 2
        inside = sound[int((each.at + 0.1) * RATE) : int((each.until - 0.1) * RATE)]
        assert inside.square().mean().sqrt() > 0.25
    between = sound[int((found[0].until + 0.1) * RATE) : int((found[1].at - 0.1) * RATE)]
    assert between.abs().max() < 0.05  # the speaker of the clip is not heard
    lines = out.with_suffix(".srt").read_text().split("\n")
    assert lines[0] == "1" and lines[2] == VELDA[0] and lines[6] == VELDA[1]
    assert lines[1] == f"{clock(found[0].at, ',')} --> {clock(found[0].until, ',')}"


def test_long_sentences_are_spoken_faster_and_then_later() -> None:
    def told(seconds: float) -> tuple[float, float, str, str, torch.Tensor]:
        return 1.0, 2.0, "", "", torch.ones(int(8000 * seconds))

    one, other, last = told(2.4), (3.0, 4.0, "", "", torch.ones(32_000)), told(0.5)
    track, found = placed([one, other, (4.0, 5.0, "", "", last[4])], 8.0, 8000)
    assert [each.tempo for each in found] == pytest.approx([1.2, FASTEST, 1.0], rel=1e-3)
    assert found[0].until == pytest.approx(3.0, abs=0.05)
    assert found[1].until > 4.0 and found[2].at == found[1].until  # never two at once
    assert len(track) == 64_000


def test_faster_keeps_the_pitch() -> None:
    pcm = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(32_000) / 16_000)
    assert faster(pcm, 16_000, 1.0) is pcm
    short = faster(pcm, 16_000, 1.5)
    assert len(short) == pytest.approx(len(pcm) / 1.5, rel=0.03)
    power = torch.fft.rfft(short[2000:18_000]).abs()
    assert float(power.argmax()) * 16_000 / 16_000 == pytest.approx(440, abs=8)


def test_clips_without_pictures_or_sound(clip: Path, tmp_path: Path) -> None:
    pipe = mmfast.pipeline("speech-translation")
    wav = tmp_path / "said.wav"
    write_sound(wav, say(f"{FIRST}.").pcm, RATE)
    with pytest.raises(MediaError, match="no pictures"):
        pipe.dub(wav, tmp_path / "out.mp4", ToneTalker())
    with pytest.raises(MediaError):
        pipe.dub(clip.with_name("silent.mp4"), tmp_path / "out.mp4", ToneTalker())
    with pytest.raises(MmfastError, match="tempo"):
        pipe.dub(clip, tmp_path / "out.mp4", tempo=2)


def test_the_clip_itself_and_files_that_cannot_be_written(clip: Path, tmp_path: Path) -> None:
    pipe, mine = mmfast.pipeline("speech-translation"), tmp_path / "mine.mp4"
    mine.write_bytes(clip.read_bytes())
    (tmp_path / "again.mp4").symlink_to(mine)
    (tmp_path / "folder.mp4").mkdir()
    for name, words in (
        ("mine.mp4", "the clip itself"),
        ("again.mp4", "the clip itself"),
        ("said.srt", r"unknown format of a clip '\.srt'.*\.mkv"),
        ("none/out.mp4", "existing folder"),
        ("folder.mp4", "existing folder"),
    ):
        with pytest.raises(MmfastError, match=words):
            pipe.dub(mine, tmp_path / name, ToneTalker())
    assert mine.read_bytes() == clip.read_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_clip_that_fails_half_way_leaves_what_was_there(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    out = tmp_path / "out.mp4"
    out.write_bytes(b"an older one")
    monkeypatch.setattr(av.AudioFrame, "from_ndarray", full, raising=False)
    with pytest.raises(MmfastError, match="No space left"):
        write_dubbed(clip, out, torch.zeros(4000), RATE)
    assert out.read_bytes() == b"an older one" and list(tmp_path.iterdir()) == [out]


def test_the_command(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "velda.mp4"
    code, text, _ = cli_runs.run(capsys, "translate", str(clip), "--out", str(out), "--json")
    rows = json.loads(text)["sentences"]
    assert code == 0 and [row["text"] for row in rows] == [*VELDA]
    assert packets(out) == packets(clip) and out.with_suffix(".srt").exists()
    for argv in (["--talker", "x"], ["--out", str(out), "--policy", "wait:3"]):
        code, text, error = cli_runs.run(capsys, "translate", str(clip), *argv)
        assert code == 2 and not text and len(error.strip().splitlines()) == 1


def test_the_command_tells_what_was_not_heard(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures, out = clip.with_name("silent.mp4"), str(tmp_path / "out.mkv")
    mute, cut = tmp_path / "mute.mp4", tmp_path / "cut.mkv"
    write_dubbed(pictures, mute, torch.zeros(2 * RATE), RATE)
    write_dubbed(pictures, cut, load_audio(str(clip), RATE), RATE)
    cut.write_bytes(cut.read_bytes()[:-2000])
    for path, words in ((mute, "nothing is heard in"), (cut, "is truncated")):
        with warnings.catch_warnings(action="ignore"):  # noted in the document
            code, text, _ = cli_runs.run(capsys, "translate", str(path), "--out", out, "--json")
        (note,) = json.loads(text)["notes"]
        assert code == 0 and words in note
