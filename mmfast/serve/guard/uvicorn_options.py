"""uvicorn with limits: on headers that never end, and on what it gathers by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError, reply

_LINES = 8 << 10  # of a request line, beside the headers
_NAMES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def uvicorn_options(config: ServerConfig) -> dict[str, Any]:
    """Keyword arguments for `uvicorn.Config` or `uvicorn.run` that a guarded server needs."""

    class Protocol(Timed):
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
        "proxy_headers": False,  # whoever asks could choose the address whose quota counts
        "access_log": False,  # the guard writes one line for each request
        "log_config": None,
    }


class Timed(H11Protocol):
    """HTTP/1.1 whose headers must come in time; bodies are timed by `Shield`.

    Attributes:
        header_seconds: From the first byte of a connection, or of a further request on it.
        header_bytes: Of a request line and its headers.
    """

    header_seconds = 10.0
    header_bytes = 40 << 10
    _late: asyncio.TimerHandle | None = None
    _seen = 0  # bytes of headers so far

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there: its clock runs."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._awaiting():
            self._seen += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A reply is out; uvicorn's own clock runs until the next request begins."""
        super().on_response_complete()
        self._seen = 0
        if self.conn.trailing_data[0]:
            self._watch()
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._rest()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or too much of it."""
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
