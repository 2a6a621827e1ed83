"""The life of a session over any transport: it is opened, talks, watches the clock, and ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from mmfast.core.errors import unknown
from mmfast.serve.config import answers_to
from mmfast.serve.guard.caller import caller_of
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.realtime import protocol
from mmfast.serve.realtime.player import DeltaPlayer, MakePlayer
from mmfast.serve.realtime.protocol import EventError
from mmfast.serve.realtime.service import RealtimeService
from mmfast.serve.realtime.session import RealtimeSession

_log = logging.getLogger("mmfast.serve")
GOING, SLOW, BROKEN = 1001, 1008, 1011  # close codes: time is up, does not read, our fault


def check_model(asked: str | None, service: RealtimeService) -> None:
    """Refuse clients that ask for another model."""
    served = service.served
    fits = answers_to(asked, served[0], service.config.strict_model, agent=True)
    if not (fits or asked in served):
        text = unknown("model", str(asked)[:80], served)
        raise ApiError(404, text, "invalid_request_error", "model_not_found", "model")


def settings_asked(given: Any) -> protocol.SessionShape:
    """Return a `session` of a request, checked; `ApiError` names the wrong field."""
    try:
        event = protocol.checked({"type": "session.update", "session": given})
    except EventError as error:
        raise refused(error) from None
    assert isinstance(event.session, protocol.SessionShape)
    return event.session


def refused(error: EventError) -> ApiError:
    """Return the error of an event as that of a request."""
    return ApiError(400, str(error), error.type, error.code, error.param)


@asynccontextmanager
async def opened(
    service: RealtimeService,
    scope: Any,
    kind: str = "realtime",
    asked: Sequence[protocol.SessionShape] = (),
    player: MakePlayer = DeltaPlayer,
) -> AsyncIterator[RealtimeSession]:
    """Open a session for the caller of a request, and close it at the end of the block.

    The address of the request may name an adapter as the model.

    Settings that came with the caller's client secret are under those `asked` for. `ApiError`: no
    place is free, a setting is wrong, or the models cannot be loaded.
    """
    caller = None
    with suppress(TypeError):  # no guard in front, no quotas
        caller = caller_of(scope)
    if caller is not None and caller.session is not None:
        asked = [settings_asked(caller.session), *asked]
    named = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("model", [""])[0]
    if named in service.config.adapters():
        asked = [*asked, settings_asked({"model": named})]
    place = service.admit()
    try:
        async with made(service, kind, asked, player) as session:
            if caller is not None:
                session.spend, session.brain.tenant = caller.spend, caller.tenant
                session.charge = partial(caller.quotas.spend, caller.who, "pixels")
            yield session
    finally:
        service.leave(place)


@asynccontextmanager
async def made(
    service: RealtimeService,
    kind: str,
    asked: Sequence[protocol.SessionShape],
    player: MakePlayer = DeltaPlayer,
) -> AsyncIterator[RealtimeSession]:
    """Make a session, without a place in the server, and close it at the end of the block."""
    voices = await service.voices()
    brain = await service.listen(voices.open)
    adapters = service.config.adapters()
    brain.adapter = next((each.model for each in asked if each.model in adapters), None)
    try:
        session = RealtimeSession(service, voices, brain, kind, asked, player)
    except EventError as error:
        await service.listen(brain.close)
        raise refused(error) from None
    try:
        yield session
    finally:
        if not session.closed:
            await session.close()


async def converse(session: RealtimeSession, *parts: Callable[[], Awaitable[int]]) -> int:
    """Run the parts of a transport and watch the clock, until one of them ends.

    A part returns a close code, or 0 where the client has gone; that of the first is returned, and
    the session is closed.
    """
    tasks: list[asyncio.Future[int]] = []
    code, clock = BROKEN, partial(_watch, session)
    try:
        tasks += [asyncio.ensure_future(each) for each in (*(part() for part in parts), clock())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is not None:
                _log.error("a session broke", exc_info=task.exception())
            else:
                code = task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await session.close()
    return code


async def _watch(session: RealtimeSession) -> int:
    """End a session at its time limit or when idle, and let it react to silence."""
    limits = session.service.limits
    while True:
        await asyncio.sleep(0.1)
        now = session.clock.now()
        if session.busy:
            session.last_event = now
        session.idle()
        for name, limit, since in (
            ("session_expired", limits.seconds, session.began),
            ("session_idle", limits.idle, session.last_event),
        ):
            if now - since >= limit:
                text = f"the session was open, or idle, for {limit:g} s; open another one"
                say_why(session, name, text)
                return GOING


def say_why(session: RealtimeSession, code: str, text: str) -> None:
    """Tell a client why its session ends."""
    error = {"type": "invalid_request_error", "code": code, "param": None, "message": text}
    session.send(type="error", error={**error, "event_id": None})
