"""`/v1/audio/translations`: each sentence of a recording through the embedded translator."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from serve_tools import Hum, app_of, client_of, running, saying, wav

from mmfast.models.translation import load_translator
from mmfast.serve.config import ServerConfig
from mmfast.serve.http import speech
from mmfast.voice.ear import EarEvent

SAID = ("the red circle moves left", "the big green square moves right", "")
TIMES = ((0.5, 1.25), (2.0, 3.5), (4.0, 4.5))


class TwoSentences:
    """Finds turns of known times; their loudness tells which."""

    def hear(self, pcm: torch.Tensor) -> list[EarEvent]:
        return []

    def flush(self) -> list[EarEvent]:
        return [
            EarEvent("stopped", int(end * 16_000), torch.full((int((end - start) * 16_000),), i))
            for i, (start, end) in enumerate(TIMES)
        ]


class Listener(Hum):
    def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
        return SAID[int(pcm[0])]


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "VoiceEar", TwoSentences)


def translated(
    form: str | None = None, model: str = "whisper-1", stream: bool = False, **options: Any
) -> Any:
    async def go() -> Any:
        async with client_of(app_of(saying(), Listener(), **options)) as client:
            files = {"file": ("a.wav", wav(5.0), "audio/wav")}
            data = {"model": model} | ({} if form is None else {"response_format": form})
            data |= {"stream": "true"} if stream else {}
            return await client.post("/v1/audio/translations", files=files, data=data)

    return asyncio.run(go())


def test_every_format_holds_the_translation_of_each_sentence() -> None:
    first, second = load_translator().translate([*SAID[:2]])
    assert first and second and first != second and first != SAID[0]
    assert translated().json()["text"] == translated("json").json()["text"] == f"{first} {second}"
    assert translated("text").text == f"{first} {second}\n"
    assert translated("srt").text == (
        f"1\n00:00:00,500 --> 00:00:01,250\n{first}\n\n2\n00:00:02,000 --> 00:00:03,500\n{second}\n"
    )
    assert translated("vtt").text.startswith(f"WEBVTT\n\n00:00:00.500 --> 00:00:01.250\n{first}")
    found = translated("verbose_json").json()
    assert (found["task"], found["language"], found["duration"]) == ("translate", "velda", 5.0)
    assert [(row["start"], row["end"], row["text"]) for row in found["segments"]] == [
        (*TIMES[0], first),
        (*TIMES[1], second),
    ]
    audio = pytest.importorskip("openai.types.audio")
    from openai._models import validate_type

    validate_type(type_=audio.TranslationVerbose, value=found)


def test_a_stream_gives_each_sentence_as_it_is_translated() -> None:
    first, second = load_translator().translate([*SAID[:2]])
    found = translated(stream=True)
    assert found.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in found.text.split("\n") if line.startswith("data: ")]
    assert [(e["type"], e.get("delta")) for e in events] == [
        ("transcript.text.delta", first),
        ("transcript.text.delta", f" {second}"),
        ("transcript.text.done", None),
    ]
    assert events[-1]["text"] == f"{first} {second}"
    wrong = translated("srt", stream=True)
    assert wrong.status_code == 400 and "with stream" in wrong.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # in the newest client
def test_the_stock_client_over_a_real_connection() -> None:
    openai = pytest.importorskip("openai")
    first, second = load_translator().translate([*SAID[:2]])
    app = app_of(saying(), Listener())
    with running(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        asked = {"model": "whisper-1", "file": ("a.wav", wav(5.0))}
        ask = client.audio.translations
        assert ask.create(**asked).text == f"{first} {second}"
        told = ask.create(**asked, response_format="verbose_json")
        assert (told.language, [row.text for row in told.segments]) == ("velda", [first, second])
        assert ask.create(**asked, response_format="text") == f"{first} {second}\n"
        with ask.with_streaming_response.create(**asked, extra_body={"stream": True}) as stream:
            lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
        assert (
            json.loads(lines[0])["delta"] == first and json.loads(lines[1])["delta"][1:] == second
        )
        with pytest.raises(openai.NotFoundError, match="tiny-translate"):
            ask.create(model="gpt-9", file=asked["file"])


def test_wrong_requests_are_told() -> None:
    assert translated(model="tiny-translate").status_code == 200
    wrong = translated(model="gpt-9")
    assert wrong.status_code == 404 and "tiny-translate" in wrong.json()["error"]["message"]
    wrong = translated("subtitles")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_format"


def test_the_translator_is_an_option(tmp_path: Any) -> None:
    assert ServerConfig(translator="Helsinki-NLP/opus-mt-en-de").translator is not None
    named = translated(model="opus", translator=str(tmp_path / "opus"))
    assert named.status_code == 503  # and no path of the server is told
    message = named.json()["error"]["message"]
    assert "cannot load model" in message and "\n" not in message and str(tmp_path) not in message
