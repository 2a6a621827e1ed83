"""`POST /v1/responses`: a translation to a conversation, and of its answer to items and events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import Field, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.serve.engine import base
from mmfast.serve.guard.caller import Caller, caller_of
from mmfast.serve.guard.errors import ApiError, bad_request, body
from mmfast.serve.http import events, schema
from mmfast.serve.http.chat import ChatExchange, logprobs_of
from mmfast.serve.http.service import Service

router = APIRouter(route_class=schema.JsonRoute)


class ResponseRequest(schema.Strict):
    """A text, or items of a conversation, to answer."""

    model: schema.Name
    input: schema.Text | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=512)]
    instructions: schema.Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    previous_response_id: Any = None
    background: bool | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    n: Literal[1] | None = None


_SAME = (
    "model", "priority", "parallel_tool_calls", "temperature", "top_p", "top_k", "seed", "stream",
    "user", "mmfast", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "top_logprobs", "chat_template_kwargs", "mm_processor_kwargs", "repetition_penalty",
)  # fmt: skip
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def translated(asked: ResponseRequest) -> schema.ChatRequest:
    """Return the request for a chat completion that asks for the same; `ApiError` if there is none.

    Parameters of this route without effect stay in it, as unknown ones.
    """
    rest = dict(asked.model_extra or {})
    given = {name: rest.pop(name) for name in _SAME if name in rest} | {"model": asked.model}
    if "message.output_text.logprobs" in (asked.include or ()):
        given["logprobs"] = True
    elif asked.include:
        rest["include"] = asked.include
    given.setdefault("top_logprobs", None)
    given["max_completion_tokens"] = asked.max_output_tokens
    start = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    given["messages"] = start + _messages(asked.input)
    rest |= {f"text.{name}": each for name, each in (asked.text or {}).items() if name != "format"}
    form = (asked.text or {}).get("format")
    if isinstance(form, dict):
        own = {k: v for k, v in form.items() if k != "type"}
        wraps = form.get("type") == "json_schema"
        given["response_format"] = {"type": "json_schema", "json_schema": own} if wraps else form
    elif form is not None:
        text = "give an object with a type, such as text, json_object or json_schema"
        raise bad_request(f"text.format is {str(form)[:60]!r}; {text}", param="text.format")
    kinds = [tool.get("type") for tool in asked.tools or ()]
    if wrong := [kind for kind in kinds if kind != "function"]:
        raise bad_request(f"tools of type {str(wrong[0])[:60]!r} are not here; give functions")
    given["tools"] = [{"type": "function", "function": _without(t)} for t in asked.tools or ()]
    choice = asked.tool_choice
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    given["tool_choice"] = choice
    if "messages" in rest:
        raise bad_request("messages are those of a chat completion; give input", param="messages")
    if asked.previous_response_id is not None:
        text = "previous_response_id: answers are not kept here; send the conversation as input"
        raise bad_request(text, param="previous_response_id")
    if asked.background:
        raise bad_request("background answers are not kept here; leave it out", param="background")
    found = {**{k: v for k, v in given.items() if v is not None}, **rest}
    try:
        return schema.ChatRequest.model_validate(found)
    except ValidationError as error:
        items = {**found, "input": given["messages"][len(start) :]}
        raise RequestValidationError(_named(error, len(start)), body=items) from None


def _named(error: ValidationError, start: int) -> list[Any]:
    """Return errors of messages as those of the items of `input`, behind so many messages."""
    found = []
    for each in error.errors():
        where = each["loc"]
        if where[:1] == ("messages",) and len(where) > 1 and isinstance(where[1], int):
            where = ("input", where[1] - start, *where[2:])
        found.append({**each, "loc": where})
    return found


def _without(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            content = item.get("content")
            parts = [_part(p) for p in content] if isinstance(content, list) else content
            found.append({"role": item.get("role"), "content": parts})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if found and found[-1].get("tool_calls"):
                found[-1]["tool_calls"].append(call)
            else:
                found.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            output = item.get("output")
            parts = [_part(p) for p in output] if isinstance(output, list) else output
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": parts})
        elif kind != "reasoning":  # of another model: nothing that a template reads
            text = (
                f"input[{i}].type is {str(kind)[:60]!r}; give message, function_call or its output"
            )
            raise bad_request(text, param=f"input[{i}].type")
    return found


def _part(part: Any) -> Any:
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    if kind == "input_image":
        picture = {"url": part.get("image_url"), "detail": part.get("detail")}
        return {"type": "image_url", "image_url": picture}
    if kind in _PARTS:
        return {"type": _PARTS[kind], _PARTS[kind]: part.get(_PARTS[kind])}
    return part  # as in a chat: video_url, input_audio


@router.post(
    "/v1/responses",
    response_class=JSONResponse,
    responses=schema.STREAMED,
    summary="Answer as OpenAI's Responses API does; nothing is stored",
)
async def responses(asked: ResponseRequest, http: HttpRequest) -> Response:
    """Answer a conversation of items."""
    reply = ResponseReply(http.app.state.service, asked, caller_of(http.scope))
    work = reply.stream() if reply.streams else reply.whole()
    return await events.while_connected(http.receive, work)


class ResponseReply:
    """One request and its answer as items."""

    def __init__(self, service: Service, asked: ResponseRequest, caller: Caller) -> None:
        self._asked, self._chat = asked, translated(asked)
        self._exchange = ChatExchange(service, self._chat, caller)
        self._answers, self.streams = self._exchange.answers, bool(self._chat.stream)
        self._id, self._item = f"resp_{uuid.uuid4().hex}", f"msg_{uuid.uuid4().hex}"
        self._created, self._number = int(time.time()), count()
        self._sent, self._opened = 0, False  # letters of the message, and its announcement
        self._place = {"item_id": self._item, "output_index": 0, "content_index": 0}

    async def whole(self) -> Response:
        """Answer with one document."""
        await self._answers.whole(await self._exchange.run())
        return JSONResponse(self._document(self._output()), headers=self._answers.headers)

    async def stream(self) -> Response:
        """Answer with events."""
        run = await self._exchange.run()
        start = (
            self._event(f"response.{kind}", response=self._document(None))
            for kind in ("created", "in_progress")
        )
        return await self._answers.stream(run, self._delta, self._end(), start, self._failed)

    def _document(self, output: list[Any] | None) -> dict[str, Any]:
        end = self._answers.ends.get(0)
        cut = end is not None and end.reason == "length"
        status = "in_progress" if output is None else "incomplete" if cut else "completed"
        chat = self._chat
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": chat.metadata or {},
            "model": chat.model,
            "output": output or [],
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": chat.temperature,
            "text": self._asked.text or {"format": {"type": "text"}},
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": self._asked.tools or [],
            "top_p": chat.top_p,
            "truncation": "disabled",
            "usage": None if output is None else self._usage(),
            "mmfast": {} if end is None else end.trace,
        }

    def _usage(self) -> dict[str, Any]:
        found = self._answers.usage(self._exchange.heard, self._exchange.seconds)
        cached = found["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": found["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": found["total_tokens"],
        }

    def _output(self) -> list[dict[str, Any]]:
        text, calls = self._exchange.tools.split(self._answers.texts.get(0, ""))
        found = [self._message(text)] if text is not None else []
        for call in calls:
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "completed"}
            found.append({**item, "call_id": call["id"], **call["function"]})
        return found

    def _message(self, text: str | None) -> dict[str, Any]:
        content = [] if text is None else [self._text(text)]
        status = "in_progress" if text is None else "completed"
        item = {"id": self._item, "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _text(self, text: str) -> dict[str, Any]:
        chances = self._answers.chances.get(0, []) if text and self._chat.logprobs else []
        found = logprobs_of(chances)["content"]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}

    def _event(self, kind: str, **more: Any) -> bytes:
        document = {"type": kind, "sequence_number": next(self._number), **more}
        return events.event(document, kind)

    def _delta(self, _: int, event: base.Event) -> Iterator[bytes]:
        if isinstance(event, base.Delta):
            text = self._answers.texts[0]
            if (stop := self._exchange.tools.certain(text)) > self._sent:
                yield from self._said(text[:stop])

    def _failed(self, error: ApiError) -> bytes:
        document = {**self._document([]), "status": "failed"}
        document["error"] = {"code": "server_error", **body(error)["error"]}
        return self._event("response.failed", response=document)

    def _end(self) -> Iterator[bytes]:
        output = self._output()
        for index, item in enumerate(output):
            yield from self._item_events(index, item)
        cut = self._answers.ends[0].reason == "length"
        kind = "incomplete" if cut else "completed"
        yield self._event(f"response.{kind}", response=self._document(output))

    def _said(self, text: str) -> Iterator[bytes]:
        """Yield what of the message was not sent yet, behind what announces it."""
        if not self._opened:
            self._opened, item = True, self._message(None)
            yield self._event("response.output_item.added", output_index=0, item=item)
            part = self._text("")
            yield self._event("response.content_part.added", **self._place, part=part)
        if more := text[self._sent :]:
            self._sent = len(text)
            yield self._event("response.output_text.delta", **self._place, delta=more, logprobs=[])

    def _item_events(self, index: int, item: dict[str, Any]) -> Iterator[bytes]:
        """Yield the events that complete an item."""
        if item["type"] == "message":
            part = item["content"][0]
            yield from self._said(part["text"])
            done = {"text": part["text"], "logprobs": []}
            yield self._event("response.output_text.done", **self._place, **done)
            yield self._event("response.content_part.done", **self._place, part=part)
        else:
            at = {"item_id": item["id"], "output_index": index}
            given, kind = item["arguments"], "response.function_call_arguments"
            opening = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=index, item=opening)
            yield self._event(f"{kind}.delta", **at, delta=given)
            yield self._event(f"{kind}.done", **at, arguments=given, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)
