"""Sessions and the engine: one copy of the weights, one batch, the answers of chat completions."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from openai import AsyncOpenAI
from PIL import Image
from realtime_client import Talk, talking
from realtime_tools import MANUAL

from mmfast.frontends.video.reader import read_video
from mmfast.models.loading import twin
from mmfast.serve.calls import call_schema, read_calls
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine import base
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.guard.shield import uvicorn_options
from mmfast.serve.http.app import create_app
from mmfast.serve.realtime.brain import BrainQuestion, HeardText, SeenTurn
from mmfast.serve.realtime.engine import EngineBrain, EngineVoices, media_of

CLIPS = Path(__file__).parents[3] / "assets" / "clips"
CLIP = CLIPS / "red-circle.mp4"
TEXT = {**MANUAL, "output_modalities": ["text"]}


class Spoken:
    """A voice that is not asked."""

    sample_rate, voices = 16000, ()

    def speak(self, text: Any, **options: Any) -> Iterator[Any]:
        yield from ()

    def transcribe(self, pcm: Any, rate: int = 16000) -> str:
        return "what colour is the circle"


def as_png(frame: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(np.asarray(frame)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server() -> Iterator[SimpleNamespace]:
    config = ServerConfig(demo=False, realtime_sessions=6, slots=8, device="cpu")
    engine = Scheduler(None, slots=8, device="cpu")
    app = create_app(config, executor=engine, voice=Spoken())
    taken = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, **uvicorn_options(config)))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]})
    thread.start()
    url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    yield SimpleNamespace(url=url, engine=engine, app=app)
    running.should_exit = True
    thread.join()


async def shown(talk: Talk, *content: dict[str, Any]) -> str:
    """Create an item and return the answer to it."""
    item = {"type": "message", "role": "user", "content": list(content)}
    number = len(talk.of("response.done")) + 1
    await talk.connection.conversation.item.create(item=item)
    await talk.connection.response.create()
    done = (await talk.event("response.done", number))["response"]
    assert done["status"] == "completed", done["status_details"]
    return str(done["output"][0]["content"][0]["text"])


async def chatted(url: str, *content: dict[str, Any]) -> Any:
    async with AsyncOpenAI(api_key="none", base_url=url) as client:
        messages = [{"role": "user", "content": list(content)}]
        return await client.chat.completions.create(model="mmfast", messages=messages)  # type: ignore[arg-type]


def storages() -> int:
    """Bytes of all parameters of the vision-language class in the process, each storage once."""
    kinds = ("LlavaOnevisionForConditionalGeneration",)
    models = [each for each in gc.get_objects() if type(each).__name__ in kinds]
    tensors = [p for model in models for p in model.parameters()]
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def weights(engine: Scheduler) -> int:
    tensors = engine.pair[0].parameters()
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def test_a_picture_is_answered_as_chat_answers_it(server: Any) -> None:
    frame = read_video(str(CLIP), frames=1).frames[0]
    asked = "What colour is the circle?"

    async def main() -> None:
        picture = {"type": "input_image", "image_url": as_png(frame)}
        async with talking(server.url, hums=False) as talk:
            await talk.connection.session.update(session=TEXT)
            together = await shown(talk, picture, {"type": "input_text", "text": asked})
            usage = talk.of("response.done")[-1]["response"]["usage"]
            # the next question is about the same picture
            again = await shown(talk, {"type": "input_text", "text": "What shape is it?"})
        async with talking(server.url, hums=False) as talk:
            await talk.connection.session.update(session=TEXT)
            item = {"type": "message", "role": "user", "content": [picture]}
            await talk.connection.conversation.item.create(item=item)
            alone = await shown(talk, {"type": "input_text", "text": asked})
        image = {"type": "image_url", "image_url": {"url": as_png(frame)}}
        chat = await chatted(server.url, image, {"type": "text", "text": asked})
        shape = await chatted(server.url, image, {"type": "text", "text": "What shape is it?"})
        text = chat.choices[0].message.content
        assert together == text == alone == "red"
        assert again == shape.choices[0].message.content
        assert usage["input_tokens"] == chat.usage.prompt_tokens
        assert usage["output_tokens"] == chat.usage.completion_tokens
        seen = chat.usage.prompt_tokens_details.image_tokens
        assert usage["input_token_details"]["image_tokens"] == seen > 0

    asyncio.run(main())


def test_frames_are_asked_about_as_a_clip_and_the_servers_specs_hold(server: Any) -> None:
    """The request that a session makes is the one that a clip of these frames makes."""
    clip = read_video(str(CLIP), frames=8)
    config = ServerConfig(device="cpu")
    brain = EngineVoices(server.engine, Spoken(), config).open()
    assert isinstance(brain, EngineBrain)
    for frame, second in zip(clip.frames, clip.times, strict=True):
        brain.see(frame, second)
    request = brain.request(BrainQuestion((SeenTurn("user", "x", (HeardText("which way"),)),)))
    media, text = request.messages[-1].content
    assert isinstance(media, base.Media) and text == "Which way?"
    assert media.shot.kind == "video" and np.array_equal(media.shot.pixels, clip.frames)
    metadata = dict(media.shot.metadata or {})
    stamps = np.array(metadata["frames_indices"]) / metadata["fps"]
    assert np.abs(stamps - np.array(clip.times) + clip.times[0]).max() < 1e-3
    assert request.options == base.Options()  # none of its own: those of the server hold
    other = media_of(
        [(frame, second + 1) for frame, second in zip(clip.frames, clip.times, strict=True)]
    )
    assert other[0].key == media.key and media_of([(clip.frames[0], 0.0)])[0].shot.kind == "image"


def test_sessions_and_chat_are_decoded_in_one_batch(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six answers at once: the gauge of running requests and the rows of a step say so."""
    batch, rows, highest = server.engine._runner.batch, list[tuple[int, set[str]]](), 0
    arrived = threading.Event()
    step, latest = batch.decoder.rounds, time.monotonic() + 30

    def counted(*given: Any, **named: Any) -> Any:
        kinds = {each.id.partition("-")[0] for each in batch.answers}
        rows.append((len(batch.decoder), kinds))
        while not arrived.is_set() and time.monotonic() < latest:
            known = list(server.engine._known.values())  # None while a request is being prepared
            arrived.set() if len(known) == 6 and None not in known else time.sleep(0.002)
        time.sleep(0.02)  # so that all are there at once
        return step(*given, **named)

    monkeypatch.setattr(batch.decoder, "rounds", counted)
    asked = "Which way does the red circle move?"  # nothing is shown: the answers are long

    async def session() -> str:
        async with talking(server.url, hums=False) as talk:
            await talk.connection.session.update(session=TEXT)
            return await shown(talk, {"type": "input_text", "text": asked})

    async def chat() -> str:
        found = await chatted(server.url, {"type": "text", "text": asked})
        return str(found.choices[0].message.content)

    async def watch(over: asyncio.Event) -> int:
        most = 0
        while not over.is_set():
            most = max(most, server.engine.health().running)
            await asyncio.sleep(0.002)
        return most

    async def main() -> None:
        nonlocal highest
        over = asyncio.Event()
        watching = asyncio.create_task(watch(over))
        found = await asyncio.gather(*(session() for _ in range(3)), *(chat() for _ in range(3)))
        over.set()
        highest = await watching
        assert set(found) == {found[0]}

    asyncio.run(main())
    assert highest >= 4
    assert max(count for count, _ in rows) >= 4
    assert any(kinds == {"realtime", "chatcmpl"} for _, kinds in rows)


def test_a_process_holds_the_weights_once(server: Any) -> None:
    async def main() -> None:
        frames = read_video(str(CLIP), frames=12).frames
        async with talking(server.url, hums=False) as talk:
            await talk.connection.session.update(session=TEXT)
            for frame in frames[:3]:
                content = [{"type": "input_image", "image_url": as_png(frame)}]
                item = {"type": "message", "role": "user", "content": content}
                await talk.connection.conversation.item.create(item=item)
            await shown(talk, {"type": "input_text", "text": "What colour is the circle?"})

    gc.collect()
    before = storages()
    asyncio.run(main())
    gc.collect()
    assert storages() == before
    stock, shared = server.engine._runner.model, server.engine.pair[0]
    assert stock is not shared
    for mine, theirs in zip(stock.parameters(), shared.parameters(), strict=True):
        assert mine is theirs
    assert weights(server.engine) <= before


def test_a_stream_watches_with_the_weights_of_the_engine(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More frames than a clip has go into a memory; a model given by name is not read again."""
    config = ServerConfig(model="somewhere", device="cpu", frames=2)
    voices = EngineVoices(server.engine, Spoken(), config)
    read = []
    monkeypatch.setattr("mmfast.models.loading.from_pretrained", lambda *a, **k: read.append(a))
    brain = voices.open()
    assert isinstance(brain, EngineBrain)
    clip = read_video(str(CLIP), frames=5)
    for number, frame in enumerate(clip.frames):
        brain.see(frame, float(number))
    streams = voices.streams()
    assert streams is not None and not read
    assert streams.model is not server.engine._runner.model
    for mine, theirs in zip(
        server.engine._runner.model.parameters(), streams.model.parameters(), strict=True
    ):
        assert mine is theirs
    assert brain.figures()["frames"] == 5
    text = "What colour is the circle?"
    question = BrainQuestion((SeenTurn("user", text, (text,)),), aloud=False)
    assert "".join(sound.text for sound in brain.answer(question)).strip()
    brain.close()


def test_a_stream_answers_by_the_rules_of_the_batch(server: Any) -> None:
    """A call that is asked for is made, a limit is told, and the end has a trace."""
    config = ServerConfig(model="somewhere", device="cpu", frames=2)
    defaults = {"temperature": 5.0, "top_k": 1}  # hot, but of one token alone
    voices = EngineVoices(server.engine, Spoken(), config, defaults=defaults)
    brain = voices.open()
    for number, frame in enumerate(read_video(str(CLIP), frames=3).frames):
        brain.see(frame, float(number))
    asked = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}}
    asked |= {"required": ["colour"], "additionalProperties": False}
    text = "What colour is the circle?"
    turns = (SeenTurn("user", text, (text,)),)
    plain = BrainQuestion(turns, aloud=False)
    said = "".join(sound.text for sound in brain.answer(plain)).strip()
    voices.defaults = {}
    again = BrainQuestion(turns, aloud=False)
    assert said == "".join(sound.text for sound in brain.answer(again)).strip()
    finish = plain.run.finish
    assert finish is not None and finish.reason == "stop" and finish.completion_tokens > 0
    assert [row["stage"] for row in finish.trace["rows"]][-2:] == ["question", "generate"]
    duty = call_schema({"paint": asked})
    call = BrainQuestion(turns, aloud=False, tools=({"name": "paint"},), calls=[], duty=duty)
    assert not "".join(sound.text for sound in brain.answer(call)).strip()
    ((name, arguments),) = read_calls(call.calls[0], ["paint"])
    assert name == "paint" and json.loads(arguments)["colour"] in ("red", "blue")
    short = BrainQuestion(turns, aloud=False, limit=1)
    list(brain.answer(short))
    assert short.run.finish is not None and short.run.finish.reason == "length"
    brain.close()


def test_hooks_of_a_twin_do_not_act_on_the_model(server: Any) -> None:
    stock = server.engine._runner.model
    shared, _ = twin(stock, server.engine._runner.processor)
    calls: list[int] = []
    handle = shared.get_decoder().layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = stock(input_ids=ids).logits
        assert not calls
        assert torch.equal(shared(input_ids=ids).logits, expected) and calls
    handle.remove()


class Slow:
    """An engine that writes until it is cancelled."""

    model = "slow"

    def __init__(self) -> None:
        self.requests: list[base.Request] = []
        self.cancelled: list[str] = []
        self.running: set[str] = set()

    def submit(self, request: base.Request, emit: base.Emit) -> None:
        self.requests.append(request)
        self.running.add(request.id)
        threading.Thread(target=self._write, args=(request, emit), daemon=True).start()

    def _write(self, request: base.Request, emit: base.Emit) -> None:
        for number in range(2000):
            if request.id not in self.running:
                emit(base.CANCELLED)
                return
            emit(base.Delta(f" word{number}"))
            time.sleep(0.01)
        emit(base.Finish("stop", 5, 2000))

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.cancelled.append(request_id)
            self.running.discard(request_id)

    def health(self) -> base.Health:
        return base.Health(True, len(self.running))

    def close(self) -> None:
        self.running.clear()


@pytest.fixture()
def slow() -> Iterator[SimpleNamespace]:
    config, engine = ServerConfig(demo=False, realtime_sessions=4), Slow()
    app = create_app(config, executor=engine, voice=Spoken())
    taken = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, **uvicorn_options(config)))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [taken]})
    thread.start()
    yield SimpleNamespace(
        url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1", engine=engine, app=app
    )
    running.should_exit = True
    thread.join()


def test_a_reply_that_is_cut_off_is_cancelled_at_the_engine(slow: Any) -> None:
    """Also two at once: what waits for the engine holds nobody else up."""

    async def main() -> None:
        async with talking(slow.url, hums=False) as one, talking(slow.url, hums=False) as other:
            for talk in (one, other):
                await talk.connection.session.update(session=TEXT)
                await talk.say("tell me a story")
            for talk in (one, other):
                await talk.event("response.output_text.delta", 3)
            assert len(slow.engine.running) == 2
            await one.connection.response.cancel()
            done = (await one.event("response.done"))["response"]
            assert done["status"] == "cancelled"
            for _ in range(200):
                if slow.engine.cancelled:
                    break
                await asyncio.sleep(0.01)
            assert slow.engine.cancelled == [slow.engine.requests[0].id]
            assert len(slow.engine.running) == 1
            count = len(other.of("response.output_text.delta"))
            await other.event("response.output_text.delta", count + 3)
        for _ in range(200):  # who hangs up leaves nothing behind
            if not slow.engine.running:
                break
            await asyncio.sleep(0.01)
        assert not slow.engine.running

    asyncio.run(main())


def test_limits_of_the_server_bound_an_answer(slow: Any) -> None:
    async def main() -> None:
        async with talking(slow.url, hums=False) as talk:
            await talk.connection.session.update(session=TEXT)
            await talk.say("tell me a story")
            await talk.event("response.output_text.delta")
            await talk.connection.response.cancel()
            await talk.event("response.done")
            await talk.connection.response.create(response={"max_output_tokens": 4096})
            await talk.event("response.created", 2)
            await talk.event("response.output_text.delta", 2)
            await talk.connection.response.cancel()
            await talk.event("response.done", 2)

    asyncio.run(main())
    config = slow.app.state.service.config
    first, second = slow.engine.requests
    assert first.sampling.max_tokens == config.default_tokens
    assert second.sampling.max_tokens == config.max_tokens
