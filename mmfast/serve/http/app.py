"""The application: its routes, what stands in front of them, and what errors look like."""

from __future__ import annotations

import asyncio
import contextlib
import re
import reprlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import mmfast
from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Executor
from mmfast.serve.guard.errors import ApiError, api_error, body
from mmfast.serve.guard.media import read_upload
from mmfast.serve.guard.shield import Shield
from mmfast.serve.http import chat, schema, speech
from mmfast.serve.http import status as listing
from mmfast.serve.http.events import ClientGoneError
from mmfast.serve.http.metrics import Metrics
from mmfast.serve.http.schema import SpeechRequest
from mmfast.serve.http.service import Service


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


_WHY = {
    "n": "ask once per answer",
    "logprobs": "probabilities are not given; leave it out",
    "top_logprobs": "probabilities are not given; leave it out",
    "presence_penalty": "penalties are not supported; leave it out",
    "frequency_penalty": "penalties are not supported; leave it out",
    "logit_bias": "biases are not supported; leave it out",
    "response_format": "answers are plain text; leave it out",
    "modalities": "answers are text here; for speech ask /v1/audio/speech or /v1/realtime",
    "tools": "the model calls no tools; leave it out",
    "tool_choice": "the model calls no tools; leave it out",
    "store": "nothing is stored; leave it out",
    "service_tier": "there is one tier; see mmfast.priority",
}
_NESTED: dict[str, type[schema.Strict]] = {
    "mmfast": schema.MmfastOptions,
    "stream_options": schema.StreamOptions,
    "image_url": schema.ImageUrl,
    "video_url": schema.VideoUrl,
    "input_audio": schema.RecordingData,
}
_ROLES: dict[str, type[schema.Strict]] = {
    "user": schema.UserMessage,
    "system": schema.SystemMessage,
    "developer": schema.SystemMessage,
    "assistant": schema.AssistantMessage,
}


def refusal(errors: Sequence[dict[str, Any]], body: Any, path: str = "") -> ApiError:
    """The error to answer with.

    Args:
        errors: As pydantic lists them.
        body: What was sent.
        path: Of the route, whose parameters are then known.
    """
    found = max(errors, key=lambda error: len(_walk(error["loc"], body)[0]))
    kind, ctx = str(found["type"]), found.get("ctx", {})
    if kind == "json_invalid":
        return _error(f"the body is no JSON ({ctx.get('error', 'cut short')}); send a JSON object")
    keys, value = _walk(found["loc"], body)
    if not keys:
        return _error("the body is no JSON object; send one, as Content-Type: application/json")
    param = _dotted(keys)
    if kind == "missing":
        return _error(f"{param} is missing; give it", "missing_required_parameter", param)
    if kind == "extra_forbidden":
        text = unknown("parameter", param, [_dotted([*keys[:-1], n]) for n in _names(keys, body)])
        return _error(text, "unknown_parameter", param)
    if kind.startswith("union_tag"):
        return _tag(found, param, value)
    why = _WHY.get(str(keys[0]))
    if why is not None:
        return _error(f"{param}={_short(value)}: {why}", "unsupported_parameter", str(keys[0]))
    return _error(f"{param}={_short(value)} is wrong: {_said(found)}", "invalid_value", param)


def _error(text: str, code: str = "invalid_json", param: str | None = None) -> ApiError:
    return ApiError(400, text, code=code, param=param)


def _tag(found: dict[str, Any], param: str, value: Any) -> ApiError:
    """A role or a kind of part that is not taken."""
    ctx = found.get("ctx", {})
    name = str(ctx.get("discriminator", "type")).strip("'")
    given = value.get(name) if isinstance(value, dict) else None
    if given is None:
        where = f"{param}.{name}"
        return _error(f"{where} is missing; give it", "missing_required_parameter", where)
    choices = re.findall(r"'([^']*)'", str(ctx.get("expected_tags", "")))
    where = f"{param}.{name}"
    return _error(unknown(where, _plain(given), choices), "invalid_value", where)


def _said(found: dict[str, Any]) -> str:
    text = str(found["msg"])
    return text[:1].lower() + text[1:]


def _walk(loc: Sequence[Any], body: Any) -> tuple[list[str | int], Any]:
    """The keys of `loc` that lead into the body, without pydantic's names of alternatives."""
    keys: list[str | int] = []
    steps = [step for step in loc if step != "body"]
    for i, step in enumerate(steps):
        inside = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if inside or (isinstance(body, dict) and step in body):
            keys, body = [*keys, step], body[step]
        elif isinstance(body, dict) and i == len(steps) - 1:
            return [*keys, step], None  # what is missing
    return keys, body


def _dotted(keys: Sequence[str | int]) -> str:
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{_plain(k)}" for k in keys)
    return text.lstrip(".")


def _names(keys: Sequence[str | int], body: Any) -> list[str]:
    """Parameters that there are beside the last of `keys`."""
    if len(keys) == 1:
        top: type[schema.Strict] = schema.ChatRequest
        if isinstance(body, dict) and "messages" not in body and "input" in body:
            top = SpeechRequest
        return list(top.model_fields)
    for key in keys[:-1]:
        body = body[key]
    model = _NESTED.get(str(keys[-2]))
    if model is None and isinstance(body, dict):
        model = _ROLES.get(str(body.get("role")))
    return list(model.model_fields) if model is not None else ["type", "text"]


def _short(value: Any) -> str:
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)
    return _plain(text if len(text) <= 60 else text[:57] + "…")


def _plain(text: object) -> str:
    """On one line, and fit to be sent."""
    return " ".join(str(text)[:400].encode("utf-8", "replace").decode().split())[:200]


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
