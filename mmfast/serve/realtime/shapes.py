"""Shapes of what clients send inside their events: settings, items, responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST_TEXT = 100_000  # letters of one text
Words = Annotated[str, Field(max_length=MOST_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Tokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]
Modality = Literal["text", "audio"]


class Shape(BaseModel):
    """Unknown fields are errors: a typing mistake must not pass for a setting."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Pcm(Shape):
    """16-bit samples, little-endian, mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] | None = None


class Pcmu(Shape):
    """G.711, 8 kHz."""

    type: Literal["audio/pcmu"]


class Pcma(Shape):
    """G.711, 8 kHz."""

    type: Literal["audio/pcma"]


Format = Annotated[Pcm | Pcmu | Pcma, Field(discriminator="type")]


class ServerVad(Shape):
    """Turns end with silence."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5000)] | None = None
    silence_duration_ms: Annotated[int, Field(ge=0, le=20_000)] | None = None
    idle_timeout_ms: Annotated[int, Field(ge=100, le=3_600_000)] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


class SemanticVad(Shape):
    """Turns end with silence, how much depends on the eagerness."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None


TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]


class Voice(Shape):
    """A voice by its id."""

    id: Name


class NoiseReduction(Shape):
    """What it is called by clients; sound is taken as it comes here, and `session` says so."""

    type: Literal["near_field", "far_field"]


class AudioInput(Shape):
    """What comes in."""

    format: Format | None = None
    transcription: dict[str, Any] | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = None


class AudioOutput(Shape):
    """What goes out."""

    format: Format | None = None
    voice: Name | Voice | None = None
    speed: Annotated[float, Field(ge=0.25, le=1.5)] | None = None


class Audio(Shape):
    """Both."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class Session(Shape):
    """`session` of `session.update`; what is left out stays as it is."""

    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] | None = None
    id: str | None = None
    model: str | None = None
    instructions: Words | None = None
    output_modalities: Annotated[list[Modality], Field(min_length=1, max_length=1)] | None = None
    audio: Audio | None = None
    max_output_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    # without an effect here; what clients send by default must not be an error
    truncation: Any = None
    tracing: Any = None
    include: Any = None
    prompt: Any = None
    reasoning: Any = None
    parallel_tool_calls: Any = None
    expires_at: Any = None


class Content(Shape):
    """A part of an item."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: Words | None = None
    audio: str | None = None
    transcript: Words | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class Message(Shape):
    """An item of the conversation."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Content], Field(min_length=1, max_length=32)]
    id: Name | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class Reference(Shape):
    """An item that is there already."""

    type: Literal["item_reference"]
    id: Name


class ResponseOutput(Shape):
    """How one response sounds."""

    output: AudioOutput | None = None


class Wish(Shape):
    """`response` of `response.create`; what is left out is the session's."""

    instructions: Words | None = None
    output_modalities: Annotated[list[Modality], Field(min_length=1, max_length=1)] | None = None
    audio: ResponseOutput | None = None
    max_output_tokens: Tokens | None = None
    conversation: Literal["auto", "none"] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Field(max_length=64)],
                Annotated[str, Field(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    input: (
        Annotated[
            list[Annotated[Message | Reference, Field(discriminator="type")]],
            Field(max_length=64),
        ]
        | None
    ) = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    prompt: Any = None
    reasoning: Any = None
    parallel_tool_calls: Any = None
