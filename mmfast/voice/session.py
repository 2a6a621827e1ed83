"""`VoiceSession`: a conversation that listens, answers, and can be interrupted."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Turn
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.dialogue import Dialogue
from mmfast.voice.ear import RATE
from mmfast.voice.history import HistoryTurn

BLOCK = 512  # samples at 16 kHz: what speech is looked for in


class ReplyWorker(threading.Thread):
    """Makes the pieces of replies as they are due."""

    def __init__(self, session: VoiceSession) -> None:
        super().__init__(name="mmfast-voice", daemon=True)
        self.session = session

    def run(self) -> None:
        """Until the session is closed."""
        session, floor = self.session, self.session.floor
        while not session.closed:
            if floor.step():
                continue
            with session.lock:
                # looked at again with the lock held: nothing comes between this and the wait
                if not floor.due() and not session.closed:
                    session.clock.wait(session.lock, floor.due_at())


def run_inline(session: VoiceSession, chunks: Iterable[Any], rate: int) -> Iterator[VoiceEvent]:
    """Converse in the caller's thread, in the time of the sound that comes in."""
    block = max(BLOCK * rate // RATE, 1)
    for chunk in session.inlet.blocks(chunks, rate, block):
        session.push(chunk, rate)
        yield from _work(session)
    yield from finish(session)


def _work(session: VoiceSession) -> Iterator[VoiceEvent]:
    """Make what is due; each piece is fetched before the next is made."""
    yield from session.poll()
    while session.step():
        yield from session.poll()


def finish(session: VoiceSession) -> Iterator[VoiceEvent]:
    """Answer what is being said, and play the reply to its end."""
    with session.lock:
        for heard in session.ear.flush():
            session.hear(heard)
    yield from _work(session)
    while (left := _left(session)) > 0:
        if session.input_clock is not None:
            session.input_clock.advance(left)
        else:
            with session.lock:
                session.clock.wait(session.lock, session.clock.now() + left)
        yield from _work(session)


def _left(session: VoiceSession) -> float:
    """Seconds until there is something to do, or the last sound has been played; 0 at the end."""
    with session.lock:
        run, clock = session.floor.run, session.clock
        if run is None or session.closed:
            return 0.0
        at = session.floor.due_at()
        if at is None and run.playback is not None and run.waiting > 0:
            at = run.playback.dry_at() + 1e-3
        if at is not None:
            return max(at - clock.now(), 1e-3)
        return 0.02 if not run.over else 0.0  # a thread is at work on it


def run_live(session: VoiceSession, chunks: Iterable[Any], rate: int) -> Iterator[VoiceEvent]:
    """Converse in the time of a clock: replies are made in a thread."""
    session.start()
    for chunk in chunks:
        session.push(chunk, rate)
        yield from session.poll()
    yield from finish(session)


class VoiceSession(Dialogue):
    """A conversation: how it is driven, what was said in it, what it cost.

    Three ways to drive one: `run` over chunks of sound; `push`, `step` and `poll` one after
    another, where no thread is wanted; `start`, then `push` and `events` from different threads.

    Args:
        *args: As for `mmfast.voice.dialogue.Dialogue`, which explains the rest.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._worker: ReplyWorker | None = None

    def run(self, chunks: Iterable[Any], rate: int = RATE) -> Iterator[VoiceEvent]:
        """Converse until the sound ends and the last reply has been played.

        Args:
            chunks: Of sound, as for `push`; any length, any split.
            rate: Samples per second.

        Yields:
            Events as they happen. Without a clock of its own the conversation goes as fast as
            the model; with one, replies are made in a thread while chunks are waited for.
        """
        live = self.input_clock is None
        yield from run_live(self, chunks, rate) if live else run_inline(self, chunks, rate)

    def start(self) -> None:
        """Make replies in a thread from now on, until `close`."""
        with self.lock:
            self._check_open()
            if self._worker is None:
                self._worker = ReplyWorker(self)
                self._worker.start()

    def events(self, timeout: float | None = None) -> Iterator[VoiceEvent]:
        """Events as they come, until `close`, or until none has come for `timeout` seconds."""
        while True:
            with self.lock:
                if not len(self.outlet) and not self.closed:
                    self.lock.wait_for(lambda: len(self.outlet) or self.closed, timeout)
                found = self.poll()
            if not found:
                return
            yield from found

    def finish(self) -> Iterator[VoiceEvent]:
        """The sound is over: answer what is being said, and play it to the end."""
        return finish(self)

    def truncate(self, item: str, audio_end_ms: float) -> str:
        """So much of a reply was heard, says who plays it; returns the text that stays.

        Args:
            item: Name of the reply's item.
            audio_end_ms: Milliseconds of its sound; more than there is means all there is.

        Raises:
            MmfastError: There is no such item, it is no reply, or that is no time.
        """
        with self.lock:
            found = self.history.get(item)
            if found.words is None:
                raise MmfastError(f"item {item!r} is no reply with sound; truncate one of those")
            if not isinstance(audio_end_ms, int | float) or math.isnan(audio_end_ms):
                raise MmfastError(f"audio_end_ms={audio_end_ms!r} is no time; give milliseconds")
            if self.floor.run is not None and self.floor.run.item is found:
                self.floor.interrupt("cancelled")
            rate = found.words.rate
            found.cut(round(min(max(audio_end_ms, 0.0), 1e9) * rate / 1e3))
            ms = 1e3 * found.played / rate
            self.outlet.emit("truncated", item=item, audio_ms=ms, text=found.text)
            self.lock.notify_all()
            return found.text

    def add(self, text: str, role: Literal["user", "assistant"] = "user") -> str:
        """Write a turn into the conversation; returns the name of its item."""
        if role not in ("user", "assistant") or not isinstance(text, str) or not text.strip():
            raise MmfastError(f"{role!r}: {text!r} is no turn; give text of user or assistant")
        with self.lock:
            self._check_open()
            item = HistoryTurn(self._name("item"), role, text.strip())
            self.history.add(item)
            self._unanswered = None
            self.outlet.emit("committed", item=item.id, text=item.text)
            return item.id

    def delete(self, item: str) -> None:
        """Forget an item; one that is being said falls silent."""
        with self.lock:
            if self.floor.run is not None and self.floor.run.item.id == item:
                self.floor.interrupt("cancelled")
            self.history.remove(item)
            self.outlet.emit("deleted", item=item)

    def turns(self) -> tuple[Turn, ...]:
        """The context: what was heard so far, oldest first."""
        with self.lock:
            return self.history.turns()

    def save(self) -> dict[str, Any]:
        """What was heard so far, as plain values; `restore` goes on with it."""
        with self.lock:
            return {"items": self.history.save(), "next": dict(self._next)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with a saved conversation; what was said in this one is forgotten.

        Raises:
            MmfastError: `save` did not give that.
        """
        with self.lock:
            self._check_open()
            if not isinstance(saved, dict) or not isinstance(saved.get("next"), dict):
                raise MmfastError("this is no saved conversation; give what save() returned")
            self.history.restore(saved.get("items", ()))
            self.floor.interrupt("cancelled")
            for kind in self._next:
                self._next[kind] = max(self._next[kind], int(saved["next"].get(kind, 0)))

    def stats(self) -> dict[str, Any]:
        """Figures so far, as plain numbers: turns, replies, latencies, tokens, gaps."""
        with self.lock:
            floor, counts = self.floor, self.floor.counts
            run = floor.run
            playing = None if run is None else run.playback
            now = 0.0 if run is None else run.item.played / run.words.rate
            gaps = floor.gaps + (playing.gaps if playing else 0)
            silent = floor.silent + (playing.silent if playing else 0.0)
            names = ("turns", "replies", "completed", "interrupted", "cancelled", "failed")
            return {
                **{name: counts[name] for name in (*names, "cut_off")},
                **floor.totals.stats(),
                "input_seconds": round(self.inlet.samples / RATE, 4),
                "played_seconds": round(floor.played + now, 4),
                "gaps": gaps,
                "gap_ms": round(1e3 * silent, 3),
                "items": len(self.history.items),
                "forgotten": self.history.forgotten,
                "waiting_events": len(self.outlet),
            }

    def close(self) -> None:
        """End the conversation and stop the model; events that wait can still be fetched."""
        with self.lock:
            if not self.closed:
                self.floor.interrupt("cancelled")
            self.closed = True
            worker, self._worker = self._worker, None
            self.lock.notify_all()
        if worker is not None:
            worker.join()

    def __enter__(self) -> VoiceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
