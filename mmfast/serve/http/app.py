"""The application: its routes, what stands in front of them, and what errors look like."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Executor
from mmfast.serve.guard.errors import ApiError, api_error, body
from mmfast.serve.guard.shield import Shield
from mmfast.serve.http import chat, listing, speech
from mmfast.serve.http.bad_request import refusal
from mmfast.serve.http.counting import Counting
from mmfast.serve.http.demo import Demo
from mmfast.serve.http.running import ClientGoneError
from mmfast.serve.http.service import Service

_NAMES = {
    404: "there is no {path}; see /openapi.json",
    405: "{method} is not for {path}; see /openapi.json",
}


def create_app(
    config: ServerConfig, executor: Executor | None = None, voice: Any = None
) -> FastAPI:
    """The server as an ASGI application.

    Args:
        config: All options.
        executor: Answers requests; None loads the one that `config` asks for, in the background,
            from the moment the application starts.
        voice: Speaks and listens; None loads the one of `config` behind the engine.

    Returns:
        The application; `app.state.service` is its `Service`.
    """
    service = Service(config, executor, voice)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            service.close()

    app = FastAPI(
        title="mmfast",
        version=mmfast.__version__,
        summary="Chat about images, clips and sound as OpenAI's API has it, and what it cost.",
        lifespan=life,
        docs_url=None,  # its page would fetch scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    for module in (chat, listing, speech):
        app.include_router(module.router)
    _realtime(app, service)
    _errors(app, service)
    if config.demo and find_spec("gradio") is not None:
        app.add_middleware(Demo, service=service)
    app.add_middleware(Counting, metrics=service.metrics)
    app.add_middleware(Shield, config=config, rejected=service.metrics.rejected)
    return app


def _realtime(app: FastAPI, service: Service) -> None:
    if not service.config.voice:
        return

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        from mmfast.serve.realtime.socket import realtime as talk

        await talk(websocket, service)


def _errors(app: FastAPI, service: Service) -> None:
    """Every error in OpenAI's shape, and counted."""

    async def wrong(request: Request, error: Exception) -> Response:
        found = error.errors() if isinstance(error, RequestValidationError) else []
        given = error.body if isinstance(error, RequestValidationError) else None
        return _reply(service, refusal(list(found), given))

    async def raised(request: Request, error: Exception) -> Response:
        return _reply(service, api_error(error))

    async def unrouted(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        text = str(getattr(error, "detail", "")) or "the request is wrong"
        if status in _NAMES:
            path = request.url.path[:80]
            text = _NAMES[status].format(path=repr(path), method=request.method[:20])
        headers = dict(getattr(error, "headers", None) or {})
        return _reply(service, ApiError(status, text, code="no_route", headers=headers))

    async def unforeseen(request: Request, error: Exception) -> Response:
        # Of the guard itself: raised again, and logged by whoever runs the application.
        return _reply(service, api_error(error))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it; the log does

    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(MmfastError, raised)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, unforeseen)


def _reply(service: Service, error: ApiError) -> JSONResponse:
    service.metrics.rejected(_reason(error))
    return JSONResponse(body(error), error.status, error.headers)


def _reason(error: ApiError) -> str:
    names = {401: "auth", 403: "auth", 404: "unknown", 405: "unknown", 413: "body", 429: "busy"}
    return names.get(error.status, "failed" if error.status >= 500 else "invalid")
