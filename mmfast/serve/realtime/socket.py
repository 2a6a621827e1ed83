"""The route: a WebSocket from its handshake to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from mmfast.core.errors import unknown
from mmfast.serve.config import answers_to
from mmfast.serve.guard.caller import Keys, caller_of, from_elsewhere, given_key, loopback
from mmfast.serve.guard.errors import ApiError, api_error, body
from mmfast.serve.realtime.service import RealtimeService, realtime_of
from mmfast.serve.realtime.session import RealtimeSession

_log = logging.getLogger("mmfast.serve")
GONE = (WebSocketDisconnect, RuntimeError, OSError)  # of a client, while something is sent
GOING, SLOW, BROKEN = 1001, 1008, 1011  # close codes: time is up, does not read, our fault


async def realtime(websocket: WebSocket, service: Any) -> None:
    """Speak the OpenAI Realtime protocol on one socket, until either side ends it.

    The socket is not accepted yet. A `Service` gets a `RealtimeService` here.
    """
    service, place = realtime_of(service), None
    try:
        check(websocket, service)
        place = service.admit()
        voices = await service.voices()
        brain = await service.listen(voices.open)
    except Exception as error:
        if place is not None:
            service.leave(place)
        await deny(websocket, error)
        return
    try:
        hears = websocket.query_params.get("intent") == "transcription"
        kind = "transcription" if hears else "realtime"
        session = RealtimeSession(service, voices, brain, kind)
        with contextlib.suppress(TypeError):  # no guard in front, no quotas
            caller = caller_of(websocket.scope)
            session.spend, brain.tenant = caller.spend, caller.tenant
            session.charge = partial(caller.quotas.spend, caller.who, "pixels")
        await converse(websocket, session)
    finally:
        service.leave(place)


def check(websocket: WebSocket, service: RealtimeService) -> None:
    """Refuse clients without a key, from another page, or asking for another model."""
    config, headers = service.config, list(websocket.scope["headers"])
    keys = Keys(config.api_keys)
    if keys and keys.owner(given_key(headers, websocket=True)) is None:
        service.count("rejected", "auth")
        raise ApiError(
            401,
            "give a key: Authorization: Bearer KEY, or subprotocol openai-insecure-api-key.KEY",
            "authentication_error",
            "invalid_api_key",
        )
    # a browser lets any page open sockets to this machine
    if from_elsewhere(headers, config.origins, loopback(config.host)):
        raise ApiError(403, "pages of other hosts may not call", code="origin_not_allowed")
    asked, model = websocket.query_params.get("model"), service.model()
    if not answers_to(asked, model, config.strict_model, agent=True):
        text = unknown("model", str(asked)[:80], [model])
        raise ApiError(404, text, "invalid_request_error", "model_not_found", "model")


async def deny(websocket: WebSocket, error: Exception) -> None:
    """Answer the handshake with an error of HTTP."""
    known = api_error(error)
    if known.status >= 500 and known is not error:  # the server's own words are logged already
        _log.error("a session could not be opened", exc_info=error)
    if "websocket.http.response" in websocket.scope.get("extensions", {}):
        reply = JSONResponse(body(known), known.status, dict(known.headers))
        await websocket.send_denial_response(reply)
    else:
        await websocket.close(SLOW)


async def converse(websocket: WebSocket, session: RealtimeSession) -> None:
    """Read, write and watch the clock, until one of them ends."""
    offered = websocket.scope.get("subprotocols") or ()
    tasks: list[asyncio.Task[int]] = []
    code = BROKEN
    try:
        await websocket.accept("realtime" if "realtime" in offered else None)
        parts = (_read, _write, _watch)
        tasks += [asyncio.create_task(part(websocket, session)) for part in parts]
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
    if code:
        await _close(websocket, session, code)


async def _close(websocket: WebSocket, session: RealtimeSession, code: int) -> None:
    """Send the waiting events, as far as the client reads them, and close."""
    with contextlib.suppress(TimeoutError, *GONE):
        async with asyncio.timeout(2.0):
            while code == GOING and (text := await session.outbox.next()) is not None:
                await websocket.send_text(text)
    with contextlib.suppress(TimeoutError, *GONE):
        async with asyncio.timeout(2.0):
            await websocket.close(code)


async def _read(websocket: WebSocket, session: RealtimeSession) -> int:
    """Handle events of the client in order; return 0 when it has gone."""
    while True:
        await session.outbox.calm()
        message = await websocket.receive()
        if message["type"] == "websocket.disconnect":
            return 0
        text = message.get("text")
        if text is None:
            text = (message.get("bytes") or b"").decode("utf-8", "replace")
        await session.handle(text)


async def _write(websocket: WebSocket, session: RealtimeSession) -> int:
    """Send events of the server; return `SLOW` if the client does not read them."""
    while (text := await session.outbox.next()) is not None:
        try:
            async with asyncio.timeout(session.service.limits.slow):
                await websocket.send_text(text)
        except TimeoutError:
            return SLOW
        except GONE:
            return 0
    return 0


async def _watch(websocket: WebSocket, session: RealtimeSession) -> int:
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
                error = {"type": "invalid_request_error", "code": name, "param": None}
                text = f"the session was open, or idle, for {limit:g} s; open another one"
                error["message"] = text
                session.send(type="error", error={**error, "event_id": None})
                return GOING
