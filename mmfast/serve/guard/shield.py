"""What stands between the network and the application, for HTTP and WebSockets.

Nothing is gathered: bodies and streams pass through, counted.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.caller import Caller, caller_of, client_of
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.exchange import Exchange
from mmfast.serve.guard.intake import Bodies, Intake, check_head, check_type
from mmfast.serve.guard.keys import Keys, from_elsewhere, given_key, loopback, values
from mmfast.serve.guard.quotas import Quotas, Rates
from mmfast.serve.guard.socket_exchange import SocketExchange

__all__ = ["Caller", "Shield", "caller_of"]

_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ALWAYS = ("/health", "/ready")  # for whoever watches the server, without a key


class Shield:
    """Pure ASGI middleware: limits, keys, quotas, request ids, errors, one log line each.

    A part of the application finds the `Caller` with `caller_of(scope)`.

    Args:
        app: What it guards.
        config: Limits.
        rejected: Told why each refused request was.
    """

    def __init__(
        self, app: Any, config: ServerConfig, rejected: Callable[[str], None] | None = None
    ) -> None:
        self._app, self._config = app, config
        self._keys, self._rejected = Keys(config.api_keys), rejected
        self._local, self._bodies = loopback(config.host), Bodies(config.bodies_bytes)
        self.quotas = Quotas(
            Rates(
                config.requests_per_minute,
                config.bytes_per_minute,
                config.tokens_per_minute,
                config.requests_at_once,
            )
        )
        self._entry: Any = self._guard
        if config.origins:  # outside of the keys: a browser asks first, without one
            self._entry = CORSMiddleware(
                self._guard,
                allow_origins=list(config.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request, connection or life."""
        if scope["type"] in ("http", "websocket"):
            await self._entry(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _guard(self, scope: Any, receive: Any, send: Any) -> None:
        given = values(scope["headers"], b"x-request-id")
        sane = len(given) == 1 and _ID.fullmatch(given[0]) is not None
        name = given[0].decode() if sane else f"req_{uuid.uuid4().hex}"
        caller = Caller(name, self.quotas)
        scope.setdefault("state", {})["mmfast"] = caller
        if scope["type"] == "websocket":
            socket = SocketExchange(scope, receive, send, caller, self._config)
            await self._run(scope, caller, socket, lambda: socket.run(self._app))
            return
        exchange = Exchange(scope, receive, send, caller, self._config)
        await self._run(scope, caller, exchange, lambda: self._http(scope, exchange))

    async def _run(
        self, scope: Any, caller: Caller, exchange: Any, work: Callable[[], Any]
    ) -> None:
        """Check, work, and whatever happens, answer and log."""
        start, entered = time.monotonic(), False
        try:
            self._admit(scope, caller)
            entered = caller.limited
            await work()
        except ApiError as error:
            await self._refuse(exchange, error)
        finally:
            if entered:
                self.quotas.leave(caller.who)
            exchange.log(self._quiet(scope), (time.monotonic() - start) * 1e3)

    async def _http(self, scope: Any, exchange: Exchange) -> None:
        is_json = check_type(scope["method"], scope["path"], scope["headers"])
        endless = bool(values(scope["headers"], b"transfer-encoding"))
        exchange.intake = Intake(exchange.receive, self._config, is_json, self._bodies, endless)
        await exchange.run(self._app)

    async def _refuse(self, exchange: Any, error: ApiError) -> None:
        if self._rejected is not None:
            self._rejected(_reason(error))
        await exchange.refuse(error)

    def _admit(self, scope: Any, caller: Caller) -> None:
        """Whether this may come in, by its headers.

        Raises:
            ApiError: 4xx.
        """
        headers, path = scope["headers"], scope["path"]
        check_head(headers, self._config)
        caller.who = client_of(scope)
        if self._quiet(scope):
            return
        if from_elsewhere(headers, self._config.origins, self._local):
            raise ApiError(403, "pages of other sites may not call this server", code="origin")
        if self._keys and not (path == "/metrics" and not self._config.metrics_need_key):
            self._check_key(scope, caller)
        self.quotas.enter(caller.who)
        caller.limited = True

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

    def _quiet(self, scope: Any) -> bool:
        return scope["path"] in _ALWAYS


def _reason(error: ApiError) -> str:
    names = {401: "auth", 403: "auth", 408: "slow", 413: "body", 429: "rate", 431: "headers"}
    return names.get(error.status, "invalid")
