"""OpenAI's own client against a real server on this machine, with the embedded models."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("fastapi")
pytest.importorskip("openai")

import openai
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from serve_tools import MODEL, app_of, data_url, image_part, running, sound_part, text, user

CLIPS = Path(__file__).resolve().parents[3] / "assets" / "clips"
KEY = "sk-test"
QUESTION = "Which way does the red circle move?"
QUESTIONS = (QUESTION, "How many objects are there?")  # "left", "2"


def clip_part(name: str = "red-circle.mp4") -> dict[str, Any]:
    url = data_url((CLIPS / name).read_bytes(), "video/mp4")
    return {"type": "video_url", "video_url": {"url": url}}


def strict(model: Any, value: Any) -> None:
    """As the client's own types have it; the client itself would take anything."""
    from openai._models import validate_type

    validate_type(type_=model, value=json.loads(value.model_dump_json(exclude_unset=True)))


@pytest.fixture(scope="module")
def voice() -> Any:
    from mmfast.voice.models import load_voice

    return load_voice(None)


@pytest.fixture(scope="module")
def client(engine: Any, voice: Any) -> Iterator[Any]:
    app = app_of(engine, voice, api_keys=(KEY,), max_tokens=64, decode_queue=32)
    with (
        running(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as made,
    ):
        made.app = app
        yield made


def ask(client: Any, *content: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=user(*content), **{"max_tokens": 16, **options}
    )


def test_models(client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == MODEL and client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_a_clip_is_answered_right_with_its_trace(client: Any) -> None:
    rows = json.loads((CLIPS / "clips.json").read_text())["red-circle.mp4"]
    right = 0
    for row in rows:
        reply = ask(client, clip_part(), text(row["question"]))
        right += reply.choices[0].message.content.strip() == row["answer"]
    strict(ChatCompletion, reply)
    assert right >= 0.75 * len(rows)  # it is a small model, but no coin
    trace = reply.model_extra["mmfast"]
    assert trace["visual_tokens"] == reply.usage.prompt_tokens_details.image_tokens
    assert reply.usage.prompt_tokens > trace["visual_tokens"] > 0
    assert {row["stage"] for row in trace["rows"]} >= {"prefill"}


def test_the_trace_says_what_the_embedded_model_was_not_trained_on(client: Any) -> None:
    inside = ask(client, clip_part(), text(QUESTION)).model_extra["mmfast"]
    own = ask(client, clip_part(), text("Could you tell if the circle is red?"))
    noise = np.random.default_rng(1).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    picture = io.BytesIO()
    Image.fromarray(noise).save(picture, "PNG")
    outside = ask(client, image_part(picture.getvalue()), text(QUESTION)).model_extra["mmfast"]
    alone = ask(client, text("Hello?")).model_extra["mmfast"]
    assert "notes" not in inside and "notes" not in own.model_extra["mmfast"]
    assert "this image is outside" in outside["notes"][0]
    assert len(alone["notes"]) == 1 and "without an image or a clip" in alone["notes"][0]


def test_fewer_tokens_by_extra_body(client: Any) -> None:
    full = ask(client, clip_part(), text(QUESTION))
    less = ask(client, clip_part(), text(QUESTION), extra_body={"mmfast": {"reduce": "evs:0.25"}})
    kept = less.model_extra["mmfast"]["kept_tokens"]
    assert kept == 0.25 * full.model_extra["mmfast"]["kept_tokens"]
    assert less.choices[0].message.content == full.choices[0].message.content == "left"
    with pytest.raises(openai.BadRequestError, match="did you mean 'evs'"):
        ask(client, clip_part(), text(QUESTION), extra_body={"mmfast": {"reduce": "evz:0.25"}})


def test_a_stream_says_the_same(client: Any) -> None:
    content = (clip_part(), text("Where is the red circle at the end?"))
    whole = ask(client, *content)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(ask(client, *content, **options))
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert not chunks[-1].choices and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_the_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(clip_part(), text(QUESTION)), max_tokens=16
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "left"
    assert ("content.delta" in kinds and kinds[-1] == "chunk") or "content.done" in kinds


def test_an_image_is_answered_as_by_the_pipeline(client: Any) -> None:
    from PIL import Image

    import mmfast
    from mmfast.frontends.video.reader import read_video

    file = io.BytesIO()
    frame = read_video(CLIPS / "red-circle.mp4", frames=8).frames[3]
    Image.fromarray(frame).save(file, "PNG")
    question = "What colour is the circle?"
    expected = mmfast.pipeline("image-qa", device="cpu")(file.getvalue(), question).text
    reply = ask(client, image_part(file.getvalue()), text(question))
    assert reply.choices[0].message.content.strip() == expected


def test_a_spoken_question_is_answered(client: Any) -> None:
    spoken = client.audio.speech.create(
        model="mmfast-tiny-speech", voice="alloy", response_format="wav",
        input="which way does the red circle move",
    ).content  # fmt: skip
    reply = ask(client, clip_part(), sound_part(spoken))
    assert reply.model_extra["mmfast"]["heard"] == [QUESTION]
    assert reply.choices[0].message.content.strip() == "left"
    assert reply.usage.model_extra["transcribed"]["sounds"] == 1


def test_speech_streams_and_is_understood(client: Any, voice: Any) -> None:
    from mmfast.frontends.audio.reader import load_audio

    with client.audio.speech.with_streaming_response.create(
        model="tts-1",
        voice="nova",
        response_format="flac",
        input="The red circle moves to the left.",
    ) as reply:
        parts = list(reply.iter_bytes(1024))
    pcm = load_audio(io.BytesIO(b"".join(parts)), 16_000)
    assert len(parts) > 1 and "red circle" in voice.transcribe(pcm)
    with pytest.raises(openai.BadRequestError, match="unknown voice"):
        client.audio.speech.create(model="tts-1", voice="nobody", input="Hello.")


def test_errors_have_the_clients_types(client: Any) -> None:
    stranger = client.with_options(api_key="sk-other")
    with pytest.raises(openai.AuthenticationError) as refused:
        ask(stranger, "Hello?")
    assert refused.value.code == "invalid_api_key" and refused.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=user("Hello?"))
    for more, param in (({"n": 0}, "n"), ({"temperature": 9}, "temperature")):
        with pytest.raises(openai.BadRequestError) as wrong:
            ask(client, "Hello?", **more)
        assert wrong.value.param == param
    with pytest.raises(openai.BadRequestError, match="data: URLs"):
        ask(client, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, text("?"))


def test_a_stream_that_is_left_is_cancelled(client: Any, engine: Any) -> None:
    reply = ask(client, "Hello?", stream=True, max_tokens=64)
    next(iter(reply))
    reply.close()
    deadline = time.monotonic() + 30
    while engine.health().running + engine.health().waiting and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engine.health().running == engine.health().waiting == 0


def test_many_at_once_none_is_lost(client: Any) -> None:
    """64 at once on 4 places and 12 to wait in: an answer or 429 with Retry-After."""
    made = openai.AsyncOpenAI(
        base_url=str(client.base_url), api_key=KEY, max_retries=0, timeout=120
    )

    async def one(number: int) -> str:
        question, stream = QUESTIONS[number % 2], number % 4 < 2
        try:
            reply: Any = await made.chat.completions.create(
                model=MODEL,
                messages=user(clip_part(), text(question)),
                stream=stream,
                max_tokens=8,
            )
            if not stream:
                return str(reply.choices[0].message.content)
            return "".join([c.choices[0].delta.content or "" async for c in reply])
        except openai.RateLimitError as error:
            assert int(error.response.headers["retry-after"]) >= 1
            return "429"

    async def go() -> list[str]:
        async with made:
            return await asyncio.gather(*(one(number) for number in range(64)))

    found = asyncio.run(go())
    assert set(found[0::2]) <= {"left", "429"} and set(found[1::2]) <= {"2", "429"}  # none mixed up
    assert 16 <= len(found) - found.count("429") < 64
    assert ask(client, clip_part(), text(QUESTION)).choices[0].message.content == "left"


def test_metrics_count_every_request(client: Any) -> None:
    value = client.app.state.service.metrics.value
    counters = {
        "answers": lambda: value("mmfast_ttft_seconds_count"),
        "dropped": lambda: (
            value("mmfast_tokens_total", when="before") - value("mmfast_tokens_total", when="after")
        ),
        "refused": lambda: value("mmfast_rejected_total", reason="auth"),
        "speech": lambda: value("mmfast_requests_total", route="/v1/audio/speech", status="200"),
        "first sound": lambda: value("mmfast_first_audio_seconds_count", source="speech"),
    }
    before = {name: count() for name, count in counters.items()}
    ask(client, clip_part(), text(QUESTION), extra_body={"mmfast": {"reduce": "evs:0.25"}})
    client.audio.speech.create(model="tts-1", voice="alloy", input="Hello.").read()
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="sk-other"), "Hello?")
    deadline = time.monotonic() + 10  # a request counts when its last byte has left the server
    while not all(count() > before[name] for name, count in counters.items()):
        after = {name: count() for name, count in counters.items()}
        assert time.monotonic() < deadline, (before, after)
        time.sleep(0.01)


def test_sound_as_events_is_base64(client: Any) -> None:
    with client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="onyx", response_format="pcm", input="Hello.", stream_format="sse"
    ) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert events[-1]["type"] == "speech.audio.done"
    assert all(base64.b64decode(each["audio"]) for each in events[:-1])


def test_a_recording_of_two_sentences_in_every_format(client: Any, voice: Any) -> None:
    """Two sentences with silence around them: each has its place, and is what is said there."""
    pytest.importorskip("silero_vad")
    import torch

    from mmfast.frontends.audio.reader import load_audio
    from mmfast.frontends.audio.wav import write_wav

    said, quiet, parts, places = ("which way does it move", "hello"), torch.zeros(24_000), [], []
    for sentence in said:
        made = client.audio.speech.create(
            model="tts-1", voice="alloy", input=sentence, response_format="wav"
        )
        pcm = load_audio(io.BytesIO(made.read()), 16_000)
        parts += [quiet, pcm]
        end = sum(map(len, parts)) / 16_000
        places.append((end - len(pcm) / 16_000, end))
    file = io.BytesIO()
    write_wav(file, torch.cat([*parts, quiet]), 16_000)

    def ask(**more: Any) -> Any:
        given = ("a.wav", file.getvalue(), "audio/wav")
        return client.audio.transcriptions.create(model="whisper-1", file=given, **more)

    found = ask(response_format="verbose_json", timestamp_granularities=["segment"])
    assert len(found.segments) == 2
    for segment, (start, end) in zip(found.segments, places, strict=True):
        assert abs(segment.start - start) < 0.5 and abs(segment.end - end) < 0.5
    assert found.duration == pytest.approx(places[-1][1] + 1.5, abs=0.01)
    assert found.text == " ".join(each.text for each in found.segments)
    assert ask(response_format="vtt").count(" --> ") == 2
    assert all(each.text in ask(response_format="srt") for each in found.segments)
    *deltas, last = list(ask(stream=True))
    assert "".join(each.delta for each in deltas) == last.text == found.text
    with pytest.raises(openai.BadRequestError, match="segment"):
        ask(response_format="verbose_json", timestamp_granularities=["word"])
