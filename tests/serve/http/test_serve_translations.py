"""`/v1/audio/translations`: each sentence of a recording through the embedded translator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")

from serve_tools import Hum, app_of, client_of, saying, wav

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


def translated(form: str | None = None, model: str = "whisper-1", **options: Any) -> Any:
    async def go() -> Any:
        async with client_of(app_of(saying(), Listener(), **options)) as client:
            files = {"file": ("a.wav", wav(5.0), "audio/wav")}
            data = {"model": model} | ({} if form is None else {"response_format": form})
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
