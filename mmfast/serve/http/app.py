"""The application: its routes, middleware and error replies."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from html import escape
from importlib.util import find_spec
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import mmfast
from mmfast.core.errors import MmfastError, unknown
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Executor, Health
from mmfast.serve.guard.errors import ApiError, api_error, bad_request, body, brief, reason
from mmfast.serve.guard.media import read_upload
from mmfast.serve.guard.shield import Shield
from mmfast.serve.http import chat, completions, realtime, responses, schema, speech
from mmfast.serve.http.events import ClientGoneError
from mmfast.serve.http.schema import ERRORS, HealthReply, ModelCard, Models
from mmfast.serve.http.service import CONTENT_TYPE, Metrics, Service


class RequestCounter:
    """ASGI middleware that counts requests by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count one request; with 499 where the client left before the reply."""
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
        except Exception as error:  # the guard answers it
            status = api_error(error).status
            raise
        finally:
            route = getattr(scope.get("route"), "path", "none")  # never the path itself
            self._metrics.request(route, status)


_ADVICE = {
    "modalities": "answers are text here; for speech ask /v1/audio/speech or /v1/realtime",
    "suffix": "text is continued at its end only; leave it out",
    "best_of": "give n, and choose yourself",
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
    "tool": schema.ToolMessage,
}


def refusal(errors: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """Return the error reply to an invalid request."""

    def apt(error: dict[str, Any]) -> tuple[int, bool]:
        """Deepest first; of alternatives, the one whose type the value has."""
        return len(_walk(error["loc"], body)[0]), not str(error["type"]).endswith("_type")

    found = max(errors, key=apt)
    kind, ctx = str(found["type"]), found.get("ctx", {})
    if kind == "json_invalid":
        text = f"the body is no JSON ({ctx.get('error', 'cut short')}); send a JSON object"
        return bad_request(text, "invalid_json")
    keys, value = _walk(found["loc"], body)
    if not keys:
        text = "the body is no JSON object; send one, as Content-Type: application/json"
        return bad_request(text, "invalid_json")
    param = _dotted(keys)
    if kind == "missing":
        return bad_request(f"{param} is missing; give it", "missing_required_parameter", param)
    if kind == "extra_forbidden":
        text = unknown("parameter", param, [_dotted([*keys[:-1], n]) for n in _names(keys, body)])
        return bad_request(text, "unknown_parameter", param)
    if kind.startswith("union_tag"):
        return _tag(found, param, value)
    advice, shown = _ADVICE.get(str(keys[0])), f"{param}={_plain(brief(value))}"
    if advice is not None:
        return bad_request(f"{shown}: {advice}", "unsupported_parameter", str(keys[0]))
    message = str(found["msg"])
    text = f"{shown} is wrong: {message[:1].lower()}{message[1:]}"
    return bad_request(text, "invalid_value", param)


def _tag(found: dict[str, Any], param: str, value: Any) -> ApiError:
    """Return the error for an unknown role or kind of part."""
    ctx = found.get("ctx", {})
    name = str(ctx.get("discriminator", "type")).strip("'")
    given = value.get(name) if isinstance(value, dict) else None
    if given is None:
        where = f"{param}.{name}"
        return bad_request(f"{where} is missing; give it", "missing_required_parameter", where)
    choices = re.findall(r"'([^']*)'", str(ctx.get("expected_tags", "")))
    where = f"{param}.{name}"
    return bad_request(unknown(where, _plain(given), choices), "invalid_value", where)


def _walk(loc: Sequence[Any], body: Any) -> tuple[list[str | int], Any]:
    """Return the keys of `loc` inside the body, without pydantic's names of alternatives."""
    keys: list[str | int] = []
    steps = [step for step in loc if step != "body"]
    for i, step in enumerate(steps):
        inside = isinstance(body, list) and isinstance(step, int) and step < len(body)
        if inside or (isinstance(body, dict) and step in body):
            keys, body = [*keys, step], body[step]
        elif isinstance(body, dict) and i == len(steps) - 1:
            return [*keys, step], None  # a missing key
    return keys, body


def _dotted(keys: Sequence[str | int]) -> str:
    text = "".join(f"[{k}]" if isinstance(k, int) else f".{_plain(k)}" for k in keys)
    return text.lstrip(".")


def _names(keys: Sequence[str | int], body: Any) -> list[str]:
    """Return the parameters that are possible in the place of the last of `keys`."""
    if len(keys) == 1:
        top: type[schema.Strict] = schema.ChatRequest
        if isinstance(body, dict) and "messages" not in body:
            top = schema.CompletionRequest if "prompt" in body else schema.SpeechRequest
            top = responses.ResponseRequest if "voice" not in body and "input" in body else top
        return list(top.model_fields)
    for key in keys[:-1]:
        body = body[key]
    model = _NESTED.get(str(keys[-2]))
    if model is None and isinstance(body, dict):
        model = _ROLES.get(str(body.get("role")))
    return list(model.model_fields) if model is not None else ["type", "text"]


def _plain(text: object) -> str:
    """Return printable text on one line."""
    return " ".join(str(text)[:400].encode("utf-8", "replace").decode().split())[:200]


router = APIRouter()
_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: ERRORS[status] for status in (400, 401, 404, 429)
}


def _models(service: Service) -> list[ModelCard]:
    speech = (service.talker_model, service.listener_model) if service.config.voice else ()
    names = list(dict.fromkeys((service.model, *speech)))
    parents = dict.fromkeys(names) | dict.fromkeys(service.config.adapters(), service.model)
    return [ModelCard(id=n, created=service.created, parent=p) for n, p in parents.items()]


@router.get("/v1/models", responses=_REFUSALS, summary="All models")
async def models(http: Request) -> Models:
    """List all models."""
    return Models(data=_models(http.app.state.service))


@router.get("/v1/models/{model:path}", responses=_REFUSALS, summary="One model")
async def model(model: str, http: Request) -> ModelCard:
    """Describe one model."""
    found = _models(http.app.state.service)
    for each in found:
        if each.id == model or (each is found[0] and http.app.state.service.answers_to(model)):
            return each
    names = ", ".join(each.id for each in found)
    raise ApiError(
        404, f"model {model[:80]!r} is not here; choices: {names}", code="model_not_found"
    )


def _state(status: str, found: Health | None) -> Response:
    """Return the state of the engine, 503 where it is not `ok`, or a part on Ray has no replica."""
    found, mark = found or Health(False), "workers_"
    live = {n.removeprefix(mark): int(v) for n, v in found.gauges.items() if n.startswith(mark)}
    status = "unready" if status == "ok" and 0 in live.values() else status
    reply = {"status": status, "running": found.running, "waiting": found.waiting}
    more = {"replicas": live} if live else {}
    return JSONResponse({**reply, **more}, 200 if status == "ok" else 503)


_UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": HealthReply, "description": "Not now."}}


@router.get("/health", response_model=HealthReply, responses=_UNREADY, summary="Whether it lives")
async def health(http: Request) -> Response:
    """Report that the process runs; 503 while no replica of a part of the engine on Ray lives."""
    return _state("ok", http.app.state.service.health())


@router.get("/ready", response_model=HealthReply, responses=_UNREADY, summary="Whether it answers")
async def ready(http: Request) -> Response:
    """Report whether requests are taken; 503 while the model is loading, or cannot be loaded."""
    service = http.app.state.service
    found = service.health()
    if found is None:
        return _state("failed" if service.failure() else "loading", None)
    return _state("ok" if found.ready else "busy", found)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, 404: ERRORS[404]},
    summary="Counters for Prometheus",
)
async def metrics(http: Request) -> Response:
    """Return the counters for Prometheus."""
    service = http.app.state.service
    if not service.config.metrics:
        raise ApiError(404, "this server shows no metrics; start it without --no-metrics")
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


_PAGE = "<!doctype html><title>mmfast</title><h1>mmfast</h1><table>{}</table>"


@router.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def docs(http: Request) -> str:
    """List the routes on a page without scripts; `/openapi.json` has their parameters."""
    found = http.app.openapi()["paths"].items()
    rows = [
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(each['summary'])}"
        for path, methods in found
        for method, each in methods.items()
    ]
    return _PAGE.format("\n".join([*rows, '<tr><td><td><a href="openapi.json">openapi.json</a>']))


PATH = "/demo"


class Demo:
    """ASGI middleware that serves the demo at `/demo`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._lock = asyncio.Lock()
        self._inner: FastAPI | None = None
        self._life = contextlib.AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, a connection or the lifespan."""
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
                service, config = self._service, self._service.config
                speech = await service.voice() if config.voice else None
                executor = await service.executor()
                inner = await asyncio.to_thread(_build, config, executor, speech)
                await self._life.enter_async_context(inner.router.lifespan_context(inner))
                self._inner = inner
        return self._inner


def _build(config: ServerConfig, executor: Any, speech: Any) -> FastAPI:
    from mmfast.demos.app import mount
    from mmfast.demos.shelf import Shelf
    from mmfast.models.loading import twin

    inner = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    read = partial(read_upload, config=config)
    # The weights of the engine, and hooks of its own, which must not act on the engine.
    pair = getattr(executor, "pair", None)
    own = None if pair is None else twin(*pair)
    mount(inner, PATH, shelf=Shelf(config.model, config.device, config.dtype, read, own, speech))
    return inner


class HeadAsGet:
    """Answer HEAD as GET, without the body, as HTTP has it for all resources."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def bare(message: Message) -> None:
            await send({**message, "body": b""} if "body" in message else message)

        await self._app({**scope, "method": "GET"}, receive, bare)


_NAMES = {
    404: "there is no {path}; see /openapi.json",
    405: "{method} is not for {path}; see /openapi.json",
}


def create_app(
    config: ServerConfig, executor: Executor | None = None, voice: Any = None
) -> FastAPI:
    """Create the server as an ASGI application; its `state.service` is the `Service`.

    Without `executor` and `voice`, those of `config` are loaded in the background once the
    application starts.
    """
    service = Service(config, executor, voice)

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            if (part := service.parts.get("realtime")) is not None:
                await part.hang_up(0.6 * config.shutdown_seconds)
            service.close()

    app = FastAPI(
        title="mmfast",
        version=mmfast.__version__,
        summary="Chat about images, clips and sound as in OpenAI's API, with a trace of the cost.",
        lifespan=life,
        docs_url=None,  # its page would load scripts of other hosts
        redoc_url=None,
    )
    app.state.service = service
    routers = [chat.router, completions.router, responses.router, router, speech.router]
    for each in [*routers, realtime.router] if config.voice else routers:
        app.include_router(each)
    _errors(app, service)
    app.add_middleware(HeadAsGet)
    if config.demo and find_spec("gradio") is not None:
        app.add_middleware(Demo, service=service)
    app.add_middleware(RequestCounter, metrics=service.metrics)
    routed = partial(_routed, app)
    app.add_middleware(Shield, config=config, rejected=service.metrics.rejected, routed=routed)
    return app


def _routed(app: FastAPI, scope: Scope) -> bool:
    """Return whether there is a route for a path; the method may be another one."""
    return any(route.matches(scope)[0] is not Match.NONE for route in app.router.routes)


def _errors(app: FastAPI, service: Service) -> None:
    """Reply to every error in the format of OpenAI, and count it."""

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

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # for the log

    app.add_exception_handler(RequestValidationError, wrong)
    app.add_exception_handler(MmfastError, raised)
    app.add_exception_handler(HTTPException, unrouted)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, raised)  # of the guard itself; also logged


def _reply(service: Service, error: ApiError) -> JSONResponse:
    service.metrics.rejected(reason(error, {404: "unknown", 405: "unknown", 429: "busy"}))
    return JSONResponse(body(error), error.status, error.headers)
