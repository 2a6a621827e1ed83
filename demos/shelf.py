"""Resources that visitors share: models, each loaded once, and a bounded number of places."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import mmfast

ANSWER_TOKENS, FRAMES = 128, 8


class Shelf:
    """The pipelines that answer, watch and speak.

    The model answers about media and, where its family can, watches streams: None (embedded), a
    directory, a hub id, or a `(model, processor)` pair. `read(path, frames=n)` decodes an upload to
    pixels and a note, apart from this process; None decodes here. `pair` and `speech` are the model
    with its processor and the speech model where they are loaded already.
    """

    def __init__(
        self,
        model: Any = None,
        device: Any = None,
        dtype: Any = "auto",
        read: Callable[..., Any] | None = None,
        pair: tuple[Any, Any] | None = None,
        speech: Any = None,
    ) -> None:
        self._read, self._given, self._speech = read, pair, speech
        self.model, self.place = model, {"device": device, "dtype": dtype}
        self._lock, self._locks = threading.Lock(), dict[str, threading.RLock]()
        self.needed: list[Callable[[], Any]] = [
            lambda: self.visual("image"), self.stream, self.talker,
        ]  # fmt: skip
        self._loaded: dict[str, Any] = {}
        self._warmed = False

    @property
    def name(self) -> str:
        if self.model is None:
            return "tiny-scenes (embedded)"
        return self.source.rstrip("/").rsplit("/", 1)[-1] or "a model of the caller's"

    @property
    def source(self) -> str:
        """The directory or hub id of the model."""
        return str(self.model if isinstance(self.model, str) else self.model[0].name_or_path)

    def read(self, path: str, frames: int = FRAMES) -> tuple[Any, str]:
        """Return an upload as a pipeline takes it: its pixels and a note on them, or the file."""
        return (path, "") if self._read is None else self._read(path, frames=frames)

    def visual(
        self,
        kind: str,
        reduce: str | None = None,
        frames: int = FRAMES,
        reader: str | None = None,
    ) -> Any:
        """The pipeline that answers about a `video` or an `image`.

        `reader` is an embedded model that takes the place of the default; a model that was given
        reads everything itself.
        """
        if reader is None or self.model is not None:
            pair = self.once("pair", self._pair)
        else:
            pair = self.once(reader, lambda: self._loaded_pair(reader))
        options = {**self.place, "reduce": reduce, "max_new_tokens": ANSWER_TOKENS}
        options |= {"frames": frames}
        pipe = mmfast.pipeline(f"{kind}-qa", pair, **options)
        pipe.embedded = self.model is None and reader is None
        pipe.warned = True  # the page shows what is noted
        return pipe

    def _pair(self) -> tuple[Any, Any]:
        if self._given is not None:
            return self._given
        return self._loaded_pair(self.model)

    def _loaded_pair(self, model: Any) -> tuple[Any, Any]:
        pipe = mmfast.pipeline("image-qa", model, **self.place)
        return pipe.model, pipe.processor

    def stream(self) -> Any:
        """The pipeline that watches: the model's, or the embedded one where it cannot."""
        return self.once("stream", self._stream)

    def _stream(self) -> Any:
        if self.model is not None:
            try:
                pair = self.once("pair", self._pair)
                return mmfast.pipeline("video-stream", pair, **self.place)
            except mmfast.MmfastError:
                pass  # a family that answers about clips alone
        clips = self._given if self.model is None else None
        return mmfast.pipeline("video-stream", None, device=self.place["device"], clips=clips)

    def talker(self) -> Any:
        def make() -> Any:
            place = {"device": self.place["device"]} if self._speech is None else {}
            return mmfast.pipeline("text-to-speech", self._speech, **place)

        return self.once("talker", make)

    def talk(self, chat: Any = None, **options: Any) -> Any:
        """A pipeline that converses: the embedded speech model, or `chat` with its voice."""
        return mmfast.pipeline("speech-chat", self.talker().talker, chat=chat, **options)

    def wording(self, heard: str) -> str:
        made = self.once("omni", lambda: mmfast.pipeline("omni-chat", speech=object()))
        written: str = made.wording(heard)
        return written

    def warm_soon(self) -> None:
        """Warm up in a thread, once."""
        with self._lock:
            first, self._warmed = not self._warmed, True
        if first:
            threading.Thread(target=self.warm, name="mmfast-load", daemon=True).start()

    def warm(self) -> None:
        """Load what a visitor needs first; failures are told when it is used."""
        for load in self.needed:
            try:
                load()
            except mmfast.MmfastError:
                continue

    def once(self, name: str, make: Any) -> Any:
        """The thing of this name, made if there is none yet."""
        with self._locks.setdefault(name, threading.RLock()):
            if name not in self._loaded:
                self._loaded[name] = make()
            return self._loaded[name]


T = TypeVar("T", bound=Any)


class Seats(Generic[T]):
    """One object for each visitor, closed on leaving; `idle` seconds without use free a place."""

    def __init__(self, most: int = 8, idle: float = 300.0) -> None:
        self.most, self.idle = most, idle
        self._lock = threading.Condition()
        self._making: set[str] = set()
        self._taken: dict[str, tuple[T, float]] = {}

    def get(self, who: str) -> T | None:
        with self._lock:
            if who not in self._taken:
                return None
            thing = self._taken[who][0]
            self._taken[who] = thing, time.monotonic()
            return thing

    def take(self, who: str, make: Callable[[], T]) -> T:
        """The object of a visitor, made if there is none yet and a place is free."""
        thing = self.get(who)
        if thing is not None:
            return thing
        self._sweep()
        with self._lock:
            self._making.add(who)
        try:
            made = make()
            with self._lock:
                full = len(self._taken) >= self.most
                if not full:
                    self._taken[who] = made, time.monotonic()
        finally:
            with self._lock:
                self._making.discard(who)
                self._lock.notify_all()
        if full:
            made.close()
            raise mmfast.MmfastError(f"all {self.most} places are taken; try again in some minutes")
        return made

    def leave(self, who: str) -> None:
        """Close the object of a visitor, also one that is still being made."""
        with self._lock:
            self._lock.wait_for(lambda: who not in self._making)
            thing, _ = self._taken.pop(who, (None, 0.0))
        if thing is not None:
            thing.close()

    def close(self) -> None:
        for who in list(self._taken):
            self.leave(who)

    def __len__(self) -> int:
        return len(self._taken)

    def _sweep(self) -> None:
        limit = time.monotonic() - self.idle
        for who in [who for who, (_, used) in list(self._taken.items()) if used < limit]:
            self.leave(who)
