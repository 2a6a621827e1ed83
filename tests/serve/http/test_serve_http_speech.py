"""`/v1/audio/speech` and `/v1/audio/transcriptions`: formats, voices, streams, who leaves."""

from __future__ import annotations

import asyncio
import base64
import datetime
import io
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from serve_tools import Hum, app_of, client_of, events_of, running, saying, wav

from mmfast.voice.ear import EarEvent

TEXT = "the red circle moves left"  # half a second of hum
SPEECH = "/v1/audio/speech"


def say(speaker: Hum, **more: Any) -> Any:
    document = {"model": "tts-1", "input": TEXT, "voice": "alloy", **more}

    async def go() -> Any:
        async with client_of(app_of(saying(), speaker)) as client:
            return await client.post(SPEECH, json=document)

    return asyncio.run(go())


def samples(data: bytes, kind: str) -> tuple[np.ndarray[Any, Any], int]:
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32768, 24_000
    from mmfast.frontends.audio.reader import load_audio

    return load_audio(io.BytesIO(data), 16_000).numpy(), 16_000


@pytest.mark.parametrize("kind", ["wav", "pcm", "flac", "mp3", "opus", "aac"])
def test_every_format_holds_the_same_sound(kind: str) -> None:
    reply = say(Hum(), response_format=kind)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("audio/")
    pcm, rate = samples(reply.content, kind)
    assert abs(len(pcm) / rate - 0.5) < 0.15  # lossy formats pad
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm))))
    assert abs(spectrum.argmax() * rate / len(pcm) - 400) < 5
    assert 0.3 < np.abs(pcm).max() < 0.6


@pytest.mark.parametrize(("kind", "rate"), [("opus", 22_050), ("opus", 44_100), ("mp3", 96_000)])
def test_a_talker_may_speak_at_a_rate_that_a_format_lacks(kind: str, rate: int) -> None:
    """VITS speaks at 22,050 and Dia at 44,100 samples per second, and Opus has neither."""
    talker = Hum()
    talker.sample_rate = rate
    reply = say(talker, response_format=kind)
    assert reply.status_code == 200, reply.text
    pcm, out = samples(reply.content, kind)
    assert abs(len(pcm) / out - 8000 / rate) < 0.15
    spectrum = np.abs(np.fft.rfft(pcm * np.hanning(len(pcm))))
    assert abs(spectrum.argmax() * out / len(pcm) - 400 * rate / 16_000) < 12


def test_lossless_formats_are_exact() -> None:
    wav, _ = samples(say(Hum(), response_format="wav").content, "wav")
    flac, _ = samples(say(Hum(), response_format="flac").content, "flac")
    assert len(wav) == 8000 and np.array_equal(wav, flac)


def test_mp3_unless_told_otherwise() -> None:
    assert say(Hum()).headers["content-type"] == "audio/mpeg"


def test_voices_by_both_names_and_speed() -> None:
    for name, expected in (("alloy", "low"), ("echo", "high"), ("low", "low"), ("NOVA", "low")):
        voice = Hum()
        assert say(voice, voice=name).status_code == 200
        assert voice.options == {"voice": expected}, name
    voice = Hum()
    assert say(voice, speed=1.2).status_code == 200 and voice.options["rate"] == 198
    assert say(Hum(), speed=1.0).status_code == 200


def test_wrong_requests_say_what_is_wrong() -> None:
    for more, status, param in (
        ({"voice": "nobody"}, 400, "voice"),
        ({"speed": 3.0}, 400, "speed"),
        ({"speed": 9.0}, 400, "speed"),
        ({"input": ""}, 400, "input"),
        ({"input": "…"}, 400, "input"),
        ({"input": "a" * 5000}, 400, "input"),
        ({"response_format": "midi"}, 400, "response_format"),
        ({"model": "whisper"}, 404, "model"),
    ):
        reply = say(Hum(), **more)
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (status, param), (more, error)
    assert say(Hum(), inptu="x").headers["x-mmfast-ignored"] == "inptu"


def test_events_hold_the_same_sound() -> None:
    reply = say(Hum(), response_format="pcm", stream_format="sse")
    found = events_of(reply.text)
    assert found[-1]["type"] == "speech.audio.done"
    parts = [base64.b64decode(each["audio"]) for each in found[:-1]]
    assert len(parts) > 2 and b"".join(parts) == say(Hum(), response_format="pcm").content


def test_what_is_left_out_of_a_text_is_named() -> None:
    class Latin(Hum):
        def left_out(self, text: str) -> list[str]:
            return [word for word in text.split() if not word.isascii()]

    text = f"{TEXT} \u65e5 \u672c"
    assert say(Latin(), input=text).headers["x-mmfast-left-out"] == "\\u65e5, \\u672c"
    done = events_of(say(Latin(), input=text, stream_format="sse").text)[-1]
    assert done == {"type": "speech.audio.done", "left_out": ["\u65e5", "\u672c"]}
    for plain in (say(Latin()), say(Hum(), input=text)):
        assert plain.status_code == 200 and "x-mmfast-left-out" not in plain.headers


def test_sound_comes_before_the_text_is_over_and_who_leaves_stops_it() -> None:
    import httpx

    voice, document = Hum(), {"model": "tts-1", "input": "word " * 400, "voice": "low"}
    app = app_of(saying(), voice)
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", SPEECH, json={**document, "response_format": "pcm"}) as reply:
            first = next(reply.iter_raw())
            voice.go_on.clear()
            assert reply.status_code == 200 and len(first) > 1000
        said = voice.pieces
        assert said < 400  # the rest was never made
        deadline = time.monotonic() + 30
        while app.state.service.parts["speech"] and time.monotonic() < deadline:
            time.sleep(0.01)
        voice.go_on.set()
        again = client.post(SPEECH, json={**document, "input": "two words"})
        assert again.status_code == 200 and voice.pieces <= said + 5


def test_too_many_at_once_are_told_to_wait() -> None:
    voice = Hum()
    voice.go_on.clear()
    document = {"model": "tts-1", "input": TEXT, "voice": "low"}

    async def go() -> list[Any]:
        app = app_of(saying(), voice)
        async with client_of(app) as client:
            asking = [asyncio.ensure_future(client.post(SPEECH, json=document)) for _ in range(12)]
            while sum(each.done() for each in asking) < 2:
                await asyncio.sleep(0.01)
            voice.go_on.set()
            return await asyncio.gather(*asking)

    codes = [reply.status_code for reply in asyncio.run(go())]
    assert sorted(codes) == [200] * 10 + [429] * 2


def test_a_server_without_voice_says_so() -> None:
    async def go() -> Any:
        async with client_of(app_of(saying())) as client:
            return await client.post(SPEECH, json={"model": "tts-1", "input": "a", "voice": "a"})

    reply = asyncio.run(go())
    assert reply.status_code == 404 and reply.json()["error"]["code"] == "no_voice"


# --- recordings, written down ---------------------------------------------------------------------

WRITE = "/v1/audio/transcriptions"
SAID = ("which way does it move", "to the left", "")
TIMES = ((0.5, 1.25), (2.0, 3.5), (4.0, 4.5))


class TimedEar:
    """Finds turns of known times; their loudness tells which."""

    def hear(self, pcm: torch.Tensor) -> list[EarEvent]:
        return []

    def flush(self) -> list[EarEvent]:
        return [
            EarEvent("stopped", int(end * 16_000), torch.full((int((end - start) * 16_000),), i))
            for i, (start, end) in enumerate(TIMES)
        ]


class Scribe(Hum):
    def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
        return SAID[int(pcm[0])]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.http import speech

    monkeypatch.setattr(speech, "VoiceEar", TimedEar)


def strict(name: str, value: Any) -> None:
    """As OpenAI's own types have it."""
    audio = pytest.importorskip("openai.types.audio")
    from openai._models import validate_type

    validate_type(type_=getattr(audio, name), value=value)


def write_down(voice: Any, seconds: float = 5.0, cut: int = 0, **form: Any) -> Any:
    async def go() -> Any:
        async with client_of(app_of(saying(), voice)) as client:
            sound = wav(seconds)
            files = {"file": ("a.wav", sound[: len(sound) - cut], "audio/wav")}
            return await client.post(WRITE, files=files, data={"model": "whisper-1", **form})

    return asyncio.run(go())


@pytest.mark.parametrize("form", [{}, {"response_format": "text"}])
def test_a_statement_is_not_written_down_as_a_question(form: dict[str, str]) -> None:
    class Teller(Hum):
        def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
            return "the red circle moves left"

    reply = write_down(Teller(), 0.5, **form)
    text = reply.text.strip() if form else reply.json()["text"]
    assert text == "the red circle moves left"


@pytest.mark.usefixtures("timed")
def test_a_recording_in_formats_with_times() -> None:
    found = write_down(Scribe(), response_format="verbose_json").json()
    strict("TranscriptionVerbose", found)
    assert (found["language"], found["duration"]) == ("english", 5.0)
    assert [(each["start"], each["end"]) for each in found["segments"]] == list(TIMES[:2])
    assert [each["text"] for each in found["segments"]] == [
        "Which way does it move?",
        "to the left",
    ]
    assert [each["id"] for each in found["segments"]] == [0, 1]
    assert found["text"] == "Which way does it move? to the left"
    assert write_down(Scribe(), response_format="srt").text == (
        "1\n00:00:00,500 --> 00:00:01,250\nWhich way does it move?\n\n"
        "2\n00:00:02,000 --> 00:00:03,500\nto the left\n"
    )
    assert write_down(Scribe(), response_format="vtt").text == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:01.250\nWhich way does it move?\n\n"
        "00:00:02.000 --> 00:00:03.500\nto the left\n"
    )


def test_no_time_lies_before_the_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ear tells when a turn ends in whole milliseconds, and holds all of its samples."""
    from mmfast.serve.http import speech

    class Rounding(TimedEar):
        def flush(self) -> list[EarEvent]:
            return [EarEvent("stopped", 31_984, torch.full((31_999,), 0.1))]

    monkeypatch.setattr(speech, "VoiceEar", Rounding)
    times = {"srt": "00:00:00,000 --> 00:00:02,000", "vtt": "00:00:00.000 --> 00:00:02.000"}
    for form, line in times.items():
        assert line in write_down(Hum("yes"), 2.0, response_format=form).text.splitlines()
    (found,) = write_down(Hum("yes"), 2.0, response_format="verbose_json").json()["segments"]
    assert (found["start"], found["end"]) == (0.0, 2.0)


@pytest.mark.usefixtures("timed")
def test_a_transcript_is_streamed() -> None:
    reply = write_down(Scribe(), stream="true")
    assert reply.headers["content-type"].startswith("text/event-stream")
    *deltas, last = events_of(reply.text)
    strict("TranscriptionTextDoneEvent", last)
    assert len(deltas) == 2 and {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in deltas) == last["text"]
    assert last["text"] == "Which way does it move? to the left"

    class Broken(Scribe):
        def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
            if pcm[0] == 1:
                raise RuntimeError("/secret")
            return super().transcribe(pcm, rate)

    first, error = events_of(write_down(Broken(), stream="true").text)
    assert first["delta"] == "Which way does it move?" and "secret" not in str(error["error"])


@pytest.mark.parametrize("form", [{}, {"response_format": "verbose_json"}, {"stream": "true"}])
def test_what_was_not_heard_of_a_recording_is_noted(form: dict[str, str]) -> None:
    for cut in (0, 999):
        reply = write_down(Hum("yes"), 1.5, cut, **form)
        found = events_of(reply.text)[-1] if "stream" in form else reply.json()
        noted = found.get("mmfast", {"notes": []})["notes"]
        assert found["text"] == "yes" and ["shorter" in note for note in noted] == [True] * bool(
            cut
        )


@pytest.mark.parametrize("form", ["text", "srt", "vtt"])
def test_what_was_not_heard_is_noted_in_a_header_where_a_form_has_no_room(form: str) -> None:
    said = write_down(Hum("yes"), 1.5, 999, response_format=form)
    assert "shorter" in said.headers["x-mmfast-notes"] and "yes" in said.text
    assert "x-mmfast-notes" not in write_down(Hum("yes"), 1.5, response_format=form).headers


def test_sound_without_turns_is_one_segment_and_silence_has_no_word() -> None:
    found = write_down(Hum("yes"), 1.5, response_format="verbose_json").json()
    assert [(each["start"], each["end"]) for each in found["segments"]] == [(0, 1.5)]
    silent = lambda **form: write_down(Hum(""), 1.5, **form)
    for form in ("json", "verbose_json"):
        assert silent(response_format=form).json()["text"] == ""
    assert silent(response_format="verbose_json").json()["segments"] == []
    for form, text in {"text": "\n", "srt": "\n", "vtt": "WEBVTT\n"}.items():
        assert silent(response_format=form).text == text
    assert events_of(silent(stream="true").text) == [{"type": "transcript.text.done", "text": ""}]


@pytest.mark.parametrize(
    ("form", "names"),
    [
        ({"response_format": "srd"}, ["'srd'", "'srt'"]),
        ({"response_format": "diarized_json"}, ["json, srt, text, verbose_json, vtt"]),
        ({"response_format": "vtt", "stream": "true"}, ["'vtt'", "json, text", "stream"]),
        ({"timestamp_granularities[]": "word"}, ["'word'", "segment"]),
    ],
)
def test_what_a_transcript_cannot_be_is_refused(form: dict[str, str], names: list[str]) -> None:
    reply = write_down(Hum(), **form)
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400 and "\n" not in message
    assert all(name in message for name in names), message


def test_fields_of_a_recording_without_effect_are_named() -> None:
    reply = write_down(
        Hum(), prompt="x", temperature="0.5", **{"timestamp_granularities[]": "segment"}
    )
    assert reply.headers["x-mmfast-ignored"] == "prompt, temperature"


@given(st.integers(0, 360_000_000))
def test_clocks_of_subtitles(ms: int) -> None:
    from mmfast.voice.dubbing import clock as clock_of

    whole, rest = divmod(ms, 1000)
    clock = str(datetime.timedelta(seconds=whole % 3600)).rjust(8, "0")[3:]
    for mark in (",", "."):  # of SRT and of WebVTT
        assert clock_of(ms / 1000, mark) == f"{whole // 3600:02}:{clock}{mark}{rest:03}"


# --- listeners and talkers by name ---


def test_a_listener_and_a_talker_are_asked_for_by_their_names() -> None:
    class Reader(Hum):
        def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
            return "to the left"

    async def go(**options: Any) -> tuple[list[str], list[int]]:
        app = app_of(saying(), Reader(), **options)
        async with client_of(app) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            codes = []
            for name in ("whisper-small", "csm-1b", "mmfast-tiny-speech"):
                files = {"file": ("a.wav", wav(0.5), "audio/wav")}
                reply = await client.post(WRITE, files=files, data={"model": name})
                codes.append(reply.status_code)
            spoken = {"model": "csm-1b", "input": TEXT, "voice": "alloy"}
            codes.append((await client.post(SPEECH, json=spoken)).status_code)
        return [each["id"] for each in listed], codes

    named = {"listener": "openai/whisper-small", "talker": "sesame/csm-1b"}
    names, codes = asyncio.run(go(**named))
    assert names[1:] == ["csm-1b", "whisper-small"] and codes == [200, 404, 404, 200]
    names, codes = asyncio.run(go())
    assert names[1:] == ["mmfast-tiny-speech"] and codes == [404, 404, 200, 404]


def test_the_server_joins_a_listener_with_the_voice_of_another(tmp_path: Path) -> None:
    from listener_models import BUILDERS, noise

    from mmfast.serve.config import ServerConfig
    from mmfast.serve.http.service import _voice
    from mmfast.voice.models import load_voice

    folder = BUILDERS["parakeet_ctc"](tmp_path)
    voice = _voice(ServerConfig(listener=folder, device="cpu"))
    (sound,) = noise(16000)
    assert voice.transcribe(sound) == load_voice(folder, "cpu").transcribe(sound) != ""
    assert voice.voices and next(voice.speak("one two three")).rate == voice.sample_rate


@pytest.mark.filterwarnings("ignore")
def test_a_talker_of_transformers_speaks_and_does_not_listen(tmp_path: Path) -> None:
    from talker_models import vits

    from mmfast.voice.models import load_voice

    for speakers in (3, 1):
        (tmp_path / str(speakers)).mkdir()
        talker = load_voice(vits(tmp_path / str(speakers), num_speakers=speakers), "cpu", "float32")
        (sound,) = talker.speak(TEXT, **({"voice": "2"} if speakers == 3 else {}))
        reply = say(talker, voice="2" if speakers == 3 else "nobody", response_format="wav")
        pcm, _ = samples(reply.content, "wav")
        wanted = (sound.pcm.clamp(-1, 1) * 32768).round() / 32768
        assert np.allclose(pcm, wanted.numpy(), atol=2 / 32768)
    assert say(talker, response_format="wav", speed=0.5).status_code == 200
    assert say(load_voice(str(tmp_path / "3"), "cpu"), voice="/etc/passwd").status_code == 400

    async def listen() -> Any:
        async with client_of(app_of(saying(), talker)) as client:
            files, form = {"file": ("a.wav", wav())}, {"model": "whisper-1"}
            return await client.post("/v1/audio/transcriptions", files=files, data=form)

    reply = asyncio.run(listen())
    assert reply.status_code in (400, 404, 501)
    assert "cannot listen" in reply.json()["error"]["message"]
