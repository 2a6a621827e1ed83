"""Resources that all sessions of a server share: models, threads, limits, places."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError, busy
from mmfast.serve.guard.media import load_media
from mmfast.serve.realtime.brain import ChatterVoices
from mmfast.serve.realtime.formats import unpack
from mmfast.serve.realtime.settings import ear_of
from mmfast.streams.stream import Clock
from mmfast.voice.ear import Ear

T = TypeVar("T")
_log = logging.getLogger("mmfast.serve")


@dataclass(frozen=True)
class SessionLimits:
    """Limits of one session.

    `seconds` limits its length, `idle` the seconds without an event of the client or a response.
    `message` is in letters of one event, `text` in letters of one prompt, `context` in tokens of a
    prompt and its answer; older turns are left out beyond these two. `frames` and `recordings` may
    wait; one more drops the oldest. `responses` run at once, the one in the conversation included,
    each made up to `ahead` seconds before it is played. A client may take `slow` seconds to read an
    event. `pixels` is per frame, `tokens` per answer (for `inf`); `workers` are steps of models at
    once, of all sessions.
    """

    seconds: float = 3600.0
    idle: float = 300.0
    message: int = 1 << 20
    frames: int = 8
    responses: int = 4
    ahead: float = 30.0
    slow: float = 30.0
    pixels: int = 1 << 22
    tokens: int = 4096
    workers: int = 1
    recordings: int = 16
    text: int = 200_000
    context: int | None = None


class RealtimeService:
    """The realtime part of one server.

    `load` loads the models in a thread when the first session opens. A `model` of None accepts any
    name, and `limits` come from `config` if absent. `ear` makes the detector of turns from
    settings; `clock` tells the end of played sound. While `stopping`, calls are refused.
    """

    def __init__(
        self,
        config: ServerConfig,
        load: Callable[[], ChatterVoices],
        *,
        model: Callable[[], str] = lambda: "mmfast",
        metrics: Any = None,
        limits: SessionLimits | None = None,
        ear: Callable[[dict[str, Any]], Ear] = ear_of,
        clock: Any = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self._load, self.model, self.metrics = config, load, model, metrics
        self.limits = limits or SessionLimits(
            config.session_seconds,
            config.idle_seconds,
            config.realtime_message_bytes,
            tokens=min(config.default_tokens, config.max_tokens),
            pixels=min(config.max_pixels, SessionLimits.pixels),
            text=config.max_text,
            context=config.context,
        )
        self.ear, self.clock = ear, clock or Clock()
        self.sessions: set[Any] = set()
        self.calls: dict[str, Any] = {}  # over WebRTC, by name
        self.stopping = stopping
        self.opened = 0  # sessions so far
        self._voices: asyncio.Future[ChatterVoices] | None = None
        # their threads start with the first step; those that wait for the engine need one each
        most = self.limits.workers + config.realtime_sessions * self.limits.responses
        self._pool = ThreadPoolExecutor(most, "mmfast-realtime")
        # an ear may write down what was said so far
        self._ears = ThreadPoolExecutor(max(2, config.realtime_sessions), "mmfast-ears")
        self._turn = asyncio.Semaphore(self.limits.workers)
        self._loop: asyncio.AbstractEventLoop | None = None

    def admit(self) -> object:
        """Reserve a place in the server, which `leave` frees; `ApiError` if all are taken."""
        if len(self.sessions) >= self.config.realtime_sessions:
            self.count("rejected", "session")
            raise busy(
                f"{self.config.realtime_sessions} sessions are open already; try again later",
                retry_after=5.0,
                code="too_many_sessions",
            )
        place = object()
        self.sessions.add(place)
        self.opened += 1
        self.count("session_opened")
        return place

    def leave(self, place: object) -> None:
        """Free the place of a session."""
        self.sessions.discard(place)
        self.count("session_closed")

    def count(self, name: str, *values: Any) -> None:
        """Call a helper of the metrics, if there are any."""
        if self.metrics is not None:
            getattr(self.metrics, name)(*values)

    @property
    def served(self) -> list[str]:
        """Names of the model and of its adapters, the model's first."""
        return [self.model(), *self.config.adapters()]

    async def voices(self) -> ChatterVoices:
        """Return the models, loaded once; `ApiError` if they cannot be loaded."""
        if self._voices is None or (self._voices.done() and self._voices.exception()):
            self._voices = asyncio.ensure_future(self.listen(self._load))
        try:
            found = await asyncio.shield(self._voices)
            found.wait = self.wait
            return found
        except ApiError:
            raise
        except Exception as error:
            _log.exception("the voice cannot be loaded")
            text = "the voice of this server cannot be loaded; its log says why"
            raise ApiError(503, text, "server_error", "not_loaded") from error

    async def work(self, step: Callable[[], T]) -> T:
        """Run one step of a model in a thread, when it is this session's turn.

        The longest wait goes first, and a reply asks again for each of its pieces: no session waits
        for more than a step of every other.
        """
        self._loop = asyncio.get_running_loop()
        async with self._turn:
            return await self.run(self._pool, step)

    def wait(self, call: Callable[[], T]) -> T:
        """Call what waits for another thread, within a step; other steps have their turn."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._turn.release)
        try:
            return call()
        finally:
            asyncio.run_coroutine_threadsafe(self._turn.acquire(), self._loop).result()

    async def listen(self, step: Callable[[], T]) -> T:
        """Run a short step in a separate thread, so that models never delay an interruption."""
        return await self.run(self._ears, step)

    async def run(self, pool: ThreadPoolExecutor, step: Callable[[], T]) -> T:
        """Run a step in a thread."""
        return await asyncio.get_running_loop().run_in_executor(pool, step)

    async def picture(self, url: str, param: str) -> Any:
        """Decode a data URI with limits to a frame uint8 `[H, W, 3]`; `ApiError` if it is bad."""
        given: str | bytes = url if ":" in url[:8] else unpack(url, param, self.limits.message)
        config = replace(self.config, max_pixels=self.limits.pixels)
        return (await load_media(given, "image", config, param=param)).shot.pixels

    async def hang_up(self, seconds: float) -> None:
        """End all calls; replies that are being said have some seconds to end."""
        await asyncio.gather(*(call.drain(seconds) for call in list(self.calls.values())))

    def close(self) -> None:
        """Stop the threads."""
        for pool in (self._pool, self._ears):
            pool.shutdown(wait=False, cancel_futures=True)


def realtime_of(service: Any) -> RealtimeService:
    """Return the realtime part of a server, made at the first call.

    A `RealtimeService` is returned unchanged.
    """
    if isinstance(service, RealtimeService):
        return service
    found = service.parts.get("realtime")
    if found is None:
        loop = asyncio.get_running_loop()

        def load() -> ChatterVoices:  # called in a thread
            from mmfast.serve.realtime.engine import EngineVoices

            parts = (service.executor(), service.voice())
            executor, speech = (
                asyncio.run_coroutine_threadsafe(part, loop).result() for part in parts
            )
            given = {"defaults": service.defaults, "metrics": service.metrics}
            return EngineVoices(executor, speech, service.config, **given)

        found = RealtimeService(
            service.config,
            load,
            model=lambda: str(service.model),
            metrics=service.metrics,
            stopping=lambda: bool(service.stopping),
        )
        service.parts["realtime"] = found
    assert isinstance(found, RealtimeService)
    return found
