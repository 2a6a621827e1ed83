"""Server-sent events, and other bodies that come in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmfast.serve.http.running import left

DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment: keeps proxies from closing the connection
EVENTS = "text/event-stream"
# of the OpenAPI document: every event has data, a JSON document or [DONE]
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def event(document: Mapping[str, Any], name: str = "") -> bytes:
    """One event."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {data}\n\n".encode("utf-8", "replace")


class Growing(Response):
    """A reply that is sent as it is made, and stops being made when the client leaves.

    Args:
        parts: The pieces.
        media_type: Of the whole.
        close: Called in the end, however it ends, also when nothing was ever sent.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.status_code, self.media_type, self.background = 200, media_type, None
        self._parts, self._close = parts, close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._close()
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
