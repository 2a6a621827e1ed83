"""`POST /v1/chat/completions`."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Delta, Event, Failure, Finish, Options, Request, Sampling
from mmfast.serve.guard import logs
from mmfast.serve.guard.caller import Caller, caller_of
from mmfast.serve.guard.errors import ApiError, body
from mmfast.serve.http.chat_reply import Reply
from mmfast.serve.http.chat_request import ChatRequest, MmfastOptions
from mmfast.serve.http.conversation import Reader
from mmfast.serve.http.event_stream import DONE, EVENT_SCHEMA, EVENTS, WAITING, Growing, event
from mmfast.serve.http.json_route import JsonRoute
from mmfast.serve.http.replies import ERRORS, Completion
from mmfast.serve.http.running import Run, failed, unless_gone
from mmfast.serve.http.service import Service

PATIENCE = 2.0  # seconds for which a stream waits with its status: what fails at once gets its own
HEARTBEAT = 15.0  # seconds between signs of life of a stream that has to wait
_log = logging.getLogger("mmfast.serve")
router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=Completion,
    responses={
        **ERRORS,
        200: {
            "description": "The answer; as `text/event-stream` where `stream` is true.",
            "content": {EVENTS: {"schema": EVENT_SCHEMA}},
        },
    },
    summary="Answer a conversation about images, clips, sound and text",
)
async def chat(asked: ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    answer = Answer(service, asked, caller_of(http.scope))
    if asked.stream:
        return await unless_gone(http, answer.stream())
    return await unless_gone(http, answer.whole())


class Answer:
    """One request of a client and its answer."""

    def __init__(self, service: Service, asked: ChatRequest, caller: Caller) -> None:
        self._service, self._asked, self._caller = service, asked, caller
        self._start = self._last = time.perf_counter()
        self._reply = Reply(f"chatcmpl-{uuid.uuid4().hex}", asked.model)
        self._begun, self._said, self._spent = False, list[str](), 0
        _check(asked, service)

    async def whole(self) -> Response:
        """The answer in one document."""
        async with await self._run() as run:
            while True:
                found = self._noted(await run.next())
                if isinstance(found, Failure):
                    raise failed(found)
                if isinstance(found, Finish):
                    return JSONResponse(self._reply.whole("".join(self._said), found))

    async def stream(self) -> Response:
        """The answer as it comes; what fails at once is an error with a status of its own."""
        run = await (await self._run()).__aenter__()
        try:
            first = self._noted(await run.next(PATIENCE))
            if isinstance(first, Failure):
                raise failed(first)
        except BaseException:
            run.close()
            raise
        return Growing(self._chunks(run, first), EVENTS, run.close)

    async def _run(self) -> Run:
        asked, service = self._asked, self._service
        options = asked.mmfast or MmfastOptions()
        executor = await service.executor()
        reader = Reader(service, options)
        messages = await reader.messages(asked.messages)
        self._reply.heard, self._reply.seconds = reader.heard, reader.seconds
        request = Request(
            self._reply.id,
            messages,
            _sampling(asked, service.config),
            Options(options.reduce, options.cache, options.target_ttft_ms),
            # Results are kept apart by user; turns are the key's, however many users it names.
            f"{self._caller.tenant}/{asked.user or ''}",
            options.priority or 0,
            self._caller.tenant,
        )
        return Run(executor, request)

    async def _chunks(self, run: Run, first: Event | None) -> AsyncGenerator[bytes, None]:
        reply = self._reply
        wants = self._asked.stream_options
        usage: dict[str, Any] = {"usage": None} if wants and wants.include_usage else {}
        yield event(reply.chunk({"role": "assistant", "content": "", "refusal": None}, **usage))
        found = first
        while not isinstance(found, Finish):
            if isinstance(found, Delta):
                yield event(reply.chunk({"content": found.text}, **usage))
            elif isinstance(found, Failure):
                yield event(body(failed(found)))  # and no [DONE]: the answer is not whole
                return
            found = self._noted(await run.next(HEARTBEAT))
            if found is None:
                yield WAITING
        yield event(reply.chunk({}, found.reason, mmfast=reply.trace(found), **usage))
        if usage:
            yield event(reply.counted(found))
        yield DONE

    def _noted(self, found: Event | None) -> Event | None:
        """Count what came."""
        now, metrics = time.perf_counter(), self._service.metrics
        if isinstance(found, Delta):
            self._said.append(found.text)
            self._caller.spend(found.tokens)  # as it comes: who leaves early pays, too
            self._spent += found.tokens
            if self._begun:
                metrics.gap(now - self._last, found.tokens)
            else:
                metrics.ttft(now - self._start)
            self._begun, self._last = True, now
        elif isinstance(found, Finish):
            metrics.finished(found)
            self._caller.spend(found.prompt_tokens + max(found.completion_tokens - self._spent, 0))
            self._log()
        return found

    def _log(self) -> None:
        """What was asked and answered, where the owner wants that."""
        config, content = self._service.config, self._asked.messages[-1].content
        if config.log_text:
            parts = [content] if isinstance(content, str) else content
            words = [p if isinstance(p, str) else getattr(p, "text", f"<{p.type}>") for p in parts]
            asked, said = logs.text(" ".join(words), config), logs.text("".join(self._said), config)
            fields = {"id": self._caller.id, "asked": asked, "answered": said}
            _log.info("answered", extra={"fields": fields})


def _check(asked: ChatRequest, service: Service) -> None:
    """What pydantic cannot know."""
    if asked.model != service.model:
        raise ApiError(
            404,
            f"model {asked.model[:80]!r} is not here; ask for {service.model!r} (GET /v1/models)",
            code="model_not_found",
            param="model",
        )
    most, longest = service.config.max_tokens, asked.longest
    if longest is not None and longest > most:
        param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        raise ApiError(
            400,
            f"{param}={longest} is too many; ask for at most {most}",
            code="invalid_value",
            param=param,
        )
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(
            400,
            "stream_options go with stream=true; set it, or leave them out",
            code="invalid_value",
            param="stream_options",
        )


def _sampling(asked: ChatRequest, config: ServerConfig) -> Sampling:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return Sampling(
        asked.longest or min(config.default_tokens, config.max_tokens),
        asked.temperature or 0.0,
        1.0 if asked.top_p is None else asked.top_p,
        asked.seed,
        tuple(stop),
    )
