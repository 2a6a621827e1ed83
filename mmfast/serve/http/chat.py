"""`POST /v1/chat/completions`: documents, streams and calls of tools."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from mmfast.serve.calls import (
    before_call,
    call_schema,
    choice_fault,
    read_calls,
    without_calls,
)
from mmfast.serve.engine import base
from mmfast.serve.guard.caller import Caller, caller_of
from mmfast.serve.guard.errors import bad_request
from mmfast.serve.http import events, schema
from mmfast.serve.http.exchange import AnswerSet, Reader, parts_of
from mmfast.serve.http.service import Service

router = APIRouter(route_class=schema.JsonRoute)
SAMPLING = ("fps", "num_frames")  # arguments of the processor that sample a clip
PIXELS = ("min_pixels", "max_pixels")
# Arguments of `apply_chat_template` that no request may set: a template of a client would run here.
OWN = {"chat_template", "conversation", "documents", "tools", "tokenize", "return_dict", "padding"}
OWN |= {"return_tensors", "return_assistant_tokens_mask", "processor_kwargs", "truncation"}
OWN |= {"load_audio_from_video", "sanitize_control_tokens", "max_length"}


@router.post(
    "/v1/chat/completions",
    response_model=schema.Completion,
    responses=schema.STREAMED,
    summary="Answer a conversation about images, clips, sound and text",
)
async def chat(asked: schema.ChatRequest, http: HttpRequest) -> Response:
    """Answer a conversation."""
    if asked.top_logprobs and not asked.logprobs:
        text = f"top_logprobs={asked.top_logprobs} needs logprobs=true; send both, or neither"
        raise bad_request(text, "invalid_value", "top_logprobs")
    answer = ChatExchange(http.app.state.service, asked, caller_of(http.scope))
    work = answer.stream() if asked.stream else answer.whole()
    return await events.while_connected(http.receive, work)


class Tools:
    """The tools of a request, and the calls in its answers.

    A call that is asked for by name or as `required` follows a grammar; one of the model's own
    accord is read from its text, as `<tool_call>{…}</tool_call>` or as JSON alone.
    """

    def __init__(self, asked: schema.ChatRequest) -> None:
        choice = asked.tool_choice
        self.given = [] if choice == "none" else list(asked.tools or ())
        self._one = asked.parallel_tool_calls is False
        names = [tool.function.name for tool in self.given]
        self.named = choice.function.name if isinstance(choice, schema.NamedTool) else None
        if wrong := choice_fault(choice, self.named, names):
            raise bad_request(wrong, "invalid_value", "tool_choice")
        self.forced = self.named is not None or choice == "required"

    @property
    def documents(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.model_dump(mode="json", exclude_none=True) for tool in self.given]

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of a call that is asked for."""
        known = {tool.function.name: tool.function.parameters for tool in self.given}
        if self.named is not None:
            return known[self.named] or {"type": "object"}
        return call_schema(known)

    def certain(self, text: str) -> int:
        """Return the letters of an unfinished answer that are no part of a call."""
        if not self.given:
            return len(text)
        if self.forced or text.lstrip()[:1] in ("", "{", "["):
            return 0
        return len(text[: before_call(text)].rstrip())  # space before a call is part of nothing

    def split(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Return the text and the calls of an answer; no text where there are calls alone."""
        if not self.given:
            return text, []
        if self.named is not None:
            return None, [_call(self.named, text)]
        rest, written = text[: before_call(text)], list[str]()
        deque(without_calls([text], written), maxlen=0)  # words behind a call are left out
        if not written and text.lstrip()[:1] in ("{", "["):
            rest, written = "", [text]
        names = {tool.function.name for tool in self.given}
        calls = [_call(*call) for each in written for call in read_calls(each, names)]
        if not calls:
            return text, []
        return rest.rstrip() or None, calls[:1] if self._one else calls


def _call(name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def logprobs_of(chances: Sequence[base.TokenChance]) -> dict[str, Any]:
    """Return the document of log-probabilities."""

    def entry(token: bytes, chance: float) -> dict[str, Any]:
        text = token.decode("utf-8", "replace")
        return {"token": text, "logprob": max(chance, -9999.0), "bytes": list(token)}

    content = [
        {**entry(c.token, c.chance), "top_logprobs": [entry(*each) for each in c.top]}
        for c in chances
    ]
    return {"content": content, "refusal": None}


def format_schema(given: Any) -> Any:
    """Return the JSON schema that the format of an answer asks for; None for plain text."""
    if isinstance(given, schema.JsonObject):
        return {"type": "object"}
    return (given.json_schema.schema_ or {}) if isinstance(given, schema.JsonSchema) else None


class ChatExchange:
    """One request for a chat completion and its answers."""

    def __init__(self, service: Service, asked: schema.ChatRequest, caller: Caller) -> None:
        self._service, self._asked = service, asked
        self.created, self.tools = int(time.time()), Tools(asked)  # seconds since 1970
        self.answers = AnswerSet(service, asked, caller, f"chatcmpl-{uuid.uuid4().hex}")
        self.heard, self.seconds = list[str](), 0.0  # transcripts, and the duration of the sounds
        self._sent = dict[int, int]()  # letters of each answer that are in the stream

    async def whole(self) -> Response:
        """Answer with one document."""
        await self.answers.whole(await self.run())
        self._log()
        return JSONResponse(self._document(), headers=self.answers.headers)

    async def stream(self) -> Response:
        """Answer with a stream; an early failure gets a status of its own."""
        run = await self.run()
        return await self.answers.stream(run, self._part, self._end(), self._start())

    async def run(self) -> events.RequestRun:
        """Read the messages and hand them to the engine."""
        asked, answers, tools = self._asked, self.answers, self.tools
        options, processor = self._processing()
        reader = Reader(self._service, options, answers.charge, processor, answers.owner)
        messages = await reader.messages(asked.messages)
        self.heard, self.seconds = reader.heard, reader.seconds
        template = dict(asked.chat_template_kwargs or {})
        if wrong := sorted(OWN & template.keys()):
            text = f"chat_template_kwargs.{wrong[0]} is the server's own; leave it out"
            raise bad_request(text, param="chat_template_kwargs")
        for name in ("add_generation_prompt", "continue_final_message"):
            if (value := getattr(asked, name)) is not None:
                template[name] = value
        if template.get("continue_final_message"):
            template.setdefault("add_generation_prompt", False)
        if tools.given and not tools.forced:
            template["tools"] = tools.documents
        given = base.Options(
            options.reduce,
            options.cache,
            options.target_ttft_ms,
            options.prefill,
            options.decode,
            options.reuse,
            tuple(options.modules or ()),
            options.arguments or {},
            template=template,
            processor=processor,
        )
        grammar = tools.schema if tools.forced else format_schema(asked.response_format)
        return await answers.run([(messages, given)], grammar)

    def _processing(self) -> tuple[schema.MmfastOptions, dict[str, Any]]:
        """Return the options of this server, and the arguments of the model's processor."""
        asked, given = self._asked, dict(self._asked.mm_processor_kwargs or {})
        options = asked.mmfast or schema.MmfastOptions()
        sampled = {n: given.pop(n) for n in SAMPLING if given.get(n) is not None}
        most = self._service.config.max_pixels
        for name, value in {**sampled, **given}.items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            fine = whole and 0 < value <= most and name in (*SAMPLING, *PIXELS)
            if not (fine or (name == "fps" and isinstance(value, float) and 0 < value <= 1000)):
                raise bad_request(
                    f"mm_processor_kwargs.{name[:80]}={str(value)[:40]!r} is not possible; give "
                    f"{', '.join((*SAMPLING, *PIXELS))} as numbers of at most {most}",
                    param="mm_processor_kwargs",
                )
        more = {"frames": sampled.get("num_frames"), "fps": sampled.get("fps")}
        own = options.frames is None and options.fps is None
        return (options.model_copy(update=more) if own else options), given

    def _document(self) -> dict[str, Any]:
        answers, choices = self.answers, []
        for i, end in sorted(answers.ends.items()):
            text, calls = self.tools.split(answers.texts.get(i, ""))
            message = schema.AnswerMessage(content=text).model_dump(exclude={"tool_calls"})
            chances = answers.chances.get(i, [])
            choices.append(
                {
                    "index": i,
                    "message": {**message, **({"tool_calls": calls} if calls else {})},
                    "logprobs": logprobs_of(chances) if self._asked.logprobs else None,
                    "finish_reason": _reason(end, calls),
                }
            )
        found = {**self._head("chat.completion"), "choices": choices, "mmfast": self._trace()}
        return {**found, "usage": answers.usage(self.heard, self.seconds)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.answers.name,
            "object": kind,
            "created": self.created,
            "model": self._asked.model,
        }

    def _trace(self) -> dict[str, Any]:
        """Return the trace of the first answer, with the transcripts."""
        trace = dict(self.answers.ends[0].trace) if 0 in self.answers.ends else {}
        return {**trace, **({"heard": self.heard} if self.heard else {})}

    def _chunk(
        self,
        number: int,
        delta: Mapping[str, Any],
        reason: str | None = None,
        chances: Sequence[base.TokenChance] = (),
        **more: Any,
    ) -> bytes:
        wants = self._asked.stream_options
        if wants and wants.include_usage:
            more["usage"] = self.answers.usage() if wants.continuous_usage_stats else None
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": reason}
        if chances:
            choice["logprobs"] = logprobs_of(chances)
        return events.event({**self._head("chat.completion.chunk"), "choices": [choice], **more})

    def _start(self) -> Iterator[bytes]:
        for i in range(self.answers.total):
            yield self._chunk(i, {"role": "assistant", "content": "", "refusal": None})

    def _part(self, i: int, event: base.Event) -> Iterator[bytes]:
        sent = self._sent.get(i, 0)
        if isinstance(event, base.Finish):
            yield from self._last(i, event, sent)
        elif isinstance(event, base.Delta):
            text = self.answers.texts[i]
            stop = self._sent[i] = max(self.tools.certain(text), sent)
            if stop > sent or event.logprobs:
                yield self._chunk(i, {"content": text[sent:stop]}, None, event.logprobs)

    def _end(self) -> Iterator[bytes]:
        if (wants := self._asked.stream_options) and wants.include_usage:
            usage = {"usage": self.answers.usage(self.heard, self.seconds)}
            yield events.event({**self._head("chat.completion.chunk"), "choices": [], **usage})
        self._log()
        yield events.DONE

    def _last(self, i: int, end: base.Finish, sent: int) -> list[bytes]:
        """Return the chunks of what was held back, and of the reason of the end."""
        text, calls = self.tools.split(self.answers.texts.get(i, ""))
        found = []
        if rest := (text or "")[sent:]:
            found.append(self._chunk(i, {"content": rest}))
        if calls:
            numbered = [{"index": n, **call} for n, call in enumerate(calls)]
            found.append(self._chunk(i, {"tool_calls": numbered}))
        more: dict[str, Any] = {} if i else {"mmfast": self._trace()}
        return [*found, self._chunk(i, {}, _reason(end, calls), **more)]

    def _log(self) -> None:
        parts = parts_of(self._asked.messages[-1])
        words = [p if isinstance(p, str) else getattr(p, "text", f"<{p.type}>") for p in parts]
        self.answers.log(" ".join(words))


def _reason(end: base.Finish, calls: Sequence[Any]) -> str:
    return "tool_calls" if calls and end.reason == "stop" else end.reason
