"""Benchmark of `/v1/realtime`: the time to the first sound, and to silence after an interruption.

Sound comes as from a microphone, through a real socket, to the embedded models.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import frozen, quantile
from mmfast.ops.audio import resample
from mmfast.serve.config import ServerConfig

QUESTIONS, SEED, SESSIONS = 8, 5, (1, 4)
STORY = "The red circle moves to the left. The blue square moves up. The green ring stays. " * 3
BLOCK = 0.032  # seconds of sound a message


@benchmark("serve", "realtime")
def realtime_rows(tick: Tick) -> list[Row]:
    """Measure replies and interruptions of one client, and of several at once."""
    from mmfast.bench.suites.speech.quality import unseen_questions
    from mmfast.models.speech.embedded import load_speech
    from mmfast.serve.http.service import load_engine
    from mmfast.serve.realtime.brain import ChatterVoices
    from mmfast.serve.realtime.engine import EngineVoices
    from mmfast.tiny.speech.recordings import say
    from mmfast.voice.models import Cascade

    speech: Any = load_speech()
    asked = [say(each.text, each.voice).pcm for each in unseen_questions(QUESTIONS, SEED)]
    story = ChatterVoices(Cascade(speech, lambda turns: STORY, speech))
    config = ServerConfig()
    engine = load_engine(config)
    omni = EngineVoices(engine, speech, config)
    found: list[Row] = []
    for job, voices, probe in (("reply", omni, _replies), ("barge-in", story, _interruptions)):
        for sessions in SESSIONS:
            with frozen():
                figures = measure(voices, sessions, asked, probe)
            found.append({"job": job, "sessions": sessions, **_row(figures)})
            tick(f"{job}, {sessions} sessions", len(found), 2 * len(SESSIONS))
    engine.close()
    return found


def measure(voices: Any, sessions: int, asked: list[Tensor], probe: Any) -> list[Row]:
    """Measure every question of every session, all sessions at once."""
    from mmfast.serve.realtime.service import RealtimeService

    service = RealtimeService(ServerConfig(realtime_sessions=sessions), lambda: voices)

    async def main(url: str) -> list[Row]:
        parts = [asked[i::sessions] for i in range(sessions)]
        async with asyncio.timeout(500):
            found = await asyncio.gather(*(_session(url, part, probe) for part in parts))
        return [figures for each in found for figures in each]

    with listening(service) as url:
        return asyncio.run(main(url.replace("http", "ws") + "/realtime"))


@contextmanager
def listening(service: Any) -> Iterator[str]:
    """Run a server with this one route in a thread; yield its address."""
    import uvicorn
    from fastapi import FastAPI, WebSocket

    from mmfast.serve.guard.shield import uvicorn_options
    from mmfast.serve.realtime.socket import realtime

    async def talk(websocket: WebSocket) -> None:
        await realtime(websocket, service)

    app = FastAPI()
    talk.__annotations__ = {"websocket": WebSocket}  # not imported at the top of the module
    app.add_api_websocket_route("/v1/realtime", talk)
    taken = socket.create_server(("127.0.0.1", 0))
    options = uvicorn_options(service.config)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
        service.close()


class _RealtimeClient:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.times: dict[str, list[float]] = {}
        self.work: dict[str, list[float]] = {}  # of this process, server included
        self._news = asyncio.Condition()

    async def listen(self) -> None:
        async for message in self._connection:
            now, kind = time.perf_counter(), json.loads(message)["type"]
            async with self._news:
                self.times.setdefault(kind, []).append(now)
                self.work.setdefault(kind, []).append(time.process_time())
                self._news.notify_all()

    async def send(self, type: str, **fields: Any) -> float:
        await self._connection.send(json.dumps({"type": type, **fields}))
        return time.perf_counter()

    async def hear(self, pcm: Tensor) -> None:
        samples = (resample(pcm, 16000, 24000) * 32767).round().to(torch.int16).numpy()
        audio = base64.b64encode(samples.tobytes()).decode()
        await self.send("input_audio_buffer.append", audio=audio)

    def count(self, kind: str) -> int:
        return len(self.times.get(kind, ()))

    async def event(self, kind: str, count: int) -> float:
        async with self._news:
            await self._news.wait_for(lambda: self.count(kind) >= count)
        return self.times[kind][count - 1]


async def _session(url: str, asked: list[Tensor], probe: Any) -> list[Row]:
    from websockets.asyncio.client import connect

    async with connect(f"{url}?model=mmfast", max_size=None) as connection:
        client = _RealtimeClient(connection)
        task = asyncio.create_task(client.listen())
        try:
            await client.event("session.created", 1)
            return [await probe(client, pcm, number + 1) for number, pcm in enumerate(asked)]
        finally:
            task.cancel()


async def _replies(client: _RealtimeClient, pcm: Tensor, number: int) -> Row:
    """Measure push to talk: from the end of the question to the first sound of the answer."""
    off = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
    await client.send("session.update", session=off)
    before = client.count("response.output_audio.delta")
    await client.hear(pcm)
    await client.send("input_audio_buffer.commit")
    asked, work = await client.send("response.create"), time.process_time()
    done = await client.event("response.done", number)
    if client.count("response.output_audio.delta") == before:
        return {}  # an empty answer: the question was not understood
    first = client.times["response.output_audio.delta"][before]
    worked = client.work["response.output_audio.delta"][before] - work  # of all sessions together
    row = {"first_audio_ms": 1e3 * (first - asked), "first_audio_cpu_ms": 1e3 * worked}
    return {**row, "whole_ms": 1e3 * (done - asked)}


async def _interruptions(client: _RealtimeClient, pcm: Tensor, number: int) -> Row:
    """Measure speech during an answer to its end; `told_ms` is the part from `speech_started`."""
    done = client.count("response.done")
    sounds = client.count("response.output_audio.delta")
    await client.hear(torch.cat([pcm, torch.zeros(16000)]))
    await client.event("response.output_audio.delta", sounds + 1)
    noticed = client.count("input_audio_buffer.speech_started")
    began = time.perf_counter()
    for block in pcm.split(round(16000 * BLOCK)):
        await client.hear(block)
        await asyncio.sleep(BLOCK)
        if client.count("input_audio_buffer.speech_started") > noticed:
            break
    started = await client.event("input_audio_buffer.speech_started", noticed + 1)
    over = await client.event("response.done", done + 1)
    await client.send("input_audio_buffer.clear")
    if over < started:
        return {}  # the answer had ended before
    return {"barge_in_ms": 1e3 * (over - began), "told_ms": 1e3 * (over - started)}


def _row(figures: list[Row]) -> Row:
    kept = [each for each in figures if each]
    found: Row = {"n": len(kept), "left_out": len(figures) - len(kept), "seed": SEED}
    for name in dict.fromkeys(name for each in kept for name in each):
        values = [each[name] for each in kept]
        found[name] = round(statistics.median(values), 2)
        found[name.replace("_ms", "_p95_ms")] = round(quantile(values, 0.95), 2)
    score = found.get("first_audio_ms", found.get("barge_in_ms"))
    shared = {"clock": "wall", "threads": torch.get_num_threads(), "device": "cpu"}
    return {"score": score, **found, **shared}
