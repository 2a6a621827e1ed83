"""Two speakers at once, translated each for themselves: planted streams, sound, command, server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import cli_runs
import pytest
import torch
from torch import Tensor

import mmfast
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.decoding.serialised import CHANGE, TimedWord, serialise_channels, split_channels
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.speech.overlap import RATE, HeardWindow, OverlapEar, SpeakerWord
from mmfast.models.translation import load_translator
from mmfast.pipelines.translation import SpeechTranslation
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.speech.text import EspeakVoice
from mmfast.voice.interpreter import OverlapInterpreter, Translated, joined

FIRST, SECOND = "the red circle moves left", "peter has two black stars"
VELDA = ("ronda ruva levo mira", "peter stelan nokan du hava")
EVERY = 0.3  # seconds between two words of one speaker


class PlantedEar(OverlapEar):
    """Writes a stream of words with marks of change down, each word when it ends."""

    def __init__(self, stream: list[TimedWord]) -> None:
        self.stream_of_words = stream

    def open(self, chunk: float = 1.0, context: float = 2.0) -> Any:
        return PlantedSession(self.stream_of_words)


class PlantedSession:
    def __init__(self, stream: list[TimedWord]) -> None:
        channels = enumerate(split_channels(stream))
        words = [SpeakerWord(i, word.text, word.at) for i, own in channels for word in own]
        self.words, self.pushed = sorted(words, key=lambda word: word.at), 0.0

    def push(self, pcm: Tensor) -> Iterator[HeardWindow]:
        self.pushed += len(pcm) / RATE
        due = [word for word in self.words if word.at <= self.pushed]
        self.words = self.words[len(due) :]
        yield HeardWindow(due, self.pushed, self.pushed)

    def finish(self) -> Iterator[HeardWindow]:
        yield from ()


def timed(text: str, start: float) -> list[TimedWord]:
    return [TimedWord(word, start + EVERY * i) for i, word in enumerate(text.split(), 1)]


def said(ear: Any, policy: str, seconds: float = 9.0, model: str | None = None) -> list[Translated]:
    session = OverlapInterpreter(ear, load_translator(model), policy)
    chunks = torch.zeros(int(seconds * RATE)).split(RATE // 10)
    return [*(p for chunk in chunks for p in session.push(chunk)), *session.finish()]


@pytest.fixture(scope="module")
def both() -> list[TimedWord]:
    """Two sentences at once, and the first speaker's second one two seconds later."""
    first = [*timed(FIRST, 0.0), *timed(SECOND, 3.5)]
    return serialise_channels([first, timed(SECOND, 0.4)])


@pytest.mark.parametrize("policy", ["offline", "confidence:0.99", "interleaved:1"])
def test_each_speaker_has_the_translation_of_their_own_words(
    both: list[TimedWord], policy: str
) -> None:
    """The translator's words for what each says alone: neither hears the other."""
    model = "tiny-interleaved" if policy[0] == "i" else None
    whole = load_translator(model).translate([FIRST, SECOND])
    pieces = said(PlantedEar(both), policy, model=model)
    assert sum(word.text == CHANGE for word in both) > 4
    assert joined(pieces, 0) == " ".join(whole) and joined(pieces, 1) == whole[1]
    assert [p.heard for p in pieces if p.final] == [FIRST, SECOND, SECOND]
    assert [p.span for p in pieces if p.final and p.speaker == 0] == [
        (pytest.approx(0.3), pytest.approx(1.5)),
        (pytest.approx(3.8), pytest.approx(5.0)),
    ]
    ends = [p.at for p in pieces if p.final]  # a silence and a word behind their last words
    assert ends == pytest.approx([2.8, 3.3, 6.3], abs=0.11)
    early = [p for p in pieces if not p.final]
    assert bool(early) == (policy != "offline")
    if early:
        assert early[0].at < 1.5 and {p.speaker for p in early} == {0, 1}


def test_a_mark_that_is_lost_mixes_the_speakers(both: list[TimedWord]) -> None:
    lost = [word for word in both if word.text != CHANGE]
    pieces = said(PlantedEar(lost), "offline")
    assert not joined(pieces, 1) and joined(pieces, 0).split()[:4] != VELDA[0].split()


@pytest.fixture(scope="module")
def pipe() -> SpeechTranslation:
    return mmfast.pipeline("speech-translation", speakers=2)


@pytest.fixture(scope="module")
def sound() -> Tensor:
    """Two voices, one behind the other; the embedded ear hears them as they are."""
    parts = (FIRST, "en-us+m3"), (SECOND, "en-us+f2")
    first, second = (say(f"{text}.", EspeakVoice(voice)).pcm for text, voice in parts)
    return torch.cat([first, torch.zeros(RATE // 4), second])


def test_two_voices_through_the_embedded_models(pipe: SpeechTranslation, sound: Tensor) -> None:
    found = pipe((sound.numpy(), RATE))
    assert found.speakers == VELDA and found.text == "\n".join(VELDA)
    assert found.heard == f"{FIRST}\n{SECOND}" and not found.unknown
    assert 0 < found.lag < found.seconds
    told = found.to_dict()
    assert told["speakers"] == [*VELDA] and {p["speaker"] for p in told["pieces"]} == {0, 1}
    assert {row.stage for row in found.trace.rows} == {"listen", "translate"}
    nothing = pipe((torch.zeros(RATE).numpy(), RATE))
    assert nothing.text == nothing.heard == "" and nothing.lag == 0 and nothing.speakers == ()


def test_a_stream_of_two_is_the_recording_however_it_is_cut(
    pipe: SpeechTranslation, sound: Tensor
) -> None:
    whole = pipe((sound.numpy(), RATE)).pieces
    broken = torch.cat([sound, torch.full((RATE,), torch.nan)])
    session = pipe.open()
    for size in (999, 40_000):
        assert tuple(pipe.stream(iter(sound.split(size)))) == whole
        pieces = [p for part in broken.split(size) for p in session.push(part)]
        assert joined([*pieces, *session.finish()], 1) == VELDA[1]  # and the session begins anew
        assert session.finish() == []


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"speakers": 3}, MmfastError, "speakers=3 is not allowed; give 1 or 2"),
        ({"speakers": True}, MmfastError, "speakers=True"),
        ({"speakers": 2, "listener": object()}, MmfastError, "not of object"),
        ({"speakers": 2, "listener": "assets/models/tiny-video"}, ModelError, "speech"),
        ({"speakers": 2, "every": 0.0}, SpecError, "every=0.0: give seconds from 0.05 to 12"),
        ({"speakers": 2, "context": 13}, SpecError, "context=13"),
        ({"speakers": 2, "context": "1"}, SpecError, "context='1'"),
        ({"context": 1.0}, MmfastError, "of speakers=2"),
        ({"every": "soon"}, SpecError, "every='soon'"),
        ({"speakers": 2, "dtype": "float16"}, MmfastError, "takes no dtype"),
    ],
)
def test_what_two_speakers_do_not_have_is_one_line(
    options: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind, match=part) as caught:
        mmfast.pipeline("speech-translation", **options)
    assert "\n" not in str(caught.value)


def test_no_clip_of_two_is_spoken(pipe: SpeechTranslation, tmp_path: Any) -> None:
    with pytest.raises(MmfastError, match="speakers=2 speaks no clips"):
        pipe.dub(tmp_path / "a.mp4", tmp_path / "b.mp4")


def test_command_of_two(
    pipe: SpeechTranslation,
    sound: Tensor,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[dict[str, Any]]()
    monkeypatch.setattr("mmfast.pipelines.pipeline", lambda *_, **how: given.append(how) or pipe)
    path = str(tmp_path / "two.wav")
    write_sound(path, sound, RATE)
    run = lambda *argv: cli_runs.run(capsys, "translate", path, *argv)
    assert run("--speakers", "2")[:2] == (0, "\n".join((*VELDA, "")))
    code, out, _ = run("--speakers", "2", "--stream")
    assert code == 0 and [line.strip() for line in out.splitlines()] == [
        f"{i}: {text}" for i, text in enumerate(VELDA, 1)
    ]
    assert json.loads(run("--speakers", "2", "--json")[1])["speakers"] == [*VELDA]
    assert [how["speakers"] for how in given] == [2, 2, 2]
    code, out, error = run("--speakers", "2", "--out", "b.mp4")
    assert code == 2 and not out and "--speakers parts the voices" in error


def translated(ear: Any, **data: str) -> Any:
    from serve_tools import Hum, app_of, client_of, saying, wav

    async def go() -> Any:
        app = app_of(saying(), Hum())
        if ear is not None:
            app.state.service._pair = type(app.state.service._pair)(lambda: ear)
        async with client_of(app) as client:
            files = {"file": ("a.wav", wav(9.0), "audio/wav")}
            asked = {"model": "whisper-1", **data}
            return await client.post("/v1/audio/translations", files=files, data=asked)

    return asyncio.run(go())


def test_server_translates_two(both: list[TimedWord]) -> None:
    pytest.importorskip("fastapi")
    ear = PlantedEar(both)
    lines = [f"1: {VELDA[0]}", f"2: {VELDA[1]}", f"1: {VELDA[1]}"]
    assert translated(ear, speakers="2").json()["text"] == "\n".join(lines)
    found = translated(ear, speakers="2", response_format="verbose_json").json()
    rows = [(row["speaker"], row["text"], row["start"], row["end"]) for row in found["segments"]]
    assert rows[0] == (1, lines[0], 0.0, 1.5) and rows[2] == (1, lines[2], 3.4, 5.0)
    told = translated(ear, speakers="2", stream="true").text.split("\n")
    events = [json.loads(line[6:]) for line in told if line.startswith("data: ")]
    assert "".join(each.get("delta", "") for each in events) == events[-1]["text"]
    assert events[-1]["text"] == "\n".join(lines)
    srt = translated(ear, speakers="2", response_format="srt").text
    assert f"00:00:01,500\n{lines[0]}\n" in srt
    silent = translated(PlantedEar([]), speakers="2")
    assert silent.status_code == 400 and "no word was understood" in silent.text
    assert translated(None, speakers="3").status_code == 400


def test_server_whose_listener_parts_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    pytest.importorskip("fastapi")
    from mmfast.serve.config import ServerConfig
    from mmfast.serve.http.service import _ear_for_two

    with pytest.raises(ModelError) as caught:
        _ear_for_two(ServerConfig(listener=str(tmp_path / "whisper")))
    assert "\n" not in str(caught.value)

    def refuse() -> Any:
        raise ModelError("has no ear for two speakers")

    from mmfast.serve.http import service

    monkeypatch.setattr(service, "_ear_for_two", lambda config: refuse())
    wrong = translated(None, speakers="2")
    error = wrong.json()["error"]
    assert wrong.status_code == 400 and error["param"] == "speakers"
    assert "has no ear for two speakers" in error["message"]
