"""Events of clients: text to a checked value, or an error that names what is wrong."""

from __future__ import annotations

import re
import reprlib
from typing import Any, Literal

from pydantic import Field, ValidationError

from mmfast.core.errors import unknown
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.json_depth import loads
from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.shapes import Message, Name, Session, Shape, Wish

_LONE = re.compile("[\ud800-\udfff]")  # half a character: JSON may write it, no tokenizer takes it


class Event(Shape):
    """One event."""

    event_id: str | None = Field(None, max_length=512)


class SessionUpdate(Event):
    """Change settings."""

    type: Literal["session.update"]
    session: Session


class AudioAppend(Event):
    """More sound."""

    type: Literal["input_audio_buffer.append"]
    audio: str


class AudioCommit(Event):
    """What was said is over."""

    type: Literal["input_audio_buffer.commit"]


class AudioClear(Event):
    """Forget what is being said."""

    type: Literal["input_audio_buffer.clear"]


class OutputClear(Event):
    """Be silent; of connections whose sound the server plays."""

    type: Literal["output_audio_buffer.clear"]


class ItemCreate(Event):
    """Write an item."""

    type: Literal["conversation.item.create"]
    item: Message
    previous_item_id: Name | None = None


class ItemDelete(Event):
    """Forget an item."""

    type: Literal["conversation.item.delete"]
    item_id: Name


class ItemRetrieve(Event):
    """Show an item."""

    type: Literal["conversation.item.retrieve"]
    item_id: Name


class ItemTruncate(Event):
    """So much of a reply was heard."""

    type: Literal["conversation.item.truncate"]
    item_id: Name
    content_index: int
    audio_end_ms: float = Field(allow_inf_nan=False)


class ResponseCreate(Event):
    """Answer."""

    type: Literal["response.create"]
    response: Wish | None = None


class ResponseCancel(Event):
    """Stop answering."""

    type: Literal["response.cancel"]
    response_id: Name | None = None


class ImageAppend(Event):
    """A frame of live video, of an own namespace: no item, and the oldest that wait are dropped."""

    type: Literal["mmfast.input_image_buffer.append"]
    image: str
    time: float | None = Field(None, ge=0, le=1e9, allow_inf_nan=False)


EVENTS: dict[str, type[Event]] = {
    str(cls.model_fields["type"].annotation.__args__[0]): cls  # type: ignore[union-attr]
    for cls in Event.__subclasses__()
}


def read(text: str, depth: int = 32) -> dict[str, Any]:
    """Text to an object with a known `type`.

    Args:
        text: As it came.
        depth: Deepest nesting.

    Raises:
        EventError: It is no JSON object, or nested too deep.
    """
    try:
        found = _whole(loads(text, depth))
    except ApiError as error:
        if error.code != "invalid_json":
            raise EventError(error.message, error.code or "invalid_value") from None
        text = "the event is no valid JSON; send one object a message"
        raise EventError(text, "invalid_json") from None
    if not isinstance(found, dict):
        raise EventError(f"the event is a {type(found).__name__}; send an object", "invalid_json")
    return found


def checked(found: dict[str, Any]) -> Event:
    """An object as an event.

    Raises:
        EventError: Unknown type; a field is missing, unknown, or of a wrong value.
    """
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
    r"^(server_vad|semantic_vad|audio/pcm[ua]?|message|item_reference|Voice|int|str|constrained-.*"
    r"|literal\[.*|function-.*)$"
)


def _precise(error: ValidationError) -> EventError:
    """The first thing that is wrong: where it is, what is there, what may be."""
    errors = error.errors(include_url=False, include_context=False)
    # of a union every member complains: the one that came furthest knows best
    first = max(errors, key=lambda each: len(each["loc"]))
    where = ".".join(str(part) for part in first["loc"] if not _TAGS.match(str(part)))
    kind = str(first["type"])
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    given = "" if kind in ("missing", "union_tag_not_found") else f" ({_brief(first['input'])})"
    return EventError(f"{where}{given}: {first['msg']}", code, where)


def _brief(value: Any) -> str:
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(value: Any) -> Any:
    """Without halves of characters, at any depth."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_whole(each) for each in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(each) for key, each in value.items()}
    return value
