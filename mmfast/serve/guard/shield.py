"""The guard between network and application: limits, keys, quotas, errors and one log line each.

Bodies and streams of HTTP and WebSockets pass through and are counted, never collected.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import Any

import h11
from starlette.middleware.cors import CORSMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard import logs
from mmfast.serve.guard.body import Bodies, BodyReceiver, check_head, check_type, has_body
from mmfast.serve.guard.caller import (
    KINDS,
    SECRET,
    Caller,
    CallerLimits,
    CallerQuotas,
    ClientSecrets,
    Keys,
    client_of,
    from_elsewhere,
    given_key,
    loopback,
    values,
)
from mmfast.serve.guard.errors import ApiError, reason, reply

_log = logging.getLogger("mmfast.serve")
_GONE = 499  # the client went, or stopped reading
Routed = Callable[[Any], bool]  # from the scope of a request


class _Exchange:
    """Passes the messages of a request or a connection both ways, and logs it at the end."""

    def __init__(
        self, scope: Any, receive: Any, send: Any, caller: Caller, config: ServerConfig
    ) -> None:
        self._receive, self._send, self._scope = receive, send, scope
        self._caller, self._config = caller, config
        self._in = self._out = self._status = 0
        self._over = False  # the connection has ended, or its client stopped reading

    def _with_id(self, message: Any, headers: list[Any]) -> Any:
        own = (b"x-request-id", self._caller.id.encode())
        return {**message, "headers": [*headers, own]}

    async def _pass_on(self, message: Any) -> None:
        """Send a message within the time that the client has for reading, or ConnectionError."""
        self._out += sum(len(message.get(name) or b"") for name in ("body", "text", "bytes"))
        try:
            async with asyncio.timeout(self._config.send_seconds):
                await self._send(message)
        except TimeoutError:
            self._over = True
            raise ConnectionError("the client has stopped reading") from None

    def _log(self, quiet: bool, method: str, status: int, ms: float) -> None:
        caller = self._caller
        fields = {"id": caller.id, "ms": round(ms, 1), "in": self._in, "out": self._out}
        fields |= {"tokens": caller.tokens or None, "tenant": caller.tenant or None}
        logs.request(quiet, method, self._scope["path"], status, fields)


class HttpExchange(_Exchange):
    """A request and its reply; arguments as for `_Exchange`.

    `intake` is the application's `receive`, once the headers are checked.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.intake: BodyReceiver | None = None
        self._started = False

    async def run(self, app: Any, bodies: Bodies, routed: Routed) -> None:
        """Let the application answer; answer in its place where it fails.

        What is not `routed` is for the application to refuse, whatever its type.
        """
        scope = self._scope
        try:
            is_json = check_type(scope["method"], scope["path"], scope["headers"])
        except ApiError:
            if routed(scope):
                raise
            is_json = False
        endless = bool(values(scope["headers"], b"transfer-encoding"))
        self.intake = BodyReceiver(self._receive, self._config, is_json, bodies, endless)
        try:
            await app(scope, self.intake, self.send)
        except Exception as error:
            if self._over:
                self._status = _GONE
                return
            if self.intake.refused is None and reply(error)[0] >= 500:
                _log.error("request %s failed", self._caller.id, exc_info=error)
            await self.refuse(self.intake.refused or error)
            return
        if self.intake.refused and not self._started:
            await self.refuse(self.intake.refused)

    async def send(self, message: Any) -> None:
        """Pass a part of the reply on, at once; `ConnectionError` if the client stopped reading."""
        if not self._started and self.intake and self.intake.refused:
            return  # the application's reply to a body that was cut
        if message["type"] == "http.response.start":
            self._started, self._status = True, message["status"]
            headers = [h for h in message.get("headers", []) if h[0].lower() != b"x-request-id"]
            message = self._with_id(message, headers)
        await self._pass_on(message)

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error; a reply that has begun is cut instead."""
        if self._started:
            return
        self._started = True
        self._status, headers, data = reply(error)
        self._out = len(data)
        unread = has_body(self._scope["headers"]) and not (self.intake and self.intake.over)
        close = [(b"connection", b"close")] if unread else []
        start = {"type": "http.response.start", "status": self._status}
        await self._send(self._with_id(start, [*headers, *close]))
        await self._send({"type": "http.response.body", "body": data, "more_body": unread})
        if unread:
            intake = self.intake or BodyReceiver(self._receive, self._config)
            await intake.drain()
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def log(self, quiet: bool, ms: float) -> None:
        """Write one line at the end."""
        if self.intake:
            self._in = self.intake.size
            self.intake.close()
        self._caller.quotas.spend(self._caller.who, "bytes", self._in)
        self._log(quiet, self._scope["method"], self._status or _GONE, ms)


_TOO_BIG, _FAILED, _LATER = 1009, 1011, 1013  # RFC 6455, section 7.4


class SocketExchange(_Exchange):
    """A WebSocket connection; arguments as for `_Exchange`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._asked = self._open = False

    async def run(self, app: Any, bodies: Bodies, routed: Routed) -> None:
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
        """Return the next message; one that is too large ends the connection."""
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
        """Pass a message on, at once; `ConnectionError` if the client stopped or was cut off."""
        kind = message["type"]
        if self._over:
            raise ConnectionError("the connection is closed")
        if kind in ("websocket.accept", "websocket.http.response.start"):
            self._open = kind == "websocket.accept"
            self._status = 101 if self._open else message["status"]
            message = self._with_id(message, message.get("headers", []))
        elif kind == "websocket.close":
            self._over = True
            self._status = self._status or 403
        await self._pass_on(message)

    async def refuse(self, error: BaseException) -> None:
        """Refuse the handshake with an HTTP reply, or close an open connection."""
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
        await self._send(self._with_id(start, headers))
        await self._send({"type": "websocket.http.response.body", "body": data, "more_body": False})

    def log(self, quiet: bool, ms: float) -> None:
        """Write one line at the end."""
        self._log(quiet, "WEBSOCKET", self._status, ms)


_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ALWAYS = ("/health", "/ready")  # open without a key
SECRETS = "/v1/realtime/client_secrets"
_SESSIONS = re.compile(r"/v1/realtime(/calls(/.*)?)?$")  # where client secrets are keys


class Shield:
    """Pure ASGI middleware: limits, keys, quotas, request ids, errors, one log line each.

    The application finds the `Caller` with `caller_of(scope)`. `rejected` gets the reason of each
    refusal. `routed` tells whether there is a route for a request.
    """

    def __init__(
        self,
        app: Any,
        config: ServerConfig,
        rejected: Callable[[str], None] | None = None,
        routed: Routed = lambda scope: True,
    ) -> None:
        self._app, self._config, self._routed = app, config, routed
        self._keys, self._rejected = Keys(config.api_keys), rejected
        self._local, self._bodies = loopback(config.host), Bodies(config.bodies_bytes)
        self.secrets = ClientSecrets()
        self.quotas = CallerQuotas(
            CallerLimits(
                **{kind: config.quota(f"{kind}_per_minute") for kind in KINDS},
                running=config.quota("requests_at_once"),
            )
        )
        self._entry: Any = self._guard
        if config.origins:  # before the keys: the first request of a browser carries none
            self._entry = CORSMiddleware(
                self._guard,
                allow_origins=list(config.origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after", "location"],
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request, a connection or the lifespan."""
        if scope["type"] in ("http", "websocket"):
            await self._entry(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _guard(self, scope: Any, receive: Any, send: Any) -> None:
        """Check and run; answer errors and log in any case."""
        given = values(scope["headers"], b"x-request-id")
        valid = len(given) == 1 and _ID.fullmatch(given[0]) is not None
        name = given[0].decode() if valid else f"req_{uuid.uuid4().hex}"
        caller = Caller(name, self.quotas, secrets=self.secrets)
        scope.setdefault("state", {})["mmfast"] = caller
        kind = SocketExchange if scope["type"] == "websocket" else HttpExchange
        exchange = kind(scope, receive, send, caller, self._config)
        start, entered = time.monotonic(), False
        try:
            self._admit(scope, caller)
            entered = caller.limited
            await exchange.run(self._app, self._bodies, self._routed)
        except ApiError as error:
            if self._rejected is not None:
                self._rejected(reason(error))
            await exchange.refuse(error)
        finally:
            if entered:
                self.quotas.leave(caller.who)
            exchange.log(scope["path"] in _ALWAYS, (time.monotonic() - start) * 1e3)

    def _admit(self, scope: Any, caller: Caller) -> None:
        """Admit a request by its headers, or raise `ApiError`."""
        headers, path = scope["headers"], scope["path"]
        check_head(headers, self._config)
        caller.who = client_of(scope)
        if scope["path"] in _ALWAYS:
            return
        if from_elsewhere(headers, self._config.origins, self._local):
            raise ApiError(403, "pages of other sites may not call this server", code="origin")
        shown = path == "/metrics" and self._local and not self._config.metrics_need_key
        if not self._found_secret(scope, caller) and self._keys and not shown:
            self._check_key(scope, caller)
        self.quotas.enter(caller.who)
        caller.limited = True

    def _found_secret(self, scope: Any, caller: Caller) -> bool:
        """Return True if the caller's key is a valid client secret, and take its settings."""
        key = given_key(scope["headers"], scope["type"] == "websocket") or b""
        if not key.startswith(SECRET.encode()) or self._keys.owner(key) is not None:
            return False
        found = self.secrets.find(key) if _SESSIONS.match(scope["path"]) else None
        if found is None:
            text = "the client secret is unknown, expired, or not for this route; make another one"
            raise ApiError(401, f"{text} (POST {SECRETS})", code="invalid_client_secret")
        caller.who, caller.tenant, caller.session = found.who, found.tenant, found.session
        return True

    def _check_key(self, scope: Any, caller: Caller) -> None:
        owner = self._keys.owner(given_key(scope["headers"], scope["type"] == "websocket"))
        if owner is None:
            browser = scope["path"].startswith("/demo")
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Basic" if browser else "Bearer"},
            )
        caller.tenant = owner
        caller.who = f"key:{owner}"


_LINES = 8 << 10  # of a request line, beside the headers
_NAMES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Return the keyword arguments of `uvicorn.Config` for a guarded server."""

    class Protocol(TimedProtocol):
        header_seconds = config.header_seconds
        header_bytes = config.max_header_bytes + _LINES

    return {
        "http": Protocol,
        "h11_max_incomplete_event_size": config.max_header_bytes + _LINES,
        "ws": "websockets-sansio",
        "ws_max_size": config.realtime_message_bytes,
        "ws_max_queue": 8,
        "ws_ping_interval": 20.0,
        "ws_ping_timeout": 20.0,
        "limit_concurrency": config.connections,
        "timeout_keep_alive": max(1, round(config.keep_alive_seconds)),
        "timeout_graceful_shutdown": max(1, round(config.shutdown_seconds)),
        "server_header": False,
        "proxy_headers": False,  # else a client could choose the address of its quota
        "access_log": False,  # the guard writes one line for each request
        "log_config": None,
    }


class TimedProtocol(H11Protocol):
    """HTTP/1.1 with a time limit for headers; `Shield` limits the time of bodies."""

    header_seconds = 10.0  # from the first byte of a connection or of a later request on it
    header_bytes = 40 << 10
    _late: asyncio.TimerHandle | None = None
    _seen = 0  # bytes of headers so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of a new connection."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Count the bytes of headers and check the clock."""
        if self._awaiting():
            self._seen += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Stop the clock; uvicorn has its own until the next request begins."""
        super().on_response_complete()
        self._seen = 0
        if self.conn.trailing_data[0]:
            self._watch()
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._rest()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer data that is not HTTP, or headers that are too large."""
        self._rest()
        if self._seen > self.header_bytes:
            self._close(431, "the headers are too large: send fewer", "headers_too_large")
        else:
            self._close(400, "this is no HTTP request", "invalid_http")

    def _awaiting(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _watch(self) -> None:
        if not self._awaiting():
            self._rest()
        elif self._late is None:
            self._late = self.loop.call_later(self.header_seconds, self._give_up)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._awaiting() and not self.transport.is_closing():
            text = f"the headers took over {self.header_seconds:g} s: send them faster"
            self._close(408, text, "headers_too_slow")

    def _close(self, status: int, text: str, code: str) -> None:
        _, headers, data = reply(ApiError(status, text, code=code))
        lines = [f"HTTP/1.1 {status} {_NAMES[status]}".encode(), b"connection: close"]
        lines += [key + b": " + value for key, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", data]))
        self.transport.close()
