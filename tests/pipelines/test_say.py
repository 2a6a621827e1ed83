"""`mmfast say` and `text-to-speech`: what they print and write, and what they refuse."""

from __future__ import annotations

import io
import json
import sys
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
from tone_models import HumModel, hum, read

import mmfast
from mmfast.cli import main
from mmfast.core.errors import MediaError, MmfastError, ModelError
from mmfast.frontends.audio.reader import load_audio
from mmfast.models.speech import embedded
from mmfast.pipelines.speech import Spoken, TextToSpeech

Run = Callable[..., tuple[int, str, str]]
KEYS = {"text", "seconds", "first_audio_ms", "rtf", "tokens_per_pass"}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line with a humming model; exit code, standard output and error."""
    monkeypatch.setattr(embedded, "load_speech", lambda path, device: HumModel())

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*args])
        return (int(left.value.code or 0), *capsys.readouterr())

    return call


def test_say_writes_a_file_and_prints_the_text(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    code, printed, told = run("say", "hello there", "-o", str(out))
    assert (code, printed) == (0, "hello there\n")
    assert "real-time factor" in told
    with wave.open(str(out)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
    assert read(load_audio(out)) == "hello there"


@pytest.mark.parametrize("suffix", [".mp3", ".ogg", ".flac"])
def test_say_encodes_what_the_suffix_names(run: Run, tmp_path: Path, suffix: str) -> None:
    plain, out = tmp_path / "out.wav", tmp_path / f"out{suffix}"
    assert run("say", "hello there", "-o", str(plain))[0] == 0
    assert run("say", "hello there", "-o", str(out))[0] == 0
    assert out.read_bytes()[:4] != b"RIFF"
    lengths = [len(load_audio(each)) for each in (plain, out)]
    assert abs(lengths[0] - lengths[1]) <= 2304  # samples of two frames of MP3
    assert read(load_audio(out)) == "hello there"


def test_json_is_one_document_and_nothing_else(run: Run, tmp_path: Path) -> None:
    code, printed, told = run("say", "hello there", "-o", str(tmp_path / "o.wav"), "--json")
    document = json.loads(printed)
    assert (code, told) == (0, "")
    assert document.keys() >= KEYS
    assert document["text"] == "hello there"
    assert document["seconds"] == 0.22
    assert document["tokens_per_pass"] == 14.6667


def test_text_from_standard_input(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert run("say", "-", "-o", str(tmp_path / "o.wav"))[:2] == (0, "from a pipe\n")


def test_sound_to_standard_output(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Out(io.StringIO):
        buffer = io.BytesIO()

    monkeypatch.setattr(sys, "stdout", Out())
    with pytest.raises(SystemExit) as left:
        main(["say", "hello", "-o", "-"])
    assert not left.value.code
    assert read(load_audio(Out.buffer.getvalue())) == "hello"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["say", "", "-o", "a.wav"], "nothing to say"),
        (["say", " ?!… ", "-o", "a.wav"], "nothing to say"),
        (["say", "x" * 30_000, "-o", "a.wav"], "too long"),
        (["say", "hi", "-o", "a.xyz"], "unknown sound format '.xyz'"),
        (["say", "hi", "-o", "no/such/folder/a.wav"], "existing folder"),
        (["say", "hi", "-o", "."], "existing folder"),
        (["say", "hi"], "--output"),
        (["say", "hi", "-o", "-", "--json"], "standard output"),
        (["say", "hi", "-o", "a.wav", "--rate", "fast"], "--rate"),
        (["say", "hi", "-o", "a.wav", "--model", "./nowhere"], "no directory of a checkpoint"),
    ],
    ids=["empty", "marks", "long", "mp3", "folder", "dot", "no output", "both", "rate", "model"],
)
def test_what_cannot_be_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, error = run(*args)
    assert (code, printed) == (2, "")
    assert told in error and error.startswith("mmfast: error: ") and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]


def test_a_model_that_fails_leaves_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Iterator[Any]:
        raise MmfastError("voice='x' is unknown")
        yield

    monkeypatch.setattr(HumModel, "speak", fail)
    code, _, error = run("say", "hi", "-o", str(tmp_path / "a.wav"))
    assert (code, error) == (2, "mmfast: error: voice='x' is unknown\n")
    assert not [*tmp_path.iterdir()]


def test_lists_in_lists_out() -> None:
    pipe = TextToSpeech(HumModel())
    one, two = pipe(["one", "and two"])
    assert (read(one.pcm), read(two.pcm)) == ("one", "and two")
    assert (one.text, str(two), one.rate) == ("one", "and two", 16000)
    assert one.seconds == 0.06 and one.stats["first_audio_ms"] > 0
    assert pipe([]) == []
    with pytest.raises(MmfastError, match="nothing to say"):
        pipe(["one", ""])


def test_text_is_spoken_as_it_comes() -> None:
    asked = []

    def write() -> Iterator[str]:
        for part in ("one ", "two ", "three"):
            asked.append(part)
            yield part

    sounds = TextToSpeech(HumModel()).stream(write())
    first = next(sounds)
    assert first.text == "one" and len(asked) <= 2
    assert read(torch.cat([first.pcm, *[sound.pcm for sound in sounds]])) == "one two three"
    with pytest.raises(MmfastError, match="int cannot be said"):
        list(TextToSpeech(HumModel()).stream(iter(["one ", 2])))  # type: ignore[list-item]


def test_what_was_said_can_be_saved(tmp_path: Path) -> None:
    spoken = TextToSpeech(HumModel())("hello")
    spoken.save(tmp_path / "a.wav")
    buffer = io.BytesIO()
    spoken.save(buffer)
    assert buffer.getvalue() == (tmp_path / "a.wav").read_bytes()
    assert [row.stage for row in spoken.trace.rows] == ["speak"]
    assert torch.equal(load_audio(tmp_path / "a.wav"), (hum("hello") * 32768).round() / 32768)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.mp3", "MP3"),
        ("a.flac", "FLAC"),
        ("a.ogg", "OGG"),
        ("b.OPUS", "OGG"),
        ("a.WAV", "WAV"),
        ("a", "WAV"),
    ],
)
def test_files_are_what_their_suffix_says(tmp_path: Path, name: str, kind: str) -> None:
    """A tone of 440 Hz, half a minute long, is still one when it is read back."""
    rate = 16000
    tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(30 * rate) / rate)
    Spoken(tone, rate, "hum").save(tmp_path / name)
    info = soundfile.info(tmp_path / name)
    assert (info.format, info.channels) == (kind, 1)
    samples, found = soundfile.read(tmp_path / name, dtype="float32")
    assert abs(len(samples) / found - 30) < 0.2
    middle = torch.from_numpy(samples[10 * found : 11 * found])
    assert int(torch.fft.rfft(middle).abs().argmax()) == 440
    assert abs(float(middle.abs().max()) - 0.5) < 0.05
    if kind in ("WAV", "FLAC"):
        assert torch.allclose(torch.from_numpy(samples), tone, atol=1e-4)
    assert len(load_audio(tmp_path / name, rate)) > 29 * rate


@pytest.mark.parametrize("name", ["a.mp4", "a.mp", "a.txt", "a.wav.gz", "no/such/a.mp3"])
def test_files_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(MediaError) as error:
        TextToSpeech(HumModel())("hello").save(tmp_path / name)
    text = str(error.value)
    assert "\n" not in text and not [*tmp_path.iterdir()]
    assert ("cannot be written" in text) if "/" in name else (".flac, .mp3, .ogg" in text)


def test_a_rate_that_a_format_lacks_is_its_next_higher(tmp_path: Path) -> None:
    for name, rate, out in (("a.opus", 44100, 48000), ("b.opus", 11025, 12000),
                            ("a.mp3", 96000, 48000), ("a.ogg", 11025, 11025)):  # fmt: skip
        tone = 0.5 * torch.sin(2 * torch.pi * 440 * torch.arange(rate) / rate)
        Spoken(tone, rate, "x").save(tmp_path / name)
        found = soundfile.info(tmp_path / name)
        assert (found.samplerate, abs(found.duration - 1) < 0.06) == (out, True), name
        sound = load_audio(tmp_path / name, 8000)[:8000]
        assert int(torch.fft.rfft(sound * torch.hann_window(len(sound))).abs().argmax()) == 440
    Spoken(torch.zeros(0), 16000, "").save(tmp_path / "a.mp3")
    assert soundfile.info(tmp_path / "a.mp3").format == "MP3"


@pytest.mark.parametrize("wrong", [None, 3, b"hi", ["a", None], {"a": 1}])
def test_what_is_no_text(wrong: Any) -> None:
    with pytest.raises(MmfastError) as error:
        TextToSpeech(HumModel())(wrong)
    assert "\n" not in str(error.value)


def test_models_that_do_not_speak(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot speak"):
        mmfast.pipeline("text-to-speech", object())
    with pytest.raises(ModelError, match="no directory"):
        mmfast.pipeline("text-to-speech", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match=r"choices: bark, csm, .*qwen2_5_omni, .*tiny-speech"):
        mmfast.pipeline("text-to-speech", str(tmp_path))
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ModelError, match="cannot be read"):
        mmfast.pipeline("text-to-speech", str(tmp_path))
    for wrong in ({"rate": "fast"}, {"voice": 3}, {"pitch": 1.5}, {"rate": True}):
        with pytest.raises(MmfastError):
            TextToSpeech(HumModel(), **wrong)  # type: ignore[arg-type]
