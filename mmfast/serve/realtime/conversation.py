"""The conversation of a session: its items in order, and the context that answers are made of."""

from __future__ import annotations

from collections.abc import Iterable

from mmfast.core.speech import Turn
from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.items import Item, new_id

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
        self.items: dict[str, Item] = {}

    @property
    def last(self) -> str | None:
        """The name of the last item."""
        return next(reversed(self.items), None)

    def add(self, item: Item, after: str | None = None) -> str | None:
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

    def _insert(self, item: Item, before: str | None) -> None:
        found = {} if before is not None else {item.id: item}
        for id, each in self.items.items():
            found[id] = each
            if id == before:
                found[item.id] = item
        self.items = found

    def get(self, id: str) -> Item:
        """An item.

        Raises:
            EventError: There is none of that name, or it is forgotten.
        """
        if id not in self.items:
            raise EventError(f"there is no item {id!r}", "item_not_found", "item_id")
        return self.items[id]

    def remove(self, id: str) -> Item:
        """Forget an item; errors as for `get`."""
        self.get(id)
        return self.items.pop(id)

    def trim(self, new: Item) -> None:
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

    def _forget(self, item: Item, new: Item) -> None:
        # a reply in the making stays: its events name it
        if item is not new and item.status != "in_progress":
            del self.items[item.id]


def turns(items: Iterable[Item]) -> tuple[Turn, ...]:
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


def told(items: Iterable[Item], instructions: str) -> str:
    """What the model is told to be: the session's instructions, and those in the conversation."""
    texts = (instructions, *(item.text for item in items if item.role == "system"))
    return "\n\n".join(text for text in texts if text.strip())
