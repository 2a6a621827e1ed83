"""Events of clients: text to a checked value, or an error that names what is wrong.

An error of one event is reported to the client, and the socket stays open.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from mmfast.core.errors import MmfastError, an, unknown
from mmfast.serve.guard.body import loads
from mmfast.serve.guard.errors import ApiError, api_error, brief, scrub


class EventError(MmfastError):
    """An event that cannot be handled and had no effect.

    `message` is one line that names the value and the fix; `code` is for programs; `param` is the
    wrong part, such as `session.audio.output.voice`.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_value",
        param: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.type = code, param, type


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an exception as the `error` of an event; one that is not ours reveals nothing."""
    if isinstance(error, EventError):
        found = {"type": error.type, "code": error.code, "param": error.param}
        return {"message": scrub(str(error)), **found}
    known = api_error(error)
    wrong = "invalid_request_error" if known.status < 500 else "server_error"
    code = known.code or "internal_error"
    return {"message": scrub(known.message), "type": wrong, "code": code, "param": known.param}


MOST_TEXT = 100_000  # letters of one text
Words = Annotated[str, Field(max_length=MOST_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=64)]
Tokens = Annotated[int, Field(ge=1, le=4096)] | Literal["inf"]
Modality = Literal["text", "audio"]


class StrictShape(BaseModel):
    """Unknown fields are errors: a typing mistake must not pass for a setting."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Pcm(StrictShape):
    """16-bit samples, little-endian, mono."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24000] | None = None


class Pcmu(StrictShape):
    """G.711, 8 kHz."""

    type: Literal["audio/pcmu"]


class Pcma(StrictShape):
    """G.711, 8 kHz."""

    type: Literal["audio/pcma"]


Format = Annotated[Pcm | Pcmu | Pcma, Field(discriminator="type")]


class TurnExtras(StrictShape):
    """Options beyond OpenAI's turn detection: short backchannels interrupt no reply; prosody says
    when a turn is over.
    """

    backchannels: bool = False
    prosody: bool = False


class ServerVad(StrictShape):
    """Turns end with silence."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    prefix_padding_ms: Annotated[int, Field(ge=0, le=5000)] | None = None
    silence_duration_ms: Annotated[int, Field(ge=0, le=20_000)] | None = None
    idle_timeout_ms: Annotated[int, Field(ge=100, le=3_600_000)] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None
    mmfast: TurnExtras | None = None


class SemanticVad(StrictShape):
    """Turns end with a sentence, or with a silence that depends on the eagerness."""

    type: Literal["semantic_vad"]
    eagerness: Literal["low", "medium", "high", "auto"] | None = None
    create_response: bool | None = None
    interrupt_response: bool | None = None
    mmfast: TurnExtras | None = None


TurnDetection = Annotated[ServerVad | SemanticVad, Field(discriminator="type")]


class VoiceShape(StrictShape):
    """A voice by its id."""

    id: Name


class NoiseReduction(StrictShape):
    """Setting of clients without an effect here; `session` reports that."""

    type: Literal["near_field", "far_field"]


class AudioInput(StrictShape):
    """Sound of the client."""

    format: Format | None = None
    transcription: dict[str, Any] | None = None
    noise_reduction: NoiseReduction | None = None
    turn_detection: TurnDetection | None = None


class AudioOutput(StrictShape):
    """Sound of the server."""

    format: Format | None = None
    voice: Name | VoiceShape | None = None
    speed: Annotated[float, Field(ge=0.25, le=1.5)] | None = None


class Audio(StrictShape):
    """Both."""

    input: AudioInput | None = None
    output: AudioOutput | None = None


class FunctionChoice(StrictShape):
    """The function that is to be called."""

    type: Literal["function"]
    name: Name


class AnswerShape(StrictShape):
    """Settings of answers, of a session or of one response."""

    instructions: Words | None = None
    output_modalities: Annotated[list[Modality], Field(min_length=1, max_length=1)] | None = None
    max_output_tokens: Tokens | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    # without an effect here; what clients send by default must not be an error
    prompt: Any = None
    reasoning: Any = None
    parallel_tool_calls: Any = None


class SessionShape(AnswerShape):
    """`session` of `session.update`; what is left out stays as it is."""

    type: Literal["realtime", "transcription"] = "realtime"
    object: Literal["realtime.session", "realtime.transcription_session"] | None = None
    id: str | None = None
    model: str | None = None
    audio: Audio | None = None
    # as above
    truncation: Any = None
    tracing: Any = None
    include: Any = None
    expires_at: Any = None


class Content(StrictShape):
    """A part of an item."""

    type: Literal["input_text", "input_audio", "input_image", "output_text", "output_audio"]
    text: Words | None = None
    audio: str | None = None
    transcript: Words | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None


class NamedShape(StrictShape):
    """An item of a conversation."""

    id: Name | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class MessageShape(NamedShape):
    """An item of the conversation."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Content], Field(min_length=1, max_length=32)]


class CallShape(NamedShape):
    """A call of a function, as the model made it."""

    type: Literal["function_call"]
    name: Name
    arguments: Words
    call_id: Name | None = None


class CallOutputShape(NamedShape):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Words


ItemShape = Annotated[MessageShape | CallShape | CallOutputShape, Field(discriminator="type")]


class ReferenceShape(StrictShape):
    """An item that is there already."""

    type: Literal["item_reference"]
    id: Name


class ResponseOutput(StrictShape):
    """Sound of one response."""

    output: AudioOutput | None = None


class Wish(AnswerShape):
    """`response` of `response.create`; what is left out is the session's."""

    audio: ResponseOutput | None = None
    conversation: Literal["auto", "none"] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
        ]
        | None
    ) = None
    input: (
        Annotated[
            list[
                Annotated[
                    MessageShape | CallShape | CallOutputShape | ReferenceShape,
                    Field(discriminator="type"),
                ]
            ],
            Field(max_length=64),
        ]
        | None
    ) = None


_LONE = re.compile("[\ud800-\udfff]")  # half a character: JSON may write it, no tokenizer takes it


class RealtimeEvent(StrictShape):
    """One event of a client; `EVENTS` has the fields of each kind."""

    type: str
    event_id: str | None = Field(None, max_length=512)


_FIELDS: dict[str, dict[str, Any]] = {
    "session.update": {"session": SessionShape},
    "input_audio_buffer.append": {"audio": str},
    "input_audio_buffer.commit": {},
    "input_audio_buffer.clear": {},
    "output_audio_buffer.clear": {},  # of connections whose sound the server plays
    "conversation.item.create": {"item": ItemShape, "previous_item_id": (Name | None, None)},
    "conversation.item.delete": {"item_id": Name},
    "conversation.item.retrieve": {"item_id": Name},
    "conversation.item.truncate": {
        "item_id": Name,
        "content_index": int,
        "audio_end_ms": Annotated[float, Field(allow_inf_nan=False)],
    },
    "response.create": {"response": (Wish | None, None)},
    "response.cancel": {"response_id": (Name | None, None)},
    # a frame of live video, of a namespace of its own: no item, and the oldest that wait are
    # dropped
    "mmfast.input_image_buffer.append": {
        "image": str,
        "time": (Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None, None),
    },
}


def _event(kind: str, given: dict[str, Any]) -> type[RealtimeEvent]:
    fields: dict[str, Any] = {
        name: each if isinstance(each, tuple) else (each, ...) for name, each in given.items()
    }
    return create_model(kind, __base__=RealtimeEvent, **fields)


EVENTS = {kind: _event(kind, given) for kind, given in _FIELDS.items()}


def read(text: str, depth: int = 32) -> dict[str, Any]:
    """Parse a text to an object with a known `type`, nested at most `depth` deep."""
    try:
        found = _whole(loads(text, depth))
    except ApiError as error:
        if error.code != "invalid_json":
            raise EventError(error.message, error.code or "invalid_value") from None
        text = "the event is no valid JSON; send one object a message"
        raise EventError(text, "invalid_json") from None
    if not isinstance(found, dict):
        raise EventError(f"the event is {an(type(found).__name__)}; send an object", "invalid_json")
    return found


def checked(found: dict[str, Any]) -> Any:
    """Return an object as an event, or raise `EventError` that names the wrong field."""
    kind = found.get("type")
    if not isinstance(kind, str):
        raise EventError("the event has no type", "missing_required_parameter", "type")
    if kind not in EVENTS:
        raise EventError(unknown("event", kind[:80], EVENTS), "invalid_value", "type")
    try:
        return EVENTS[kind].model_validate(found)
    except ValidationError as error:
        raise _precise(error) from None


_CODES = {
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "string_too_long": "string_above_max_length",
    "union_tag_not_found": "missing_required_parameter",
}
_TAGS = re.compile(
    r"^(server_vad|semantic_vad|audio/pcm[ua]?|message|item_reference|function_call|function_call_output|Voice|int|str|constrained-.*"
    r"|literal\[.*|function-.*)$"
)


def _precise(error: ValidationError) -> EventError:
    """Describe the deepest error: its place, the value there, and the values allowed."""
    errors = error.errors(include_url=False, include_context=False)
    # each member of a union reports errors: those of the deepest match are the most useful
    first = max(errors, key=lambda each: len(each["loc"]))
    where = ".".join(str(part) for part in first["loc"] if not _TAGS.match(str(part)))
    kind = str(first["type"])
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    given = "" if kind in ("missing", "union_tag_not_found") else f" ({brief(first['input'])})"
    return EventError(f"{where}{given}: {first['msg']}", code, where)


def _whole(value: Any) -> Any:
    """Replace lone surrogates, which are halves of characters, at any depth."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    return value
