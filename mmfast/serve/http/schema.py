"""Requests and replies of the API: those of OpenAI, with clips and the `mmfast` options.

Parameters without an effect here are accepted with the value that matches the behaviour (`n=1`,
`logprobs=false`, …); every other value or parameter is refused by name (`app.refusal`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

Text = Annotated[str, Field(max_length=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Spec = Annotated[str, Field(min_length=1, max_length=500)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]


class Strict(BaseModel):
    """A model that refuses unknown parameters and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """A text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    """A `data:` URL of an image, or a URL of a host that the server allows."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class VideoUrl(Strict):
    """A URL of a clip, as in `ImageUrl`; `mmfast` has the options of sampling."""

    url: Annotated[str, Field(min_length=1)]


class RecordingData(Strict):
    """A recording, base64-encoded."""

    data: Annotated[str, Field(min_length=1)]
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "webm"]


class ImagePart(Strict):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(Strict):
    """A clip."""

    type: Literal["video_url"]
    video_url: VideoUrl


class SoundPart(Strict):
    """A recording of speech, which is transcribed and asked as text."""

    type: Literal["input_audio"]
    input_audio: RecordingData


Part = Annotated[
    TextPart | ImagePart | VideoPart | SoundPart,
    Field(discriminator="type"),
]


class UserMessage(Strict):
    """A message of the user: texts and media."""

    role: Literal["user"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=256)]
    name: Name | None = None


class SystemMessage(Strict):
    """An instruction for the whole conversation."""

    role: Literal["system", "developer"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]
    name: Name | None = None


class AssistantMessage(Strict):
    """An earlier answer; the message of a reply can be sent back unchanged."""

    role: Literal["assistant"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]
    name: Name | None = None
    refusal: None = None
    audio: None = None
    annotations: Nothing | None = None
    function_call: None = None
    tool_calls: Nothing | None = None


Message = Annotated[
    UserMessage | SystemMessage | AssistantMessage,
    Field(discriminator="role"),
]


class StreamOptions(Strict):
    """Options of `stream`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainText(Strict):
    """Plain text, the only format of answers."""

    type: Literal["text"]


class MmfastOptions(Strict):
    """Options of this server: reduction of media and caches, and sampling of clips.

    `reduce` and `cache` are spec strings; for `target_ttft_ms` the planner picks the reducers;
    `priority` orders the requests of one key; `frames` or `fps` set the sampling of clips.
    """

    reduce: Spec | None = None
    cache: Spec | None = None
    target_ttft_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None
    frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None


class ChatRequest(Strict):
    """A conversation to continue."""

    model: Name
    messages: Annotated[list[Message], Field(min_length=1, max_length=512)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=4),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    mmfast: MmfastOptions | None = None
    # parameters of OpenAI with one possible value
    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    response_format: PlainText | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens of the answer, by either name."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechRequest(Strict):
    """A text to speak."""

    model: Name
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    voice: Name
    response_format: Format | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    instructions: Annotated[str, Field(max_length=0)] | None = None


class ErrorDetail(BaseModel):
    """An error in one line."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None


class ErrorReply(BaseModel):
    """Reply of every error."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Cached tokens of the prompt, and tokens of its images and clips."""

    cached_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0


class Transcribed(BaseModel):
    """Transcribed sounds; their words count as text."""

    sounds: int
    seconds: float


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    transcribed: Transcribed | None = None


class AnswerMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The only choice of a completion."""

    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """A complete answer; `mmfast` is its trace."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    mmfast: dict[str, Any] = Field(default_factory=dict)


class ModelCard(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmfast"


class Models(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthReply(BaseModel):
    """State of the process (`/health`) and of the engine (`/ready`)."""

    status: Literal["ok", "loading", "busy", "failed"]
    running: int = 0
    waiting: int = 0


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text}
    for status, text in (
        (400, "The request is wrong; the message says what and how to correct it."),
        (401, "No key, or a wrong one."),
        (404, "No such model or route."),
        (408, "The request came too slowly."),
        (413, "The request is too large."),
        (429, "Too many requests; see Retry-After."),
        (431, "The headers are too large."),
        (500, "The server's fault."),
        (503, "Not loaded, or a worker was lost; try again."),
    )
}


LARGE = 1 << 18  # bytes from which parsing would delay other requests


class JsonRequest(Request):
    """A request whose JSON is parsed in a thread if it is large; the guard has measured it."""

    async def json(self) -> Any:
        """Parse the body; JSONDecodeError where it is not JSON."""
        if not hasattr(self, "_json"):
            body = await self.body()
            if len(body) < LARGE:
                self._json = json.loads(body)
            else:
                self._json = await asyncio.to_thread(large, body)
        return self._json


def large(body: bytes) -> Any:
    """Parse a large body from its bytes; JSONDecodeError where it is not JSON.

    Decoded as a whole, a single letter beyond Latin-1 would turn each byte of base64 into four.
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
