"""`/v1/audio/speech`: formats, voices, streams, listeners that leave."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from serve_tools import Hum, app_of, client_of, events_of, running, saying

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
