"""What was said in a conversation, as far as it was heard, and no longer than it may be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.speech import Turn
from mmfast.streams.voice_playback import Playback
from mmfast.streams.voice_text import Alignment

TURNS = 32
LETTERS = 8000


@dataclass
class Item:
    """One side's turn.

    Args:
        id: Its name.
        role: Who spoke.
        said: Its text, where it is not given by sound.
        words: Text beside sound, of a reply.
        playback: What of that sound has been played; None once it is settled.
        limit: Samples after which it was cut off; None where it was not.
        arrived: Samples that its listener got, once it is settled.
        seconds: Length of the sound of a user's turn.
        understood: Its sound has become text, which may be none.
    """

    id: str
    role: Literal["user", "assistant"]
    said: str = ""
    words: Alignment | None = None
    playback: Playback | None = None
    limit: int | None = None
    arrived: int = 0
    seconds: float = 0.0
    understood: bool = False

    @property
    def text(self) -> str:
        """What was heard of it so far; it grows while it is played."""
        if self.words is None:
            return self.said
        if self.words.finished and not self.words.samples:
            return self.words.text.strip()  # without sound it is read, not heard
        return self.words.heard(self.played)

    @property
    def played(self) -> int:
        """Samples of it that have sounded and are not cut off."""
        if self.limit is not None:
            return self.limit
        return 0 if self.playback is None else self.playback.played()

    def settle(self, played: int) -> None:
        """It sounds no more: so many samples of it have been played."""
        if self.playback is not None:
            self.arrived, self.playback = self.playback.arrived, None
        self.limit = played

    def cut(self, samples: int) -> None:
        """So many samples of it were heard, says who listens: no more than arrived."""
        self.limit = max(0, min(samples, self.arrived))


class History:
    """The items of a conversation, the oldest of which are forgotten.

    Args:
        turns: Most items.
        letters: Most letters of them together; the last two stay, however long.
    """

    def __init__(self, turns: int = TURNS, letters: int = LETTERS) -> None:
        for name, value in (("turns", turns), ("letters", letters)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MmfastError(f"{name}={value!r} bounds no history; give a whole number from 1")
        self.limits = (turns, letters)
        self.items: dict[str, Item] = {}
        self.forgotten = 0

    def add(self, item: Item) -> None:
        """Append an item."""
        self.items[item.id] = item
        self.trim()

    def trim(self) -> None:
        """Forget the oldest where there are too many."""
        turns, letters = self.limits
        whole = {id: len(_whole(item)) for id, item in self.items.items()}
        left = sum(whole.values())
        for id in list(self.items)[:-2]:
            if len(self.items) <= max(turns, 2) and left <= letters:
                return
            del self.items[id]
            left, self.forgotten = left - whole[id], self.forgotten + 1

    def get(self, id: str) -> Item:
        """An item.

        Raises:
            MmfastError: There is none of that name, or it is forgotten.
        """
        if id not in self.items:
            raise MmfastError(unknown("item", id, self.items or ["none yet"]))
        return self.items[id]

    def remove(self, id: str) -> Item:
        """Forget an item; errors as for `get`."""
        self.get(id)
        return self.items.pop(id)

    def turns(self) -> tuple[Turn, ...]:
        """What was heard, oldest first; who was not heard has said nothing."""
        found = (Turn(item.role, item.text.strip()) for item in self.items.values())
        return tuple(turn for turn in found if turn.text)

    def save(self) -> list[dict[str, Any]]:
        """As plain values: what was heard so far."""
        return [
            {"id": item.id, "role": item.role, "text": item.text} for item in self.items.values()
        ]

    def restore(self, saved: Iterable[dict[str, Any]]) -> None:
        """Go on with what `save` gave.

        Raises:
            MmfastError: It did not.
        """
        items = {}
        try:
            for row in saved:
                if row["role"] not in ("user", "assistant"):
                    raise ValueError(row["role"])
                items[str(row["id"])] = Item(str(row["id"]), row["role"], str(row["text"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MmfastError(
                f"this is no saved conversation ({error!r}); give what save() returned"
            ) from error
        self.items = items
        self.trim()


def _whole(item: Item) -> str:
    return item.said if item.words is None else item.words.text
