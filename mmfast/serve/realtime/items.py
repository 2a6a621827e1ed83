"""Items of a conversation: what was written, said or shown, and what of a reply was heard."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.formats import shown, unpack, whole
from mmfast.serve.realtime.shapes import Content, Message
from mmfast.streams.voice_ear import RATE
from mmfast.streams.voice_history import Item as Reply

_KINDS = {
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
    "system": ("input_text",),
}


def new_id(kind: str) -> str:
    """A name such as `item_3f…`."""
    return f"{kind}_{secrets.token_hex(9)}"


@dataclass
class Part:
    """A part of an item.

    Attributes:
        kind: As in the protocol.
        text: Written; of sound what was understood; of a reply what was said.
        pcm: Sound at 16 kHz `[n]`, while it is kept.
        unheard: It is sound that has not become text yet.
        picture: Where a picture is; taken out when it is watched.
        detail: As it was asked for.
    """

    kind: str
    text: str = ""
    pcm: Tensor | None = None
    unheard: bool = False
    picture: str = ""
    detail: str | None = None

    def shown(self, format: str | None) -> dict[str, Any]:
        """As the client sees it; with its sound where a format is given."""
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
class Item:
    """An item.

    Attributes:
        id: Its name.
        role: Who it is of.
        parts: What is in it.
        status: Of a reply, how far it is.
        reply: Of a spoken reply, its text beside its sound, and how far it was played.
    """

    id: str
    role: Literal["user", "assistant", "system"]
    parts: list[Part] = field(default_factory=list)
    status: Literal["completed", "incomplete", "in_progress"] = "completed"
    reply: Reply | None = None

    @property
    def text(self) -> str:
        """What the context holds of it: of a reply that was cut off, what was heard."""
        if self.reply is not None and self.reply.limit is not None:
            return self.reply.text.strip()
        return " ".join(part.text.strip() for part in self.parts if part.text.strip())

    @property
    def spoken(self) -> bool:
        """Whether all of it was said by the user."""
        return self.role == "user" and all(part.kind == "input_audio" for part in self.parts)

    @property
    def watched(self) -> bool:
        """Whether it is a frame: shown, and nothing beside it."""
        return self.role == "user" and all(part.kind == "input_image" for part in self.parts)

    @property
    def unheard(self) -> list[Part]:
        """Parts that are not understood yet."""
        return [part for part in self.parts if part.unheard]

    def shown(self, format: str | None = None) -> dict[str, Any]:
        """As the client sees it; with sound, in a format, where it is kept."""
        parts = [part.shown(format) for part in self.parts]
        if self.reply is not None and self.reply.limit is not None:
            parts = [{**part, "transcript": self.text} for part in parts]
        found = {"id": self.id, "object": "realtime.item", "type": "message"}
        return {**found, "status": self.status, "role": self.role, "content": parts}

    @property
    def seconds(self) -> float:
        """Of sound that is kept."""
        return sum(len(part.pcm) / RATE for part in self.parts if part.pcm is not None)


def written(message: Message, format: str, most: int, where: str = "item") -> Item:
    """An item that a client writes.

    Args:
        message: As it came.
        format: Of its sound.
        most: Letters of base64 of one part.
        where: What messages call it.

    Raises:
        EventError: A part that its role cannot have, or that is empty.
    """
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
    return Item(message.id or new_id("item"), message.role, parts)


def _part(content: Content, format: str, most: int, place: str) -> Part:
    if content.type == "input_audio":
        if content.audio is None:
            raise _missing(f"{place}.audio")
        pcm = whole(unpack(content.audio, f"{place}.audio", most), format)
        return Part(content.type, pcm=pcm, unheard=True)
    if content.type == "input_image":
        if content.image_url is None:
            raise _missing(f"{place}.image_url")
        return Part(content.type, picture=content.image_url, detail=content.detail)
    text = content.transcript if content.type == "output_audio" else content.text
    if text is None:
        raise _missing(f"{place}.{'transcript' if content.type == 'output_audio' else 'text'}")
    return Part(content.type, text)


def _missing(place: str) -> EventError:
    return EventError(f"{place} is missing", "missing_required_parameter", place)
