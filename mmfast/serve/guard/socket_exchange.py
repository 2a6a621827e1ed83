"""One WebSocket on its way through the guard."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard import logs
from mmfast.serve.guard.caller import Caller
from mmfast.serve.guard.errors import reply

_log = logging.getLogger("mmfast.serve")
_TOO_BIG, _FAILED, _LATER = 1009, 1011, 1013  # RFC 6455, section 7.4


class SocketExchange:
    """Passes messages both ways; the arguments are those of `Exchange`."""

    def __init__(
        self, scope: Any, receive: Any, send: Any, caller: Caller, config: ServerConfig
    ) -> None:
        self._receive, self._send, self._scope = receive, send, scope
        self._caller, self._config = caller, config
        self._asked = self._open = self._over = False
        self._in, self._out, self._status = 0, 0, 0

    async def run(self, app: Any) -> None:
        """Let the application talk; close in its place where it fails."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception as error:
            if self._over:
                return
            if reply(error)[0] >= 500:
                _log.error("connection %s failed", self._caller.id, exc_info=error)
            await self.refuse(error)

    async def receive(self) -> Any:
        """The next message; one that is too large ends the connection."""
        message = await self._receive()
        if message["type"] == "websocket.connect":
            self._asked = True
        if message["type"] == "websocket.disconnect":
            self._over = True
        size = len(message.get("text") or "") + len(message.get("bytes") or b"")
        self._in += size
        if size > self._config.realtime_message_bytes:
            return await self._cut(_TOO_BIG, "the message is too large")
        self._caller.quotas.spend(self._caller.who, "bytes", size)
        if size and self._caller.quotas.check(self._caller.who, "bytes") is not None:
            return await self._cut(_LATER, "too many bytes a minute")
        return message

    async def _cut(self, code: int, reason: str) -> Any:
        self._over = True
        await self._send({"type": "websocket.close", "code": code, "reason": reason})
        return {"type": "websocket.disconnect", "code": code, "reason": reason}

    async def send(self, message: Any) -> None:
        """Pass a message on, at once.

        Raises:
            ConnectionError: The client has stopped reading, or the connection was cut here.
        """
        kind = message["type"]
        if self._over:
            raise ConnectionError("the connection is closed")
        if kind == "websocket.accept":
            self._open, self._status = True, 101
            message = {**message, "headers": [*message.get("headers", []), self._id()]}
        elif kind == "websocket.http.response.start":
            self._status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), self._id()]}
        elif kind == "websocket.close":
            self._over = True
            self._status = self._status or 403
        self._out += len(message.get("text") or "") + len(message.get("bytes") or b"")
        try:
            async with asyncio.timeout(self._config.send_seconds):
                await self._send(message)
        except TimeoutError:
            self._over = True
            raise ConnectionError("the client has stopped reading") from None

    def _id(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._caller.id.encode()

    async def refuse(self, error: BaseException) -> None:
        """Refuse the handshake with an HTTP reply, or close what is open."""
        if self._open:
            self._over = True
            await self._send({"type": "websocket.close", "code": _FAILED, "reason": "error"})
            return
        if not self._asked:
            await self._receive()
        self._status, headers, data = reply(error)
        if "websocket.http.response" not in self._scope.get("extensions", {}):
            await self._send({"type": "websocket.close", "code": 1008, "reason": "refused"})
            return
        start = {"type": "websocket.http.response.start", "status": self._status}
        await self._send({**start, "headers": [*headers, self._id()]})
        await self._send({"type": "websocket.http.response.body", "body": data, "more_body": False})

    def log(self, quiet: bool, ms: float) -> None:
        """One line, when it is over."""
        fields = {
            "id": self._caller.id,
            "ms": round(ms, 1),
            "in": self._in,
            "out": self._out,
            "tokens": self._caller.tokens or None,
            "tenant": self._caller.tenant or None,
        }
        logs.request(quiet, "WEBSOCKET", self._scope["path"], self._status, fields)
