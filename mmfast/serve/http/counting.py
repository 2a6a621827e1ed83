"""Counts replies by route and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmfast.serve.guard.errors import api_error
from mmfast.serve.http.metrics import Metrics


class Counting:
    """Pure ASGI middleware.

    Args:
        app: What answers.
        metrics: Counts.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; 499 where the client left before its reply began."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 499

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:  # whoever stands in front answers it
            status = api_error(error).status
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")  # never what the client sent
            self._metrics.request(route, status)
