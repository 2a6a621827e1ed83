"""`mmfast talk` and `speech-chat`: recordings in, replies out, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tone_models import HumEar, HumModel, hum, read

import mmfast
from mmfast.cli import main
from mmfast.core.errors import MediaError, MmfastError, ModelError
from mmfast.core.speech import Turn
from mmfast.frontends.audio.reader import load_audio
from mmfast.frontends.audio.wav import write_wav
from mmfast.models.speech import embedded
from mmfast.ops.audio import resample
from mmfast.pipelines import speech
from mmfast.pipelines.speech import SpeechChat, Spoken

Run = Callable[..., tuple[int, str, str]]
PAUSE = torch.zeros(16000)
KEYS = ["text", "seconds", "first_audio_ms", "rtf", "tokens_per_pass"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line with a humming model and an ear for hums."""
    monkeypatch.setattr(embedded, "load_speech", lambda path, device: HumModel())
    monkeypatch.setattr("mmfast.voice.ear.VoiceEar", HumEar)

    def call(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*args])
        return (int(left.value.code or 0), *capsys.readouterr())

    return call


def recording(path: Path, *parts: torch.Tensor, rate: int = 16000) -> str:
    write_wav(path, torch.cat(parts), rate)
    return str(path)


def test_every_turn_is_answered(run: Run, tmp_path: Path) -> None:
    said = recording(tmp_path / "in.wav", hum("hello"), PAUSE, hum("and you"), PAUSE)
    code, printed, _ = run("talk", said, "-o", str(tmp_path / "out.wav"), "--json")
    document = json.loads(printed)
    assert code == 0 and list(document)[:5] == KEYS
    assert document["text"] == document["heard"] == "hello and you"
    assert [turn["heard"] for turn in document["turns"]] == ["hello", "and you"]
    assert document["seconds"] == 0.24
    assert read(load_audio(tmp_path / "out.wav")) == "helloand you"


def test_a_document_has_what_is_noted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the file, and of what a listener will not understand: also said on standard error."""
    reply = HumModel.reply

    def spelled(self: HumModel, *args: Any, **how: Any) -> Iterator[Any]:
        for sound in reply(self, *args, **how):
            yield replace(sound, notes={"spelled": ["Xu"]}) if sound.text else sound

    monkeypatch.setattr(HumModel, "reply", spelled)
    path = tmp_path / "in.wav"
    said = recording(path, hum("hello"), PAUSE)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match="truncated") as cut:
        code, printed, told = run("talk", said, "-o", str(tmp_path / "out.wav"), "--json")
    note = "spelled, as the model does not know them: Xu"
    assert code == 0 and json.loads(printed)["notes"] == [str(cut[0].message), note]
    assert told == f"mmfast: note: {note}\n"
    spoken = SpeechChat(HumModel())(hum("hello"))
    assert spoken.to_dict()["notes"] == spoken.trace.notes == [note]


def test_a_reply_is_cut_off_where_the_next_turn_begins(run: Run, tmp_path: Path) -> None:
    parts = hum("a b c d e f g h i j k l m n o p q r s t u v"), torch.zeros(8000), hum("no"), PAUSE
    code, printed, _ = run("talk", recording(tmp_path / "i.wav", *parts), "-o",
                           str(tmp_path / "o.wav"), "--json")  # fmt: skip
    first, second = json.loads(printed)["turns"]
    assert code == 0 and first["interrupted"] and not second["interrupted"]
    assert first["heard"].startswith(first["text"]) and first["text"] != first["heard"]
    assert read(load_audio(tmp_path / "o.wav")).startswith(first["text"])


def test_people_read_what_was_heard_and_said(run: Run, tmp_path: Path) -> None:
    said = recording(tmp_path / "in.wav", hum("hello"))
    code, printed, told = run("talk", said, "-o", str(tmp_path / "out.wav"), "--whole")
    assert (code, printed) == (0, "> hello\nhello\n") and "first sound" in told


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "empty"),
        (b"no sound at all" * 50, ""),
        (b"RIFF\x24\x00\x00\x00WAVEfmt ", ""),
        (None, "nobody speaks"),
    ],
    ids=["empty", "text", "cut", "silence"],
)
def test_recordings_that_are_none(run: Run, tmp_path: Path, data: bytes | None, told: str) -> None:
    path = tmp_path / "in.wav"
    if data is None:
        recording(path, PAUSE)
    else:
        path.write_bytes(data)
    code, printed, error = run("talk", str(path), "-o", str(tmp_path / "out.wav"), "--json")
    assert (code, printed) == (2, "")
    assert told in error and error.count("\n") == 1 and error.startswith("mmfast: error")
    assert not (tmp_path / "out.wav").exists()


def test_a_file_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, _, error = run("talk", str(tmp_path / "none.wav"), "-o", str(tmp_path / "o.wav"))
    assert code == 2 and "none.wav" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("pcm", "rate"),
    [
        (hum("yes"), 16000),
        (hum("yes").numpy(), 16000),
        ((hum("yes") * 32767).to(torch.int16).numpy(), 16000),
        (torch.stack([hum("yes")] * 2, dim=1), 16000),
        (torch.stack([hum("yes")] * 6, dim=1).numpy(), 16000),
        (hum("yes") * 3, 16000),
    ],
    ids=["torch", "numpy", "int16", "stereo", "six channels", "too loud"],
)
def test_kinds_of_samples(pcm: Any, rate: int) -> None:
    pipe = SpeechChat(HumModel())
    if float(np.abs(np.asarray(pcm)).max()) < 0.5:
        assert pipe(pcm).heard == "yes"
    else:
        pipe(pcm)  # whatever is understood of it


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000, 192000])
def test_rates(rate: int) -> None:
    pcm = resample(torch.cat([PAUSE, hum("hello"), PAUSE]), 16000, rate)
    events = list(SpeechChat(HumModel()).run(pcm.split(777), rate, ear=HumEar()))
    assert [event.kind for event in events if event.kind == "done"] == ["done"]
    started = next(event.audio_ms for event in events if event.kind == "speech_started")
    assert abs(started - 900) <= 20


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([0.0, float("nan")]), torch.zeros(0), "nowhere.wav", b"not a sound", 5, None],
    ids=["nan", "nothing", "no file", "bytes", "number", "none"],
)
def test_what_is_no_recording(wrong: Any) -> None:
    with pytest.raises(MediaError) as error:
        SpeechChat(HumModel())(wrong)
    assert "\n" not in str(error.value)


def test_ten_milliseconds_and_ten_minutes() -> None:
    pipe = SpeechChat(HumModel())
    assert pipe(torch.zeros(160)).text == ""
    silent = list(pipe.run(torch.zeros(600 * 16000).split(16000), ear=HumEar()))
    assert silent == []


def test_any_text_model_gets_a_voice() -> None:
    def chat(turns: Sequence[Turn]) -> Iterator[str]:
        yield f"{len(turns)} "
        yield turns[-1].text

    pipe = mmfast.pipeline("speech-chat", HumModel(), chat=chat)
    first, second = pipe([hum("one"), hum("two")])
    assert (first.heard, first.text, read(second.pcm)) == ("one", "1 one", "1 two")
    events = list(pipe.run([hum("one"), PAUSE, hum("two"), PAUSE], ear=HumEar()))
    texts = "".join(event.text for event in events if event.kind == "text")
    assert texts == "1 one3 two"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "a NoneType"),
        (5, "an int"),
        (b"yes", "a bytes"),
        (["yes", None], "a NoneType"),
        ({"role": "assistant", "content": "yes"}, "a dict"),
    ],
)
def test_a_text_model_that_gives_no_text_is_named(answer: Any, told: str) -> None:
    """In a conversation it is an event, and the next question is heard."""
    pipe = mmfast.pipeline("speech-chat", HumModel(), chat=lambda turns: answer)
    with pytest.raises(MmfastError, match=f"the answer of chat= has {told}; let it give a text"):
        pipe(hum("one"))
    events = list(pipe.run([hum("one"), PAUSE, hum("two"), PAUSE], ear=HumEar()))
    assert [event.text for event in events if event.kind == "heard"] == ["one", "two"]
    errors = [event.text for event in events if event.kind == "error"]
    assert len(errors) == 2 and all(f"has {told}; let" in error for error in errors)


@pytest.mark.parametrize("wrong", [None, 5, "", " "])
def test_what_a_session_cannot_say(wrong: Any) -> None:
    pipe = SpeechChat(HumModel())
    with pipe.open(ear=HumEar()) as session:
        with pytest.raises(MmfastError, match="nothing to say in"):
            session.say(wrong)
        assert session.stats()["replies"] == 0
    if not isinstance(wrong, str):
        with pytest.raises(MmfastError, match="give pieces of text"):
            mmfast.pipeline("text-to-speech", HumModel()).stream(wrong)


def test_a_saved_conversation_has_whole_numbers() -> None:
    with SpeechChat(HumModel()).open(ear=HumEar()) as session:
        saved = {**session.save(), "next": {"item": "x"}}
        with pytest.raises(MmfastError, match="no saved conversation"):
            session.restore(saved)


def test_listener_and_speaker_may_be_others() -> None:
    class Ears:
        def transcribe(self, pcm: torch.Tensor, rate: int = 16000) -> str:
            return "always this"

    pipe = SpeechChat(chat=lambda turns: turns[-1].text, listener=Ears(), talker=HumModel())
    assert read(pipe(hum("x")).pcm) == "always this"
    with pytest.raises(ModelError, match="cannot listen"):
        SpeechChat(chat=lambda turns: "", listener=object(), talker=HumModel())
    with pytest.raises(ModelError, match="cannot chat by voice"):
        SpeechChat(Ears())
    with pytest.raises(MmfastError, match="called"):
        SpeechChat(HumModel(), chat="hello")  # type: ignore[arg-type]


def test_recordings_may_be_run_as_streams(tmp_path: Path) -> None:
    path = recording(tmp_path / "in.wav", hum("hello"), PAUSE)
    pipe, sound = SpeechChat(HumModel()), load_audio(path)
    pair = sound.numpy(), 16000
    mapping = {"array": resample(sound, 16000, 48000).numpy(), "sampling_rate": 48000}
    held = [pair, pair[::-1], mapping, {"path": path}, sound.tolist(), list(sound.numpy())]
    spoken = Spoken(sound, 16000, "hello")
    for media in (path, Path(path), Path(path).read_bytes(), sound.numpy(), spoken, *held):
        events = list(pipe.run(media, ear=HumEar()))
        assert [event.text for event in events if event.kind == "heard"] == ["hello"]
        assert pipe(media).heard == "hello"
    with pytest.raises(MmfastError, match="unknown ear"):
        pipe.open(ear="left")
    assert speech.ear_of("manual")
