"""What drives a conversation: a loop over chunks, or a thread beside whoever pushes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mmfast.streams.voice_ear import RATE
from mmfast.streams.voice_events import VoiceEvent

if TYPE_CHECKING:
    from mmfast.streams.voice_session import VoiceSession

BLOCK = 512  # samples at 16 kHz: what speech is looked for in


class Worker(threading.Thread):
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
