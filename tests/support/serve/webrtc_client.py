"""A client of calls in this process: it says what it is given, and keeps what it hears."""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import aioice.ice
import aiortc.rtcrtpreceiver
import httpx
import numpy as np
import pytest
import torch
from aiortc import (
    MediaStreamTrack,
    RTCConfiguration,
    RTCPeerConnection,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, VideoFrame
from realtime_tools import ANSWER, FastLoop, HumBrain, HumVoices, LoopClock, News
from serve_tools import Hum, app_of, saying
from tone_models import HumEar
from torch import Tensor

from mmfast.ops.audio import resample
from mmfast.serve.realtime.service import RealtimeService, SessionLimits

RATE, FRAME = 48_000, 960
QUESTION = "what is it?"


class WaitingLoop(FastLoop):
    """Has a time of its own, which stands still while a thread works: packets take no time."""

    def __init__(self) -> None:
        self.working, self.queues = 0, list[Any]()
        super().__init__()
        self._selector: Any
        self._selector.__class__ = _WaitingSelector

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self.working += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._less)
        return future

    def _less(self, _: Any) -> None:
        self.working -= 1

    async def shutdown_default_executor(self, *given: Any) -> None:
        self.working += 1
        await super().shutdown_default_executor(*given)
        self.working -= 1

    @property
    def busy(self) -> bool:
        return self.working > 0 or any(each.unfinished_tasks for each in self.queues)


class _WaitingSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        while not events and timeout != 0 and self._loop.busy:
            events = super().select(1.0)
        if not events:
            if timeout is None:
                raise TimeoutError("nothing can ever happen any more: this is a hang")
            self._loop.seconds += max(timeout, 0.0)
        return events


class _Decoder(threading.Thread):
    """The thread of a decoder, of which the loop knows when it works."""

    def __init__(self, target: Any, name: str, args: Any) -> None:
        loop, queue, *rest = args
        loop.queues.append(queue)
        super().__init__(target=target, name=name, args=(loop, _Counted(queue, loop), *rest))


class _Counted:
    def __init__(self, queue: Any, loop: Any) -> None:
        self._queue, self._loop, self._taken = queue, loop, False

    def get(self) -> Any:
        if self._taken:
            self._queue.task_done()
            self._loop.call_soon_threadsafe(lambda: None)
        item = self._queue.get()
        self._taken = item is not None
        if item is None:
            self._queue.task_done()
        return item


def call(main: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end in a time of its own, with addresses of this machine alone."""
    threads = SimpleNamespace(Thread=_Decoder, Event=threading.Event)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=WaitingLoop) as runner:
        patch.setattr(aiortc.rtcrtpreceiver, "threading", threads)
        # a machine without a network has no other address
        patch.setattr(aioice.ice, "get_host_addresses", lambda **_: ["127.0.0.1"])
        return runner.run(main)


class Listener(HumBrain):
    """Keeps what it hears."""

    def hear(self, pcm: Tensor) -> str:
        self.voices.heard.append(pcm)  # type: ignore[attr-defined]
        return QUESTION


class Voices(HumVoices):
    def __init__(self, answer: str = ANSWER, sees: bool = True) -> None:
        super().__init__(lambda *_: answer)
        self.heard, self.sees, self.brains = list[Tensor](), sees, list[Listener]()

    def open(self) -> Listener:
        self.brains.append(Listener(self))
        self.brains[-1].sees = self.sees
        return self.brains[-1]


def app_with(voices: Voices, limits: SessionLimits | None = None, **options: Any) -> Any:
    app = app_of(saying(), Hum(), **options)
    service = app.state.service
    service.parts["realtime"] = RealtimeService(
        service.config,
        lambda: voices,
        limits=limits or SessionLimits(),
        ear=lambda _: HumEar(0.3),
        clock=LoopClock(),
        stopping=lambda: service.stopping,
    )
    return app


def realtime(app: Any) -> RealtimeService:
    found = app.state.service.parts["realtime"]
    assert isinstance(found, RealtimeService)
    return found


class Microphone(MediaStreamTrack):
    """Sound in real time, silence where there is nothing to say."""

    kind = "audio"

    def __init__(self) -> None:
        super().__init__()
        self._left, self._at, self._began = np.zeros(0, np.int16), 0, 0.0

    def say(self, pcm: Tensor, rate: int = 16_000) -> None:
        found = (resample(pcm, rate, RATE).clamp(-1, 1) * 32767).round().to(torch.int16).numpy()
        self._left = np.concatenate([self._left, found])

    async def recv(self) -> Any:
        now = asyncio.get_running_loop().time()
        self._began = self._began or now
        await asyncio.sleep(max(self._began + self._at / RATE - now, 0.0))
        out = np.zeros(FRAME, np.int16)
        part, self._left = self._left[:FRAME], self._left[FRAME:]
        out[: len(part)] = part
        frame = AudioFrame.from_ndarray(out[None], format="s16", layout="mono")
        frame.sample_rate, frame.time_base, frame.pts = RATE, Fraction(1, RATE), self._at
        self._at += FRAME
        return frame


class Camera(MediaStreamTrack):
    """Ten pictures a second: those given, then the last of them."""

    kind = "video"

    def __init__(self, pictures: Sequence[Any] = ()) -> None:
        super().__init__()
        self._pictures = list(pictures) or [np.full((48, 64, 3), 200, np.uint8)]
        self._at = 0

    async def recv(self) -> Any:
        await asyncio.sleep(0.1)
        number = min(self._at // 9_000, len(self._pictures) - 1)
        frame = VideoFrame.from_ndarray(self._pictures[number], format="rgb24")
        frame.pts, frame.time_base = self._at, Fraction(1, 90_000)
        self._at += 9_000
        return frame


class Phone(News):
    """One call: the server hears `mic.say`; `heard` is its sound so far."""

    url = ""  # of the call

    def __init__(self, camera: Camera | None = None, channel: bool = True) -> None:
        super().__init__(patience=30.0)
        self.peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.mic, self.frames = Microphone(), list[Any]()
        self.peer.addTrack(self.mic)
        if camera is not None:
            self.peer.addTrack(camera)
        self.channel = self.peer.createDataChannel("oai-events") if channel else None
        self.open, self._tasks = asyncio.Event(), list[asyncio.Task[None]]()
        self.peer.on("track", lambda t: self._tasks.append(asyncio.ensure_future(self._hear(t))))
        if self.channel is not None:
            self.channel.on("message", self._came)
            self.channel.on("open", self.open.set)

    def _came(self, text: str) -> None:
        self.came(json.loads(text))
        self._tasks.append(asyncio.ensure_future(self.tell()))

    async def _hear(self, track: Any) -> None:
        while True:
            try:
                frame = await track.recv()
            except MediaStreamError:
                return
            pcm = frame.to_ndarray().reshape(-1, 2)[:, 0]
            self.frames.append((asyncio.get_running_loop().time(), pcm))

    @property
    def heard(self) -> Tensor:
        """What has sounded so far, at 16 kHz."""
        pcm = np.concatenate([np.zeros(0, np.int16), *[pcm for _, pcm in self.frames]])
        return resample(torch.from_numpy(pcm.astype(np.float32)) / 32768, RATE, 16_000)

    def loud(self, since: float = 0.0) -> list[float]:
        """Times of the frames that are no silence."""
        return [at for at, pcm in self.frames if at >= since and np.abs(pcm).max() > 500]

    async def offer(self) -> str:
        await self.peer.setLocalDescription()
        return str(self.peer.localDescription.sdp)

    async def connect(self, answer: str) -> None:
        await self.peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        if self.channel is not None:
            async with asyncio.timeout(20):
                await self.open.wait()

    def send(self, type: str, **fields: Any) -> None:
        assert self.channel is not None
        self.channel.send(json.dumps({"type": type, **fields}))

    async def close(self) -> None:
        await self.peer.close()
        await asyncio.gather(*self._tasks)


async def offered() -> str:
    """An offer of a client that goes away."""
    phone = Phone()
    offer = await phone.offer()
    await phone.close()
    return offer


@asynccontextmanager
async def exchange(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application with its lifespan, and a client of it."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    async with app.router.lifespan_context(app), client:
        yield client


@asynccontextmanager
async def calling(client: httpx.AsyncClient, **given: Any) -> AsyncIterator[Phone]:
    """A call that has come about; `headers` and so on are those of the request."""
    phone = Phone(given.pop("camera", None), given.pop("channel", True))
    try:
        reply = await dialled(client, await phone.offer(), **given)
        assert reply.status_code == 201, reply.text
        phone.url = reply.headers["location"]
        await phone.connect(reply.text)
        yield phone
    finally:
        await phone.close()


async def dialled(client: httpx.AsyncClient, sdp: str, **given: Any) -> httpx.Response:
    """The reply to an offer."""
    headers = {"Content-Type": "application/sdp", **given.pop("headers", {})}
    return await client.post("/v1/realtime/calls", content=sdp, headers=headers, **given)


def likeness(heard: Tensor, said: Tensor) -> float:
    """How well a recording `[n]` holds a sound `[m]` at its best place: 1 is a copy, 0 anything."""
    heard = torch.cat([torch.zeros(len(said)), heard, torch.zeros(len(said))])
    size = len(heard) + len(said)
    product = torch.fft.rfft(heard, size) * torch.fft.rfft(said, size).conj()
    found = torch.fft.irfft(product, size)
    at = int(found.argmax())
    part = heard[at : at + len(said)]
    return float(found[at] / (part.norm() * said.norm() + 1e-9))
