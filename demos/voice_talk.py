"""One visitor's conversation by voice, with the speech model or about a clip."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import mmfast
from mmfast.demos import examples
from mmfast.demos.shelf import Shelf

CHAT = "small talk"
RATES = (8_000, 192_000)
Tell = Callable[[tuple[dict[str, Any], bytes | None]], Any]


class Talk:
    """A conversation that a browser drives.

    Args:
        shelf: Where the models are.
        wish: `rate` of the microphone, `about` (an example, or small talk), `voice`.
        tell: Takes `(event, sound or None)`, in a thread of the conversation.

    Raises:
        MmfastError: A wish that cannot be met.
    """

    def __init__(self, shelf: Shelf, wish: dict[str, Any], tell: Tell) -> None:
        rate, about = wish.get("rate"), wish.get("about") or CHAT
        if not isinstance(rate, int) or not RATES[0] <= rate <= RATES[1]:
            raise mmfast.MmfastError(f"rate={rate!r} is none of a microphone; give samples/s")
        if about != CHAT and about not in dict(examples.names()).values():
            raise mmfast.MmfastError("there is nothing of that name to talk about")
        chat = None if about == CHAT else _about(shelf, about)
        options = {"mode": "boost", "verify": "exact"}
        if wish.get("voice"):
            options["voice"] = str(wish["voice"])
        self.rate, self._tell = rate, tell
        self.session = shelf.talk(chat, **options).open()
        self._telling = threading.Thread(target=self._events, name="mmfast-demo-voice", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self.session.start()
        self._telling.start()

    def take(self, message: Any) -> None:
        """Sound, or a JSON message: `cancel`, or `truncate` with `item` and `ms`.

        Raises:
            MmfastError: It is neither.
        """
        if isinstance(message, bytes):
            if len(message) % 2:
                raise mmfast.MmfastError("sound of half a sample; send 16-bit PCM")
            pcm = np.frombuffer(message, "<i2").astype(np.float32) / 32768
            self.session.push(pcm, self.rate)
            return
        kind = message.get("type") if isinstance(message, dict) else None
        if kind == "cancel":
            self.session.cancel()
        elif kind == "truncate":
            self._truncate(message)
        else:
            raise mmfast.MmfastError("an unknown message; send sound, cancel or truncate")

    def _truncate(self, message: dict[str, Any]) -> None:
        """So much was heard, says the browser, which alone knows what it played."""
        with contextlib.suppress(mmfast.MmfastError):  # an item that was forgotten meanwhile
            self.session.truncate(str(message.get("item")), message.get("ms"))

    def _events(self) -> None:
        for event in self.session.events():
            pcm = None
            if event.pcm is not None:
                whole = event.pcm.detach().float().cpu().clamp(-1, 1).numpy() * 32767
                pcm = whole.astype("<i2").tobytes()
            told = event.to_dict()
            told["text"] = event.text
            self._tell((told, pcm))

    def close(self) -> None:
        """End it, and wait until nothing of it runs any more."""
        self.session.close()
        if self._telling.is_alive() and self._telling is not threading.current_thread():
            self._telling.join()


def _about(shelf: Shelf, name: str) -> Callable[[Sequence[Any]], Iterator[str]]:
    """Answers what was asked last about an example."""
    path = str(examples.CLIPS / name)
    pipe = shelf.visual(mmfast.kind_of(path))

    def chat(turns: Sequence[Any]) -> Iterator[str]:
        deltas: Iterator[str] = pipe.stream(path, shelf.wording(turns[-1].text))
        return deltas

    return chat
