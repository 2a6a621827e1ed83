"""The demo at `/demo`, built when somebody first looks: its toolkit takes seconds to import."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from mmfast.serve.http.service import Service
from mmfast.serve.uploads import read_upload

PATH = "/demo"


class Demo:
    """Sends what is below `/demo` to the demo, everything else on.

    Args:
        app: What comes behind.
        service: Whose engine the demo asks.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._lock = asyncio.Lock()
        self._inner: FastAPI | None = None
        self._life = contextlib.AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, connection or life."""
        path = str(scope.get("path", ""))
        if path == PATH or path.startswith(f"{PATH}/"):
            inner = await self._built()
            await inner(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            if scope["type"] == "lifespan":
                await self._life.aclose()

    async def _built(self) -> FastAPI:
        async with self._lock:
            if self._inner is None:
                inner = await asyncio.to_thread(_build, self._service)
                await self._life.enter_async_context(inner.router.lifespan_context(inner))
                self._inner = inner
        return self._inner


def _build(service: Service) -> FastAPI:
    from mmfast.demos.app import mount

    inner, config = FastAPI(docs_url=None, redoc_url=None, openapi_url=None), service.config
    read = partial(read_upload, config=config)
    # A model of its own: methods of visitors put hooks on it, which the engine's must not hear.
    mount(inner, PATH, model=config.model, device=config.device, dtype=config.dtype, read=read)
    return inner
