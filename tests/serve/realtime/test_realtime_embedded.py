"""The embedded models behind the whole server, asked by the official client: seen, said, heard."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import uvicorn
from PIL import Image
from realtime_client import Talk, talking
from realtime_tools import MANUAL, packed

import mmfast
from mmfast.frontends.video.reader import read_video
from mmfast.pipelines.omni_chat import written
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.shield import uvicorn_options
from mmfast.serve.http.app import create_app
from mmfast.serve.realtime.brain import GREETING
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.suites import SuiteCase, suite

CLIP = Path(__file__).parents[3] / "assets" / "clips" / "red-circle.mp4"
QUESTION = "what colour is the circle?"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = ServerConfig(demo=False, realtime_sessions=2)
    app = create_app(config)
    taken = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **uvicorn_options(config)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    app.state.service.start().result()  # a client waits ten seconds for its handshake
    yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


def as_png(frame: object) -> str:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")  # type: ignore[arg-type]
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_what_was_seen_is_asked_by_voice(url: str) -> None:
    frames = list(read_video(str(CLIP), frames=6).frames)

    async def watch(talk: Talk) -> None:
        for time, frame in enumerate(frames):
            await talk.connection.send(
                {
                    "type": "mmfast.input_image_buffer.append",
                    "image": as_png(frame),
                    "time": time,
                }
            )

    async def main() -> tuple[str, str, str]:
        async with talking(url, model="mmfast", hums=False) as talk:
            await talk.connection.session.update(
                session={
                    "type": "realtime",
                    "audio": {"input": {"transcription": {"model": "own"}}},
                }
            )
            await watch(talk)
            question = torch.cat([torch.zeros(8000), say(QUESTION).pcm, torch.zeros(12800)])
            await talk.speak(packed(question))
            done = (await talk.event("response.done"))["response"]
            kind = "conversation.item.input_audio_transcription.completed"
            heard = (await talk.event(kind))["transcript"]
            assert done["status"] == "completed" and done["mmfast"]["first_audio_ms"] > 0
            assert done["usage"]["input_token_details"]["image_tokens"] > 0
            assert talk.of("response.output_audio.delta")
            started = talk.of("input_audio_buffer.speech_started")[0]["audio_start_ms"]
            stopped = talk.of("input_audio_buffer.speech_stopped")[0]["audio_end_ms"]
            assert 100 <= started <= 600 and stopped - started > 1000
            spoken = done["output"][0]["content"][0]["transcript"]
            await talk.connection.session.update(session={**MANUAL, "output_modalities": ["text"]})
            await talk.say(written(heard))
            typed = (await talk.event("response.done", 2))["response"]["output"][0]["content"][0]
            return heard, spoken, typed["text"]

    heard, spoken, typed = asyncio.run(main())
    answer = mmfast.pipeline("video-qa")(frames, written(heard)).text
    assert typed.strip() == answer.strip() and typed.strip()
    assert spoken.split() == answer.lower().split()


def test_pictures_in_a_row_are_a_clip(url: str) -> None:
    cases = [case for case in suite(16, 2) if case.kind in ("direction", "speed", "first")][:4]

    async def ask(case: SuiteCase) -> str:
        async with talking(url, model="gpt-realtime", hums=False) as talk:
            await talk.connection.session.update(session={**MANUAL, "output_modalities": ["text"]})
            for frame in read_video(case.media[0], frames=8).frames:
                content = [{"type": "input_image", "image_url": as_png(frame)}]
                item = {"type": "message", "role": "user", "content": content}
                await talk.connection.conversation.item.create(item=item)
            await talk.say(case.question)
            done = (await talk.event("response.done"))["response"]
            assert done["mmfast"]["frames"]["seen"] == 8
            return str(done["output"][0]["content"][0]["text"]).strip()

    async def greeting() -> str:
        async with talking(url, hums=False) as talk:
            await talk.connection.session.update(session={**MANUAL, "output_modalities": ["text"]})
            await talk.connection.response.create()
            done = (await talk.event("response.done"))["response"]
            return str(done["output"][0]["content"][0]["text"])

    clips = mmfast.pipeline("video-qa")
    for case in cases:
        assert asyncio.run(ask(case)) == clips(case.media[0], case.question).text.strip()
    assert asyncio.run(greeting()) == GREETING


def test_who_interrupts_the_embedded_voice(url: str) -> None:
    async def main() -> None:
        async with talking(url, model="mmfast", hums=False) as talk:
            question = torch.cat([torch.zeros(8000), say(QUESTION).pcm, torch.zeros(12800)])
            await talk.speak(packed(question))
            await talk.event("response.created")
            await talk.speak(packed(say("no wait stop").pcm))
            done = (await talk.event("response.done"))["response"]
            assert done["status"] in ("cancelled", "completed")
            await talk.speak(packed(torch.zeros(16000)))
            done = (await talk.event("response.done", 2))["response"]
            assert done["status"] == "completed", done["status_details"]
            assert len(talk.of("input_audio_buffer.committed")) >= 2

    asyncio.run(main())
