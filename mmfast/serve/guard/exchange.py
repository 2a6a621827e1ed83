"""One HTTP request and its reply, on their way through the guard."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard import logs
from mmfast.serve.guard.caller import Caller
from mmfast.serve.guard.errors import reply
from mmfast.serve.guard.intake import Intake
from mmfast.serve.guard.keys import values

_log = logging.getLogger("mmfast.serve")
_GONE = 499  # the client went, or stopped reading


class Exchange:
    """Passes messages both ways.

    Args:
        scope: Of the request.
        receive: Of the server.
        send: Of the server.
        caller: Whose request it is.
        config: Limits.

    Attributes:
        receive: Of the server.
        intake: What the application receives from, once the headers are checked.
    """

    def __init__(
        self, scope: Any, receive: Any, send: Any, caller: Caller, config: ServerConfig
    ) -> None:
        self.receive, self._send, self._scope = receive, send, scope
        self._caller, self._config = caller, config
        self.intake: Intake | None = None
        self._status, self._out = 0, 0
        self._started = self._stalled = False

    async def run(self, app: Any) -> None:
        """Let the application answer; answer in its place where it fails."""
        try:
            await app(self._scope, self.intake, self.send)
        except Exception as error:
            refused = self.intake.refused if self.intake else None
            if self._stalled:
                self._status = _GONE
                return
            if refused is None and reply(error)[0] >= 500:
                _log.error("request %s failed", self._caller.id, exc_info=error)
            await self.refuse(refused or error)
            return
        if self.intake and self.intake.refused and not self._started:
            await self.refuse(self.intake.refused)

    async def send(self, message: Any) -> None:
        """Pass a part of the reply on, at once.

        Raises:
            ConnectionError: The client has stopped reading.
        """
        if not self._started and self.intake and self.intake.refused:
            return  # what the application makes of a body that was cut
        if message["type"] == "http.response.start":
            self._started, self._status = True, message["status"]
            headers = [h for h in message.get("headers", []) if h[0].lower() != b"x-request-id"]
            message = {**message, "headers": [*headers, self._id()]}
        self._out += len(message.get("body", b""))
        try:
            async with asyncio.timeout(self._config.send_seconds):
                await self._send(message)
        except TimeoutError:
            self._stalled = True
            raise ConnectionError("the client has stopped reading") from None

    def _id(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._caller.id.encode()

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error, unless an answer has begun: that one is cut."""
        if self._started:
            return
        self._started = True
        self._status, headers, data = reply(error)
        self._out = len(data)
        unread = self._unread()
        close = [(b"connection", b"close")] if unread else []
        start = {"type": "http.response.start", "status": self._status}
        await self._send({**start, "headers": [*headers, *close, self._id()]})
        await self._send({"type": "http.response.body", "body": data, "more_body": unread})
        if unread:
            intake = self.intake or Intake(self.receive, self._config)
            await intake.drain()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _unread(self) -> bool:
        headers = self._scope["headers"]
        sent = values(headers, b"content-length") not in ([], [b"0"])
        sent = sent or bool(values(headers, b"transfer-encoding"))
        return sent and not (self.intake is not None and self.intake.over)

    def log(self, quiet: bool, ms: float) -> None:
        """One line, when it is over."""
        size = self.intake.size if self.intake else 0
        if self.intake:
            self.intake.close()
        self._caller.quotas.spend(self._caller.who, "bytes", size)
        fields = {
            "id": self._caller.id,
            "ms": round(ms, 1),
            "in": size,
            "out": self._out,
            "tokens": self._caller.tokens or None,
            "tenant": self._caller.tenant or None,
        }
        scope = self._scope
        logs.request(quiet, scope["method"], scope["path"], self._status or _GONE, fields)
