"""Items of a conversation as the protocol has them: parts of text, sound and pictures."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from mmfast.serve.engine.base import Media
from mmfast.serve.realtime.brain import HeardText
from mmfast.serve.realtime.formats import Incoming, shown, unpack
from mmfast.serve.realtime.protocol import (
    CallOutputShape,
    CallShape,
    Content,
    EventError,
    MessageShape,
    ReferenceShape,
    Wish,
)
from mmfast.voice.ear import RATE
from mmfast.voice.history import History, HistoryTurn

_KINDS = {
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
    "system": ("input_text",),
}


def new_id(kind: str) -> str:
    """Return a new name such as `item_3f…`."""
    return f"{kind}_{secrets.token_hex(9)}"


@dataclass
class ItemPart:
    """A part of an item.

    `text` is written text, the transcript of a sound, or the spoken part of a reply. `pcm` is sound
    `[n]` at 16 kHz, while it is kept; `unheard` marks sound without a transcript yet. `picture` is
    a URL, removed once it is decoded; `media` is the picture of an item that also has text.
    """

    kind: str
    text: str = ""
    pcm: Tensor | None = None
    unheard: bool = False
    picture: str = ""
    media: Media | None = None
    detail: str | None = None

    def shown(self, format: str | None) -> dict[str, Any]:
        """Return the part as the client sees it, with its sound where a format is given."""
        found: dict[str, Any] = {"type": self.kind}
        if self.kind in ("input_text", "output_text"):
            return {**found, "text": self.text}
        if self.kind == "input_image":
            return {**found, "detail": self.detail or "auto"}
        if self.kind == "input_audio" and self.unheard:
            found["transcript"] = None
        else:
            found["transcript"] = self.text
        if format is not None and self.pcm is not None:
            found["audio"] = shown(self.pcm, format)
        return found


@dataclass
class ConversationItem(HistoryTurn):
    """An item of the protocol: a turn of the dialogue in parts, a call, or the result of one."""

    parts: list[ItemPart] = field(default_factory=list)
    call: dict[str, Any] | None = None  # fields of a call, or of its result
    status: Literal["completed", "incomplete", "in_progress"] = "completed"

    @property
    def cut_off(self) -> bool:
        """True for a spoken reply that was cut off."""
        return self.words is not None and self.limit is not None

    @property
    def text(self) -> str:
        """The text in the model's context; of a reply that was cut off, only the part heard."""
        if self.cut_off:
            return super().text.strip()
        return " ".join(part.text.strip() for part in self.parts if part.text.strip())

    @property
    def content(self) -> tuple[str | Media, ...]:
        """Texts and pictures in order, as the model reads them."""
        if self.cut_off or self.role != "user":
            return (self.text,)
        parts = [
            part.media or (HeardText if part.kind == "input_audio" else str)(part.text.strip())
            for part in self.parts
        ]
        return tuple(part for part in parts if part)

    @property
    def spoken(self) -> bool:
        """True where the user said all of it."""
        return self.role == "user" and all(part.kind == "input_audio" for part in self.parts)

    @property
    def watched(self) -> bool:
        """True for a frame: a picture and nothing beside it."""
        return self.role == "user" and all(part.kind == "input_image" for part in self.parts)

    @property
    def unheard(self) -> list[tuple[int, ItemPart]]:
        """Number and value of the parts without a transcript yet."""
        return [(number, part) for number, part in enumerate(self.parts) if part.unheard]

    def shown(self, format: str | None = None) -> dict[str, Any]:
        """Return it as the client sees it; with sound, in a format, where it is kept."""
        if self.call is not None:
            head = {"id": self.id, "object": "realtime.item", "status": self.status}
            return {**head, **self.call}
        parts = [part.shown(format) for part in self.parts]
        if self.cut_off:
            parts = [{**part, "transcript": self.text} for part in parts]
        found = {"id": self.id, "object": "realtime.item", "type": "message"}
        return {**found, "status": self.status, "role": self.role, "content": parts}

    @property
    def kept_seconds(self) -> float:
        """Seconds of sound that are kept."""
        return sum(len(part.pcm) / RATE for part in self.parts if part.pcm is not None)


def call_item(given: CallShape | CallOutputShape) -> ConversationItem:
    """Return a call or its result as an item; a model reads it as text between tags."""
    if isinstance(given, CallShape):
        call = {"name": given.name, "arguments": given.arguments}
        text = f'<tool_call>{{"name": "{given.name}", "arguments": {given.arguments}}}</tool_call>'
        role: Literal["assistant", "user"] = "assistant"
    else:
        call, role = {"output": given.output}, "user"
        text = f"<tool_response>{given.output}</tool_response>"
    call = {"type": given.type, "call_id": given.call_id or new_id("call"), **call}
    parts = [ItemPart(given.type, text)]
    return ConversationItem(given.id or new_id("item"), role, parts=parts, call=call)


def written(
    message: MessageShape | CallShape | CallOutputShape,
    format: str,
    most: int,
    where: str = "item",
) -> ConversationItem:
    """Return an item that a client writes.

    `most` limits the letters of base64 of one part; messages name the item by `where`. Empty parts,
    and parts that the role cannot have, raise `EventError`.
    """
    if not isinstance(message, MessageShape):
        return call_item(message)
    parts = []
    for number, content in enumerate(message.content):
        place = f"{where}.content.{number}"
        if content.type not in _KINDS[message.role]:
            choices = ", ".join(_KINDS[message.role])
            raise EventError(
                f"an item of {message.role} cannot have {content.type}; choices: {choices}",
                param=f"{place}.type",
            )
        parts.append(_part(content, format, most, place))
    return ConversationItem(message.id or new_id("item"), message.role, parts=parts)


def _part(content: Content, format: str, most: int, place: str) -> ItemPart:
    if content.type == "input_audio":
        if content.audio is None:
            raise _missing(f"{place}.audio")
        pcm = Incoming(format).take(unpack(content.audio, f"{place}.audio", most))
        return ItemPart(content.type, pcm=pcm, unheard=True)
    if content.type == "input_image":
        if content.image_url is None:
            raise _missing(f"{place}.image_url")
        return ItemPart(content.type, picture=content.image_url, detail=content.detail)
    text = content.transcript if content.type == "output_audio" else content.text
    if text is None:
        raise _missing(f"{place}.{'transcript' if content.type == 'output_audio' else 'text'}")
    return ItemPart(content.type, text)


def _missing(place: str) -> EventError:
    return EventError(f"{place} is missing", "missing_required_parameter", place)


UNHEARD = 4  # times as long is sound kept that has not been understood yet


class Conversation(History):
    """Items in order, bounded by number, letters, frames and seconds; the oldest are forgotten.

    Frames may be few, since the model has taken them; `pictures` are those beside texts. `seconds`
    bounds the sound kept for `conversation.item.retrieve`.
    """

    items: dict[str, ConversationItem]  # type: ignore[assignment]

    def __init__(
        self,
        items: int = 256,
        frames: int = 16,
        letters: int = 400_000,
        seconds: float = 120.0,
        pictures: int = 15,
    ) -> None:
        super().__init__(items, letters)
        self.id = new_id("conv")
        self._frames, self._seconds, self._pictures = frames, seconds, pictures

    @property
    def last(self) -> str | None:
        """The name of the last item."""
        return next(reversed(self.items), None)

    def insert(self, item: ConversationItem, after: str | None = None) -> str | None:
        """Append an item, or put it behind another one (`root`: in front of all).

        Returns the name of the item before it. `EventError`: the name is taken, or `after` is
        unknown.
        """
        if item.id in self.items:
            raise EventError(f"item {item.id!r} is there already", "item_already_exists", "item.id")
        if after not in (None, "root") and after not in self.items:
            raise EventError(f"there is no item {after!r}", "item_not_found", "previous_item_id")
        before = {None: self.last, "root": None}.get(after, after)
        names = list(self.items)
        names.insert(0 if before is None else names.index(before) + 1, item.id)
        found = {**self.items, item.id: item}
        self.items = {name: found[name] for name in names}
        self.trim(item)
        return before

    def get(self, id: str) -> ConversationItem:
        """Return an item; `EventError` if there is none of that name, or it is forgotten."""
        if id not in self.items:
            raise EventError(f"there is no item {id!r}", "item_not_found", "item_id")
        return self.items[id]

    def brought(self, wish: Wish, format: str, most: int) -> list[ConversationItem]:
        """Return the items that a response is about: all, or those that it names and writes."""
        if wish.input is None:
            return list(self.items.values())
        found = []
        for number, each in enumerate(wish.input):
            if isinstance(each, ReferenceShape):
                found.append(self.get(each.id))
                continue
            item = written(each, format, most, f"response.input.{number}")
            if any(part.kind == "input_image" for part in item.parts):
                raise EventError(
                    "frames go into the conversation; create an item of the picture first",
                    param=f"response.input.{number}",
                )
            found.append(item)
        return found

    def trim(self, new: HistoryTurn | None = None) -> None:
        """Forget the oldest items beyond each limit, but not `new`."""
        most, letters = self.limits
        watched = [item for item in self.items.values() if item.watched]
        for item in watched[: max(0, len(watched) - self._frames)]:
            self._forget(item, new)
        left = sum(len(item.text) for item in self.items.values())
        for item in list(self.items.values()):
            if len(self.items) <= most and left <= letters:
                break
            left -= len(item.text)
            self._forget(item, new)
        shown = [p for item in self.items.values() for p in item.parts if p.media is not None]
        for part in shown[: max(0, len(shown) - self._pictures)]:
            part.media = None
        kept = 0.0
        for item in reversed(self.items.values()):
            kept += item.kept_seconds
            over = kept > self._seconds * (UNHEARD if item.unheard else 1)
            if over and item is not new:
                kept -= item.kept_seconds
                for part in item.parts:
                    part.pcm, part.unheard = None, False

    def _forget(self, item: ConversationItem, new: HistoryTurn | None) -> None:
        # a reply in the making stays: its events name it
        if item is not new and item.status != "in_progress":
            del self.items[item.id]
