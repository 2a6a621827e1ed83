"""A realtime server without a network and without threads, in a time that only tests move."""

from __future__ import annotations

import asyncio
import base64
import json
import selectors
import struct
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import torch
from fastapi import WebSocket
from tone_models import HumEar, HumSpeaker, hum, read
from torch import Tensor

from mmfast.core.speech import Sound, Turn
from mmfast.models.speech.turn_end import Overheard
from mmfast.ops.audio import resample
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.realtime.brain import BrainQuestion, silent
from mmfast.serve.realtime.service import RealtimeService, SessionLimits
from mmfast.serve.realtime.socket import realtime

ANSWER = "the red circle moves to the left side"
COST = 0.02  # seconds of a step of the model


class FastLoop(asyncio.SelectorEventLoop):
    """Waits for no time: when nothing is ready it is at once the moment of the next timer.

    Where no timer runs either, nothing can ever happen: that is a hang, and raises.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.seconds


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: FastLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise TimeoutError("nothing can ever happen any more: this is a hang")
            self._loop.seconds += max(timeout, 0.0)
        return events


def fast(main: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end in a time of its own."""
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        return runner.run(main)


class LoopClock:
    """The time of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wait(self, condition: Any, until: float | None = None) -> None:
        raise NotImplementedError


class HumBrain:
    """Hears humming, hums its answer, counts what it sees and what it holds."""

    native, sees = False, True

    def __init__(self, voices: HumVoices) -> None:
        self.voices, self.frames = voices, list[float]()
        voices.open_brains += 1

    def hear(self, pcm: Tensor) -> str:
        return read(pcm).strip()

    def overhear(self, pcm: Tensor) -> Overheard:
        return Overheard(self.hear(pcm))

    def answer(self, question: BrainQuestion) -> Iterator[Sound]:
        self.voices.questions.append(question)
        self.voices.answering += 1
        try:
            text = self.voices.say(question.turns, len(self.frames))
            if isinstance(text, Exception):
                raise text
            for sound in HumSpeaker(1600, self.voices.each).speak(text):
                yield sound if question.aloud else silent(sound)
        finally:
            self.voices.answering -= 1

    def see(self, frame: Any, time: float) -> None:
        self.frames.append(time)

    def count(self, text: str) -> int:
        return len(text.split())

    def figures(self) -> dict[str, Any]:
        return {"tokens": 4 * len(self.frames)}

    def close(self) -> None:
        self.voices.open_brains -= 1


class HumVoices:
    """Shares nothing but counters."""

    voices, pace = ("hum", "hmm"), (100, 150, 200)

    def __init__(
        self,
        say: Callable[[Sequence[Turn], int], Any] = lambda *_: ANSWER,
        each: Callable[[], Any] | None = None,
    ) -> None:
        self.say, self.each, self.questions = say, each, list[BrainQuestion]()
        self.open_brains = self.answering = 0

    def open(self) -> HumBrain:
        return HumBrain(self)


class HumService(RealtimeService):
    """Steps take `cost` seconds of the loop's time, and no thread."""

    def __init__(
        self, voices: Any = None, limits: SessionLimits | None = None, **config: Any
    ) -> None:
        self.hums = voices or HumVoices()
        config = {"realtime_sessions": 4, **config}
        super().__init__(
            ServerConfig(**config),
            lambda: self.hums,
            limits=limits or SessionLimits(idle=1e6, seconds=1e7),
            ear=lambda turns: HumEar(turns.get("silence_duration_ms", 300) / 1e3),
            clock=LoopClock(),
        )
        self.cost = COST

    async def run(self, pool: Any, step: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.cost if pool is not None and pool is self._pool else 1e-4)
        return step()

    async def picture(self, url: str, param: str) -> Any:
        await asyncio.sleep(1e-3)
        if "broken" in url:
            raise ApiError(400, "this is no picture", param=param)
        return torch.zeros(4, 4, 3)


class News:
    """Events of a server as they come, and whoever waits for one of them."""

    def __init__(self, patience: float = 60.0) -> None:
        self.events: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.error: BaseException | None = None  # what was wrong with one
        self._news, self._patience = asyncio.Condition(), patience

    def came(self, event: dict[str, Any]) -> None:
        """One more; `tell` must follow."""
        self.events.append(event)
        self.times.append(asyncio.get_running_loop().time())

    async def tell(self) -> None:
        """Wake whoever waits."""
        async with self._news:
            self._news.notify_all()

    async def until(self, ready: Callable[[], Any], seconds: float | None = None) -> Any:
        """Wait for something that the events so far say."""
        async with asyncio.timeout(seconds or self._patience), self._news:
            await self._news.wait_for(lambda: ready() or self.error)
        if self.error is not None:
            raise self.error
        return ready()

    async def event(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for the nth event of a kind."""
        await self.until(lambda: len(self.of(kind)) >= count)
        return self.of(kind)[count - 1]

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind so far."""
        return [event for event in self.events if event["type"] == kind]

    def kinds(self) -> list[str]:
        """Kinds of the events so far."""
        return [event["type"] for event in self.events]


class Wire(News):
    """The client's end of a socket, as ASGI has it.

    Args:
        service: To connect to.
        seen: Called with every event that comes.
        **scope: Of the handshake: `headers`, `subprotocols`, `query_string`.
    """

    def __init__(
        self, service: Any, seen: Callable[[dict[str, Any]], None] | None = None, **scope: Any
    ) -> None:
        super().__init__()
        self.scope = {
            "type": "websocket",
            "path": "/v1/realtime",
            "query_string": b"model=mmfast",
            "headers": [(b"host", b"localhost")],
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
            **scope,
        }
        self._in: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._in.put_nowait({"type": "websocket.connect"})
        self.messages: list[dict[str, Any]] = []
        self.code: int | None = None
        self.reading = asyncio.Event()
        self.reading.set()
        self._seen = seen
        self.task = asyncio.ensure_future(self._run(service))

    async def _run(self, service: Any) -> None:
        await realtime(WebSocket(self.scope, self._in.get, self._send), service)  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        if message["type"] == "websocket.send":
            await self.reading.wait()
            event = json.loads(message["text"])
            self.came(event)
            if self._seen is not None:
                self._seen(event)
        else:
            self.messages.append(message)
            if message["type"] == "websocket.close":
                self.code = message.get("code", 1000)
        await self.tell()

    def raw(self, text: str) -> None:
        """Send anything."""
        self._in.put_nowait({"type": "websocket.receive", "text": text})

    def send(self, type: str, **fields: Any) -> None:
        """Send an event."""
        self.raw(json.dumps({"type": type, **fields}))

    def hang_up(self) -> None:
        """Be gone."""
        self._in.put_nowait({"type": "websocket.disconnect", "code": 1000})

    async def close(self) -> None:
        """Hang up, and wait until the server has done with it."""
        self.reading.set()
        self.hang_up()
        async with asyncio.timeout(60):
            await self.task


def packed(pcm: Tensor, rate: int = 16000) -> str:
    """Sound as a client sends it."""
    found = resample(pcm, rate, 24000)
    return base64.b64encode((found * 32767).round().to(torch.int16).numpy().tobytes()).decode()


def unpacked(text: str) -> Tensor:
    """Sound as a client gets it, at 16 kHz."""
    raw = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.int16)
    return resample(raw.float() / 32767, 24000, 16000)


def said(text: str, pause: float = 0.6) -> str:
    """A text that is hummed, and silence behind it."""
    return packed(torch.cat([hum(text), torch.zeros(round(16000 * pause))]))


def png(color: int = 128) -> str:
    """A data URI of a small grey picture."""
    rows = b"".join(b"\0" + bytes([color]) * 3 * 8 for _ in range(8))
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    body = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        body += struct.pack(">I", len(data)) + kind + data
        body += struct.pack(">I", zlib.crc32(kind + data))
    return "data:image/png;base64," + base64.b64encode(body).decode()


MANUAL = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
