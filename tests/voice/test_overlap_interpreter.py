"""Two speakers at once, translated each for themselves: planted streams, sound, command, server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import cli_runs
import numpy as np
import pytest
import torch
from torch import Tensor

import mmfast
from mmfast.core.errors import MediaError, MmfastError, ModelError, SpecError
from mmfast.decoding.serialised import CHANGE, TimedWord, serialise_channels, split_channels
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.speech.overlap import RATE, HeardWindow, OverlapEar, SpeakerWord
from mmfast.models.translation import load_translator
from mmfast.pipelines import recognition
from mmfast.pipelines.speech import stream_of
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


@cache
def translator(name: str | None = None) -> Any:
    return load_translator(name)


def said(ear: Any, policy: str) -> list[Translated]:
    model = translator("tiny-interleaved" if policy[0] == "i" else None)
    session = OverlapInterpreter(ear, model, policy)
    chunks = torch.zeros(7 * RATE).split(RATE // 10)
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
    """Neither hears the other; sentences end by themselves."""
    pieces = said(PlantedEar(both), policy)
    assert sum(word.text == CHANGE for word in both) > 4
    assert joined(pieces, 0) == " ".join(VELDA) and joined(pieces, 1) == VELDA[1]
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
        ({"speakers": 3, "model": "/none"}, MmfastError, "speakers=3 is not allowed; give 1 or 2"),
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


@pytest.fixture
def planted(both: list[TimedWord], monkeypatch: pytest.MonkeyPatch) -> SpeechTranslation:
    """A pipeline with the planted ear."""
    monkeypatch.setattr(recognition, "load_overlap", lambda *_: PlantedEar(both))
    pipe: SpeechTranslation = mmfast.pipeline("speech-translation", translator(), speakers=2)
    return pipe


def test_no_clip_of_two_is_spoken(planted: SpeechTranslation, tmp_path: Any) -> None:
    with pytest.raises(MmfastError, match="speakers=2 speaks no clips"):
        planted.dub(tmp_path / "a.mp4", tmp_path / "b.mp4")


def test_command_of_two(
    planted: SpeechTranslation,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[dict[str, Any]]()
    monkeypatch.setattr("mmfast.pipelines.pipeline", lambda *_, **how: given.append(how) or planted)
    path = str(tmp_path / "two.wav")
    write_sound(path, torch.zeros(7 * RATE), RATE)
    run = lambda *argv: cli_runs.run(capsys, "translate", path, *argv)
    lines = " ".join(VELDA), VELDA[1]
    assert run("--speakers", "2", "--policy", "offline")[:2] == (0, "\n".join((*lines, "")))
    code, out, _ = run("--speakers", "2", "--stream")
    assert code == 0 and out.startswith("1: ronda") and "\n2: peter" in out
    assert json.loads(run("--speakers", "2", "--json")[1])["speakers"] == [*lines]
    assert [how["speakers"] for how in given] == [2, 2, 2]
    code, out, error = run("--speakers", "2", "--out", "b.mp4")
    assert code == 2 and not out and "--speakers parts the voices" in error


def test_a_stream_takes_chunks_of_any_kind(
    both: list[TimedWord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As recordings are: a microphone gives integers, in channels, as arrays."""
    heard = list[Tensor]()

    class Heard(PlantedEar):
        def stream(self, chunks: Any, rate: int = RATE, **_: Any) -> Any:
            heard.extend(chunks)
            return iter(())

    monkeypatch.setattr(recognition, "load_overlap", lambda *_: Heard(both))
    pipe = mmfast.pipeline("speech-to-text", speakers=2)
    whole = np.arange(8, dtype=np.int16) * 1000
    list(pipe.stream([whole, np.stack([whole, whole]), [0.5] * 3]))
    wanted = torch.from_numpy(whole / 32768).float()
    assert torch.equal(heard[0], wanted) and torch.equal(heard[1], wanted)
    assert heard[2].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("chunks", "rate", "part"),
    [
        (None, RATE, "NoneType is no stream of sound"),
        (3, RATE, "int is no stream"),
        ([torch.zeros(10)], "a", "'a' is no sampling rate"),
        ([torch.zeros(10)], None, "None is no sampling rate"),
    ],
)
def test_what_is_no_stream_is_one_line(chunks: Any, rate: Any, part: str) -> None:
    """Of `speech-chat`, `speech-to-text` and `omni-chat`."""
    with pytest.raises(MediaError, match=part) as caught:
        stream_of(chunks, rate)
    assert "\n" not in str(caught.value)


def test_a_session_of_two_takes_chunks_of_any_kind(planted: SpeechTranslation) -> None:
    session = planted.open("offline")
    found = [*session.push(np.zeros((2, 7 * RATE), np.int16)), *session.finish()]
    assert joined(found, 1) == VELDA[1]
    for wrong in (None, "a", torch.zeros(1, 2, 10)):
        with pytest.raises(MediaError, match="the chunk"):
            planted.open().push(wrong)


def asked_of(ear: Any, *asked: dict[str, str]) -> list[Any]:
    """Answers of a server with such an ear for two to requests with these fields."""
    from serve_tools import Hum, app_of, client_of, saying, wav

    async def go() -> list[Any]:
        app = app_of(saying(), Hum())
        service = app.state.service
        service._pair = type(service._pair)(ear)
        service._translator = type(service._translator)(translator)
        async with client_of(app) as client:
            return [
                await client.post(
                    "/v1/audio/translations",
                    files={"file": ("a.wav", wav(7.0), "audio/wav")},
                    data={"model": "whisper-1", "speakers": "2", **each},
                )
                for each in asked
            ]

    return asyncio.run(go())


def test_server_translates_two(both: list[TimedWord]) -> None:
    pytest.importorskip("fastapi")
    lines = [f"1: {VELDA[0]}", f"2: {VELDA[1]}", f"1: {VELDA[1]}"]
    verbose, told, srt, wrong = asked_of(
        lambda: PlantedEar(both),
        {"response_format": "verbose_json"},
        {"stream": "true"},
        {"response_format": "srt"},
        {"speakers": "3"},
    )
    found = verbose.json()
    rows = [(row["speaker"], row["text"], row["start"], row["end"]) for row in found["segments"]]
    assert found["text"] == "\n".join(lines)
    assert rows[0] == (1, lines[0], 0.0, 1.5) and rows[2] == (1, lines[2], 3.4, 5.0)
    events = [json.loads(line[6:]) for line in told.text.split("\n") if line[:6] == "data: "]
    assert "".join(each.get("delta", "") for each in events) == events[-1]["text"]
    assert events[-1]["text"] == "\n".join(lines)
    assert f"00:00:01,500\n{lines[0]}\n" in srt.text and wrong.status_code == 400
    (silent,) = asked_of(lambda: PlantedEar([]), {})
    assert silent.status_code == 200 and silent.json()["text"] == ""


def test_server_whose_listener_parts_nobody(tmp_path: Any) -> None:
    pytest.importorskip("fastapi")
    from mmfast.serve.config import ServerConfig
    from mmfast.serve.http.service import _ear_for_two

    config = ServerConfig(listener=str(tmp_path / "whisper"))
    (wrong,) = asked_of(lambda: _ear_for_two(config), {})
    error = wrong.json()["error"]
    assert wrong.status_code == 400 and error["param"] == "speakers"
    assert "\n" not in error["message"] and str(tmp_path) not in error["message"], error
