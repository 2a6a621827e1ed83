"""Requests and replies of the API: those of OpenAI, with clips and the `mmfast` options.

Unknown parameters are taken and named in the header `x-mmfast-ignored`, or refused by a strict
server (`ignored`); so are known ones without an effect here (`store`, `service_tier`, …).
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

from mmfast.serve.http.events import EVENT_SCHEMA, EVENTS

Text = Annotated[str, Field(max_length=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Spec = Annotated[str, Field(min_length=1, max_length=500)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Arguments = Annotated[dict[str, Any], Field(max_length=64)]


class Strict(BaseModel):
    """A model that converts no types; unknown parameters are kept apart, see `ignored`."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


# Parameters of OpenAI that are taken and change nothing here; `detail` is one of a picture.
WITHOUT_EFFECT = ("store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")
_IDLE: tuple[Any, ...] = (None, False, {}, "auto", "default")


def ignored(value: Any, at: str = "") -> list[str]:
    """Return the parameters of a request that have no effect, as `messages[0].foo`."""
    if isinstance(value, list):
        return [name for i, each in enumerate(value) for name in ignored(each, f"{at}[{i}]")]
    if not isinstance(value, Strict):
        return []
    start = f"{at}." if at else ""
    found = [f"{start}{name}" for name in value.model_extra or ()]
    for name in value.model_fields_set & value.__class__.model_fields.keys():
        given = getattr(value, name)
        alone = name == "top_logprobs" and not getattr(value, "logprobs", None)
        if (alone or name in (("detail",) if at else WITHOUT_EFFECT)) and given not in _IDLE:
            found.append(start + name)
        found += ignored(given, start + name)
    return sorted(found)


class TextPart(Strict):
    """A text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    """A `data:` URL of an image, or a URL of a host that the server allows."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Strict):
    """A URL of a clip, as in `ImageUrl`; `mmfast` has the options of sampling."""

    url: Annotated[str, Field(min_length=1)]


class RecordingData(Strict):
    """A recording, base64-encoded."""

    data: Annotated[str, Field(min_length=1)]
    format: Literal["wav", "mp3", "flac", "ogg", "opus", "m4a", "webm"]


class SoundUrl(Strict):
    """A `data:` URL of a recording, or a URL of a host that the server allows."""

    url: Annotated[str, Field(min_length=1)]


class ImagePart(Strict):
    """An image; one sent before with a `uuid` of the client's is named by that alone."""

    type: Literal["image_url"]
    image_url: ImageUrl | None = None
    uuid: Name | None = None


class VideoPart(Strict):
    """A clip."""

    type: Literal["video_url"]
    video_url: VideoUrl


class SoundPart(Strict):
    """A recording of speech, which is transcribed and asked as text."""

    type: Literal["input_audio"]
    input_audio: RecordingData


class SoundUrlPart(Strict):
    """A recording of speech by its URL; see `SoundPart`."""

    type: Literal["audio_url"]
    audio_url: SoundUrl


class RefusalPart(Strict):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: Text


Part = Annotated[
    TextPart | ImagePart | VideoPart | SoundPart | SoundUrlPart,
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


class FunctionCall(Strict):
    """A function with its arguments, a JSON text."""

    name: Name
    arguments: Text


class ToolCall(Strict):
    """A call of a function in an earlier answer."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


SaidPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


class AssistantMessage(Strict):
    """An earlier answer; the message of a reply can be sent back unchanged."""

    role: Literal["assistant"]
    content: Text | Annotated[list[SaidPart], Field(max_length=256)] | None = None
    name: Name | None = None
    refusal: Text | None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=256)] | None = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None


class ToolMessage(Strict):
    """The result of a call."""

    role: Literal["tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]
    tool_call_id: Name


Message = Annotated[
    UserMessage | SystemMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class StreamOptions(Strict):
    """Options of `stream`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class PlainText(Strict):
    """Plain text."""

    type: Literal["text"]


class JsonObject(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema and its name."""

    name: Name
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class JsonSchema(Strict):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class Function(Strict):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function as a tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """The name of a function."""

    name: Name


class NamedTool(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class MmfastOptions(Strict, extra="forbid"):
    """Options of this server: reduction of media and caches, and sampling of clips.

    `reduce`, `cache`, `prefill`, `decode` and `reuse` are spec strings, and for the first four
    `none` overrules the server's; for `target_ttft_ms` the planner picks the reducers; `priority`
    orders the requests of one key, higher first; `frames` or `fps` set the sampling of clips;
    `modules` of the server's schema, with `arguments` of their parameters, stand in front.
    """

    reduce: Spec | None = None
    cache: Spec | None = None
    prefill: Spec | None = None
    decode: Spec | None = None
    target_ttft_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    reuse: Spec | None = None
    modules: Annotated[list[Name], Field(max_length=256)] | None = None
    arguments: (
        Annotated[dict[str, Annotated[str, Field(max_length=65536)]], Field(max_length=256)] | None
    ) = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None
    frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None


class Choosing(Strict):
    """Parameters of choosing tokens, those of OpenAI and of vLLM."""

    model: Name
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=256)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=4)]
        | None
    ) = None
    stop_token_ids: Annotated[list[Token], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=1024),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # lower is earlier
    mmfast: MmfastOptions | None = None
    # taken without effect, see WITHOUT_EFFECT
    store: bool | None = None
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None

    @property
    def longest(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to report beside each token; None reports no log-probabilities."""
        return None


class ChatRequest(Choosing):
    """A conversation to continue."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=512)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    mm_processor_kwargs: Arguments | None = None
    chat_template_kwargs: Arguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to report beside each token; None reports no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def longest(self) -> int | None:
        """Most tokens of the answer, by either name."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class CompletionRequest(Choosing):
    """Texts to continue, without a chat template; control tokens in them are read as such."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=64)]
        | Annotated[list[Token], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: Annotated[str, Field(max_length=0)] | None = None
    best_of: Literal[1] | None = None

    @property
    def likeliest(self) -> int | None:
        """Likeliest tokens to report beside each token; None reports no log-probabilities."""
        return self.logprobs


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


class CompletionDetails(BaseModel):
    """Drafts that stand in the answer, and those that fell."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


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
    completion_tokens_details: CompletionDetails | None = None
    transcribed: Transcribed | None = None


class AnswerMessage(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[dict[str, Any]] | None = None


class Choice(BaseModel):
    """An answer."""

    index: int = 0
    message: AnswerMessage
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class Completion(BaseModel):
    """A complete answer; `mmfast` is its trace."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    mmfast: dict[str, Any] = Field(default_factory=dict)


class TextChoice(BaseModel):
    """A continued text."""

    index: int = 0
    text: str
    logprobs: dict[str, Any] | None = None
    finish_reason: Literal["stop", "length"]


class TextCompletion(BaseModel):
    """Continued texts; `mmfast` is the trace of the first."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    mmfast: dict[str, Any] = Field(default_factory=dict)


class Transcription(BaseModel):
    """The words of a recording, and its length; `mmfast` has notes on what was not heard of it."""

    text: str
    usage: dict[str, Any]
    mmfast: dict[str, list[str]] | None = None


class ModelCard(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmfast"
    parent: str | None = None  # of a LoRA adapter, its model


class Models(BaseModel):
    """All models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthReply(BaseModel):
    """State of the process (`/health`) or engine (`/ready`); on Ray with the live `replicas`."""

    status: Literal["ok", "loading", "busy", "failed", "unready"]
    running: int = 0
    waiting: int = 0
    replicas: dict[str, int] | None = None


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

STREAMED: dict[int | str, dict[str, Any]] = {
    **ERRORS,
    200: {
        "description": "The answer; as `text/event-stream` where `stream` is true.",
        "content": {EVENTS: {"schema": EVENT_SCHEMA}},
    },
}


LARGE = 1 << 18  # bytes from which parsing would delay other requests


class JsonRequest(Request):
    """A request whose JSON is parsed in a thread if it is large; the guard has measured it."""

    async def json(self) -> Any:
        """Parse the body; JSONDecodeError where it is not JSON."""
        if not hasattr(self, "_json"):
            body = await self.body()
            small = len(body) < LARGE
            self._json = json.loads(body) if small else await asyncio.to_thread(large, body)
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
