"""The conversation of a session: its items in order, and the context that answers are made of."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.formats import shown, unpack, whole
from mmfast.serve.realtime.protocol import Content, MessageShape
from mmfast.voice.ear import RATE
from mmfast.voice.history import HistoryTurn as Reply

_KINDS = {
    "user": ("input_text", "input_audio", "input_image"),
    "assistant": ("output_text", "output_audio"),
    "system": ("input_text",),
}


def new_id(kind: str) -> str:
    """A name such as `item_3f…`."""
    return f"{kind}_{secrets.token_hex(9)}"


@dataclass
class ItemPart:
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
class ConversationItem:
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
    parts: list[ItemPart] = field(default_factory=list)
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
    def unheard(self) -> list[ItemPart]:
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


def written(message: MessageShape, format: str, most: int, where: str = "item") -> ConversationItem:
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
    return ConversationItem(message.id or new_id("item"), message.role, parts)


def _part(content: Content, format: str, most: int, place: str) -> ItemPart:
    if content.type == "input_audio":
        if content.audio is None:
            raise _missing(f"{place}.audio")
        pcm = whole(unpack(content.audio, f"{place}.audio", most), format)
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


UNHEARD = 4  # times as long is sound kept that nobody has understood yet


class Conversation:
    """Items in order; the oldest are forgotten.

    Args:
        items: Most of them.
        frames: Most of those that are frames: what they showed is in the stream's own memory.
        letters: Of all texts together.
        seconds: Of sound that is kept, for `conversation.item.retrieve`.
    """

    def __init__(
        self, items: int = 256, frames: int = 16, letters: int = 400_000, seconds: float = 120.0
    ) -> None:
        self.id = new_id("conv")
        self._most, self._frames, self._letters, self._seconds = items, frames, letters, seconds
        self.items: dict[str, ConversationItem] = {}

    @property
    def last(self) -> str | None:
        """The name of the last item."""
        return next(reversed(self.items), None)

    def add(self, item: ConversationItem, after: str | None = None) -> str | None:
        """Append an item, or put it behind another one (`root`: in front of all).

        Returns:
            The name of the item before it.

        Raises:
            EventError: The name is taken, or there is no such item to put it behind.
        """
        if item.id in self.items:
            raise EventError(f"item {item.id!r} is there already", "item_already_exists", "item.id")
        if after is None or after == self.last:
            before = self.last
            self.items[item.id] = item
        elif after != "root" and after not in self.items:
            raise EventError(f"there is no item {after!r}", "item_not_found", "previous_item_id")
        else:
            before = None if after == "root" else after
            self._insert(item, before)
        self.trim(item)
        return before

    def _insert(self, item: ConversationItem, before: str | None) -> None:
        found = {} if before is not None else {item.id: item}
        for id, each in self.items.items():
            found[id] = each
            if id == before:
                found[item.id] = item
        self.items = found

    def get(self, id: str) -> ConversationItem:
        """An item.

        Raises:
            EventError: There is none of that name, or it is forgotten.
        """
        if id not in self.items:
            raise EventError(f"there is no item {id!r}", "item_not_found", "item_id")
        return self.items[id]

    def remove(self, id: str) -> ConversationItem:
        """Forget an item; errors as for `get`."""
        self.get(id)
        return self.items.pop(id)

    def trim(self, new: ConversationItem) -> None:
        """Forget what is oldest, of whatever there is too much of; never what just came."""
        watched = [item for item in self.items.values() if item.watched]
        for item in watched[: max(0, len(watched) - self._frames)]:
            self._forget(item, new)
        letters = sum(len(item.text) for item in self.items.values())
        for item in list(self.items.values()):
            if len(self.items) <= self._most and letters <= self._letters:
                break
            letters -= len(item.text)
            self._forget(item, new)
        kept = 0.0
        for item in reversed(self.items.values()):
            kept += item.seconds
            over = kept > self._seconds * (UNHEARD if item.unheard else 1)
            if over and item is not new:
                kept -= item.seconds
                for part in item.parts:
                    part.pcm, part.unheard = None, False

    def _forget(self, item: ConversationItem, new: ConversationItem) -> None:
        # a reply in the making stays: its events name it
        if item is not new and item.status != "in_progress":
            del self.items[item.id]


def turns(items: Iterable[ConversationItem]) -> tuple[Turn, ...]:
    """What was said, oldest first; who was not heard has said nothing.

    Speech that was taken for two turns, because of a pause in it, is one.
    """
    found: list[Turn] = []
    spoken = False  # whether the last turn was said by the user
    for item in items:
        text = item.text
        if item.role == "system" or not text:
            continue
        if item.spoken and spoken:
            found[-1] = Turn("user", f"{found[-1].text} {text}")
        else:
            found.append(Turn("assistant" if item.role == "assistant" else "user", text))
        spoken = item.spoken
    return tuple(found)


def joined_instructions(items: Iterable[ConversationItem], instructions: str) -> str:
    """What the model is told to be: the session's instructions, and those in the conversation."""
    texts = (instructions, *(item.text for item in items if item.role == "system"))
    return "\n\n".join(text for text in texts if text.strip())
