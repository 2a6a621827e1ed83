"""What the routes answer with, for the OpenAPI document and to build replies from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


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


class Model(BaseModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mmfast"


class Models(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


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
