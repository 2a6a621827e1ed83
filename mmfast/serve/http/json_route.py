"""Routes whose JSON is parsed apart from the event loop where there is much of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

LARGE = 1 << 18  # bytes from which parsing would be felt by everybody else


class JsonRequest(Request):
    """A request whose nesting and number of values the guard has counted already."""

    async def json(self) -> Any:
        """What was sent.

        Raises:
            JSONDecodeError: It is no JSON.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) < LARGE:
                self._json = json.loads(body)
            else:
                self._json = await asyncio.to_thread(large, body)
        return self._json


def large(body: bytes) -> Any:
    """Parse a large body.

    Each text becomes one of its own: read as a whole, a single letter beyond Latin-1 would make
    four bytes of every byte of base64.

    Raises:
        JSONDecodeError: It is no JSON.
    """
    try:
        return from_json(body)
    except ValueError as error:
        raise json.JSONDecodeError(" ".join(str(error).split())[:120], "", 0) from None


class JsonRoute(APIRoute):
    """A route that reads a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()

        async def handled(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handled
