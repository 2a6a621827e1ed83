"""The route: a WebSocket from its handshake to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from fastapi import WebSocket, WebSocketDisconnect
from fastapi.responses import JSONResponse

from mmfast.serve.guard.caller import Keys, from_elsewhere, given_key, loopback
from mmfast.serve.guard.errors import ApiError, api_error, body
from mmfast.serve.realtime.connection import GOING, SLOW, check_model, converse, opened
from mmfast.serve.realtime.service import RealtimeService, realtime_of
from mmfast.serve.realtime.session import RealtimeSession

_log = logging.getLogger("mmfast.serve")
GONE = (WebSocketDisconnect, RuntimeError, OSError)  # of a client, while something is sent


async def realtime(websocket: WebSocket, service: Any) -> None:
    """Speak the OpenAI Realtime protocol on one socket, until either side ends it.

    The socket is not accepted yet. A `Service` gets a `RealtimeService` here.
    """
    service = realtime_of(service)
    async with AsyncExitStack() as stack:
        try:
            check(websocket, service)
            hears = websocket.query_params.get("intent") == "transcription"
            kind = "transcription" if hears else "realtime"
            session = await stack.enter_async_context(opened(service, websocket.scope, kind))
        except Exception as error:
            await deny(websocket, error)
            return
        offered = websocket.scope.get("subprotocols") or ()
        await websocket.accept("realtime" if "realtime" in offered else None)
        ends = (partial(part, websocket, session) for part in (_read, _write))
        if code := await converse(session, *ends):
            await _close(websocket, session, code)


def check(websocket: WebSocket, service: RealtimeService) -> None:
    """Refuse clients without a key, from another page, or asking for another model."""
    config, headers = service.config, list(websocket.scope["headers"])
    keys, guarded = Keys(config.api_keys), "mmfast" in websocket.scope.get("state", {})
    if keys and not guarded and keys.owner(given_key(headers, websocket=True)) is None:
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
    if "call_id" in websocket.query_params:
        text = "a call has no second connection here; send its events on its data channel"
        raise ApiError(400, text, code="unsupported_parameter", param="call_id")
    check_model(websocket.query_params.get("model"), service)


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
