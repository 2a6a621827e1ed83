"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine import base
from mmfast.serve.guard import logs
from mmfast.serve.guard.caller import Caller, caller_of
from mmfast.serve.guard.errors import ApiError, api_error, bad_request, body
from mmfast.serve.guard.media import load_media, load_sound
from mmfast.serve.http import events, schema
from mmfast.serve.http.service import Service

T = TypeVar("T")


@dataclass
class ChatReply:
    """The documents of one answer."""

    id: str
    model: str
    heard: list[str] = field(default_factory=list)  # transcript of each sound of the request
    seconds: float = 0.0  # duration of those sounds
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def usage(self, finish: base.Finish) -> dict[str, Any]:
        """Return the numbers of tokens."""
        details = schema.PromptDetails(
            cached_tokens=finish.cached_tokens,
            image_tokens=finish.trace.get("visual_tokens") or 0,
        )
        heard = schema.Transcribed(sounds=len(self.heard), seconds=round(self.seconds, 3))
        found = schema.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            total_tokens=finish.prompt_tokens + finish.completion_tokens,
            prompt_tokens_details=details,
            transcribed=heard if self.heard else None,
        ).model_dump(mode="json")
        if not self.heard:
            del found["transcribed"]
        return found

    def trace(self, finish: base.Finish) -> dict[str, Any]:
        """Return the trace with the transcripts."""
        return {**finish.trace, **({"heard": self.heard} if self.heard else {})}

    def whole(self, text: str, finish: base.Finish) -> dict[str, Any]:
        """Return the complete answer."""
        message = schema.AnswerMessage(content=text)
        found = schema.Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[schema.Choice(message=message, finish_reason=finish.reason)],
            mmfast=self.trace(finish),
        ).model_dump(mode="json")
        return {**found, "usage": self.usage(finish)}

    def chunk(
        self, delta: Mapping[str, Any], reason: str | None = None, **more: Any
    ) -> dict[str, Any]:
        """Return a chunk of a stream."""
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head(), "choices": [choice], **more}

    def counted(self, finish: base.Finish) -> dict[str, Any]:
        """Return the chunk after the last, with the usage and without a choice."""
        return {**self._head(), "choices": [], "usage": self.usage(finish)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
        }


class Reader:
    """Reads the messages of one request; `seconds` is the duration of all sounds."""

    def __init__(self, service: Service, options: schema.MmfastOptions) -> None:
        self._service, self._config = service, service.config
        self._options = options
        self._heard: dict[tuple[int, int], str] = {}
        self.seconds = 0.0

    @property
    def heard(self) -> list[str]:
        """Transcripts of the sounds in order."""
        return [self._heard[key] for key in sorted(self._heard)]

    async def messages(self, given: list[Any]) -> tuple[base.Message, ...]:
        """Read all messages, their media at the same time.

        `ApiError`: a limit is exceeded, nothing is asked, or a medium cannot be read.
        """
        self._check(given)
        return await _gathered(self._message(each, i) for i, each in enumerate(given))

    def _check(self, given: list[Any]) -> None:
        parts = [
            p for m in given for p in ([m.content] if isinstance(m.content, str) else m.content)
        ]
        texts = [p if isinstance(p, str) else p.text for p in parts if _is_text(p)]
        letters, limit = sum(map(len, texts)), self._config.max_text
        if letters > limit:
            raise _too_much(f"{letters:,} letters are too many; send at most {limit:,}")
        media, most = len(parts) - len(texts), self._config.max_media
        if media > most:
            raise _too_much(f"{media} images, clips and sounds are too many; send at most {most}")
        frames = self._options.frames or 0
        if frames > self._config.max_frames:
            raise bad_request(
                f"mmfast.frames={frames} is too many; ask for at most {self._config.max_frames}",
                "invalid_value",
                "mmfast.frames",
            )
        last = given[-1]
        if last.role != "user":
            raise bad_request(
                f"the last message is the {last.role}'s; end with one whose role is 'user'",
                "invalid_value",
                "messages",
            )
        own = [last.content] if isinstance(last.content, str) else last.content
        if not any(_asks(part) for part in own):
            raise bad_request(
                "the last message asks nothing; add a text",
                "invalid_value",
                f"messages[{len(given) - 1}].content",
            )

    async def _message(self, given: Any, number: int) -> base.Message:
        role: base.Role = "system" if given.role == "developer" else given.role
        if isinstance(given.content, str):
            return base.Message(role, (given.content,))
        parts = (self._part(part, (number, i)) for i, part in enumerate(given.content))
        return base.Message(role, await _gathered(parts))

    async def _part(self, part: Any, place: tuple[int, int]) -> str | base.Media:
        if isinstance(part, schema.TextPart):
            return part.text
        param = f"messages[{place[0]}].content[{place[1]}].{part.type}"
        try:
            if isinstance(part, schema.SoundPart):
                return await self._words(part.input_audio, place, param)
            if isinstance(part, schema.ImagePart):
                return await load_media(part.image_url.url, "image", self._config, param=param)
            options, url = self._options, part.video_url.url
            return await load_media(
                url, "video", self._config, frames=options.frames, fps=options.fps, param=param
            )
        except MmfastError as error:
            self._service.metrics.rejected("media")
            raise api_error(error, param) from error

    async def _words(self, sound: schema.RecordingData, place: tuple[int, int], param: str) -> str:
        pcm, rate = await load_sound(sound.data, self._config, format=sound.format, param=param)
        voice = await self._service.voice()
        heard = await self._service.in_voice_thread(_transcriber(voice, pcm, rate))
        self.seconds += len(pcm) / rate
        self._heard[place] = heard
        return heard


async def _gathered(work: Iterable[Coroutine[Any, Any, T]]) -> tuple[T, ...]:
    """Run coroutines at the same time; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _transcriber(voice: Any, pcm: Any, rate: int) -> Callable[[], str]:
    def transcribe() -> str:
        from mmfast.pipelines.omni_chat import written

        heard = voice.transcribe(pcm, rate).strip()
        if not heard:
            raise MmfastError("no word was understood in the sound; speak louder, or send text")
        return written(heard)

    return transcribe


def _is_text(part: Any) -> bool:
    return isinstance(part, str | schema.TextPart)


def _asks(part: Any) -> bool:
    if isinstance(part, str | schema.TextPart):
        return bool((part if isinstance(part, str) else part.text).strip())
    return isinstance(part, schema.SoundPart)


def _too_much(text: str) -> ApiError:
    return bad_request(text, "too_much", "messages")


PATIENCE = 2.0  # seconds to wait with the status of a stream, so that early errors get their own
HEARTBEAT = 15.0  # seconds between comments in a stream that waits
_log = logging.getLogger("mmfast.serve")
router = APIRouter(route_class=schema.JsonRoute)


@router.post(
    "/v1/chat/completions",
    response_model=schema.Completion,
    responses={
        **schema.ERRORS,
        200: {
            "description": "The answer; as `text/event-stream` where `stream` is true.",
            "content": {events.EVENTS: {"schema": events.EVENT_SCHEMA}},
        },
    },
    summary="Answer a conversation about images, clips, sound and text",
)
async def chat(asked: schema.ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    answer = ChatExchange(service, asked, caller_of(http.scope))
    work = answer.stream() if asked.stream else answer.whole()
    return await events.while_connected(http.receive, work)


class ChatExchange:
    """One request for a chat completion and its answer."""

    def __init__(self, service: Service, asked: schema.ChatRequest, caller: Caller) -> None:
        self._service, self._asked, self._caller = service, asked, caller
        self._start = self._last = time.perf_counter()
        self._reply = ChatReply(f"chatcmpl-{uuid.uuid4().hex}", asked.model)
        self._begun, self._said, self._spent = False, list[str](), 0
        _check(asked, service)

    async def whole(self) -> Response:
        """Answer with one document."""
        async with await self._run() as run:
            while True:
                found = self._noted(await run.next())
                if isinstance(found, base.Failure):
                    raise events.failed(found)
                if isinstance(found, base.Finish):
                    return JSONResponse(self._reply.whole("".join(self._said), found))

    async def stream(self) -> Response:
        """Answer with a stream; an early failure gets a status of its own."""
        run = await (await self._run()).__aenter__()
        try:
            first = self._noted(await run.next(PATIENCE))
            if isinstance(first, base.Failure):
                raise events.failed(first)
        except BaseException:
            run.close()
            raise
        return events.StreamedReply(self._chunks(run, first), events.EVENTS, run.close)

    async def _run(self) -> events.RequestRun:
        asked, service = self._asked, self._service
        options = asked.mmfast or schema.MmfastOptions()
        executor = await service.executor()
        reader = Reader(service, options)
        messages = await reader.messages(asked.messages)
        self._reply.heard, self._reply.seconds = reader.heard, reader.seconds
        request = base.Request(
            self._reply.id,
            messages,
            _sampling(asked, service.config),
            base.Options(options.reduce, options.cache, options.target_ttft_ms),
            # Results are separate for each user; turns are shared by all users of a key.
            f"{self._caller.tenant}/{asked.user or ''}",
            options.priority or 0,
            self._caller.tenant,
        )
        return events.RequestRun(executor, request)

    async def _chunks(
        self, run: events.RequestRun, first: base.Event | None
    ) -> AsyncGenerator[bytes, None]:
        reply = self._reply
        wants = self._asked.stream_options
        usage: dict[str, Any] = {"usage": None} if wants and wants.include_usage else {}
        opening = {"role": "assistant", "content": "", "refusal": None}
        yield events.event(reply.chunk(opening, **usage))
        found = first
        while not isinstance(found, base.Finish):
            if isinstance(found, base.Delta):
                yield events.event(reply.chunk({"content": found.text}, **usage))
            elif isinstance(found, base.Failure):
                # without [DONE], for the answer is not complete
                yield events.event(body(events.failed(found)))
                return
            found = self._noted(await run.next(HEARTBEAT))
            if found is None:
                yield events.WAITING
        yield events.event(reply.chunk({}, found.reason, mmfast=reply.trace(found), **usage))
        if usage:
            yield events.event(reply.counted(found))
        yield events.DONE

    def _noted(self, found: base.Event | None) -> base.Event | None:
        """Count an event in metrics, quotas and log."""
        now, metrics = time.perf_counter(), self._service.metrics
        if isinstance(found, base.Delta):
            self._said.append(found.text)
            self._caller.spend(found.tokens)  # as they come, also for clients that leave early
            self._spent += found.tokens
            if self._begun:
                metrics.gap(now - self._last, found.tokens)
            else:
                metrics.ttft(now - self._start)
            self._begun, self._last = True, now
        elif isinstance(found, base.Finish):
            metrics.finished(found)
            self._caller.spend(found.prompt_tokens + max(found.completion_tokens - self._spent, 0))
            self._log()
        return found

    def _log(self) -> None:
        """Log question and answer where the options ask for it."""
        config, content = self._service.config, self._asked.messages[-1].content
        if config.log_text:
            parts = [content] if isinstance(content, str) else content
            words = [p if isinstance(p, str) else getattr(p, "text", f"<{p.type}>") for p in parts]
            asked, said = logs.text(" ".join(words), config), logs.text("".join(self._said), config)
            fields = {"id": self._caller.id, "asked": asked, "answered": said}
            _log.info("answered", extra={"fields": fields})


def _check(asked: schema.ChatRequest, service: Service) -> None:
    """Check the request against the options of the server."""
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
        raise bad_request(
            f"{param}={longest} is too many; ask for at most {most}", "invalid_value", param
        )
    if asked.stream_options is not None and not asked.stream:
        raise bad_request(
            "stream_options go with stream=true; set it, or leave them out",
            "invalid_value",
            "stream_options",
        )


def _sampling(asked: schema.ChatRequest, config: ServerConfig) -> base.SamplingOptions:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return base.SamplingOptions(
        asked.longest or min(config.default_tokens, config.max_tokens),
        asked.temperature or 0.0,
        1.0 if asked.top_p is None else asked.top_p,
        asked.seed,
        tuple(stop),
    )
