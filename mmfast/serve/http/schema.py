"""What `/v1/chat/completions` takes: OpenAI's request, with clips and the `mmfast` options.

Parameters of theirs that this server has no use for are taken where they ask for what happens
anyway (`n=1`, `logprobs=false`, …); everything else is refused by name (`bad_request`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=1_000_000)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Spec = Annotated[str, Field(min_length=1, max_length=500)]
Nothing = Annotated[list[Any], Field(max_length=0)]
Zero = Annotated[float, Field(ge=0, le=0)]


class Strict(BaseModel):
    """No parameter that is not here, and no guessing at types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """Text."""

    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    """Where an image is: a `data:` URL, or an address that the server allows."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class VideoUrl(Strict):
    """Where a clip is: as of `ImageUrl`; how it is sampled, `mmfast` says."""

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
    """Something said: it is written down, and asked as text."""

    type: Literal["input_audio"]
    input_audio: RecordingData


Part = Annotated[
    TextPart | ImagePart | VideoPart | SoundPart,
    Field(discriminator="type"),
]


class UserMessage(Strict):
    """What the user says and shows."""

    role: Literal["user"]
    content: Text | Annotated[list[Part], Field(min_length=1, max_length=256)]
    name: Name | None = None


class SystemMessage(Strict):
    """What holds for the whole conversation."""

    role: Literal["system", "developer"]
    content: Text | Annotated[list[TextPart], Field(min_length=1, max_length=256)]
    name: Name | None = None


class AssistantMessage(Strict):
    """What was answered; a message of a reply can be sent back as it is."""

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
    """Of `stream`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PlainText(Strict):
    """The one format of answers."""

    type: Literal["text"]


class MmfastOptions(Strict):
    """What this server adds: how much of the media the model looks at, and how soon.

    `reduce` and `cache` are spec strings; `target_ttft_ms` lets the planner pick; `priority`
    orders the requests of one key; `frames` or `fps` say how clips are sampled.
    """

    reduce: Spec | None = None
    cache: Spec | None = None
    target_ttft_ms: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    priority: Annotated[int, Field(ge=-10, le=10)] | None = None
    frames: Annotated[int, Field(ge=1, le=4096)] | None = None
    fps: Annotated[float, Field(gt=0, le=1000)] | None = None


class ChatRequest(Strict):
    """A conversation to go on with."""

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
    # what other servers do, too, and happens here in one way only
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
        """Tokens of the answer that were asked for, by either name."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechRequest(Strict):
    """A text to say."""

    model: Name
    input: Annotated[str, Field(min_length=1, max_length=4096)]
    voice: Name
    response_format: Format | None = None
    speed: Annotated[float, Field(ge=0.25, le=4.0)] | None = None
    stream_format: Literal["audio", "sse"] | None = None
    instructions: Annotated[str, Field(max_length=0)] | None = None


class ErrorDetail(BaseModel):
    """What went wrong, in one line."""

    message: str
    type: str
    code: str | None = None
    param: str | None = None


class ErrorReply(BaseModel):
    """Every error."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that were not worked on anew, and those of images and clips."""

    cached_tokens: int = 0
    image_tokens: int = 0
    audio_tokens: int = 0


class Transcribed(BaseModel):
    """Sounds that were written down first; their words count as text."""

    sounds: int
    seconds: float


class Usage(BaseModel):
    """What was counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    transcribed: Transcribed | None = None


class AnswerMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class Choice(BaseModel):
    """The one answer."""

    index: int = 0
    message: AnswerMessage
    logprobs: None = None
    finish_reason: Literal["stop", "length"]


class Completion(BaseModel):
    """A whole answer; `mmfast` is its trace."""

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
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class HealthReply(BaseModel):
    """Whether the process lives (`/health`) and takes requests (`/ready`)."""

    status: Literal["ok", "loading", "busy", "failed"]
    running: int = 0
    waiting: int = 0


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text}
    for status, text in (
        (400, "The request is wrong; the message says what and how to right it."),
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
