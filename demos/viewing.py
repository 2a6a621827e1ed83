"""One visitor's stream: frames of a camera or of an endless world go in, questions are answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import mmfast

SMALL = "sink:64+window:1152+retrieve:16"  # of the embedded model: a window of 32 frames
PACE = 4.0  # frames of the world a second, each a second of its time
EVERY = 20.0  # seconds of the world from fact to fact
LOG = 50  # answers that are kept on the page


class DemoViewing:
    """A session of `video-stream`, what feeds it, and what was asked.

    Args:
        session: The stream; `close` closes it.
        seed: Of the world.
    """

    def __init__(self, session: Any, seed: int = 0) -> None:
        self.session = session
        self.world = mmfast.World(seed, every=EVERY)
        self.frame: Any = None  # the last one of the world
        self.seconds = 0.0  # of the stream
        self.log: list[tuple[float, str, str]] = []
        self.error = ""
        self._began = time.monotonic()
        self._stop, self._thread = threading.Event(), None
        self._lock = threading.Lock()

    _thread: threading.Thread | None

    def push(self, frame: Any) -> None:
        """The next frame of a camera.

        Raises:
            MmfastError: It cannot be read.
        """
        with self._lock:  # events of one visitor may overtake each other
            now = time.monotonic() - self._began
            self.seconds = max(now, self.seconds + 1e-3)
            self.session.push(frame, self.seconds)

    def play(self) -> None:
        """Watch the world from where it stood, in a thread."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._feed, name="mmfast-demo-world", daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Stand still; questions are still answered."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _feed(self) -> None:
        start = self.seconds + (1.0 if self.frame is not None else 0.0)
        try:
            for frame, seconds in self.world.frames(start=start):
                due = time.monotonic() + 1 / PACE
                self.session.push(frame, seconds)
                self.frame, self.seconds = frame, seconds
                if self._stop.wait(max(due - time.monotonic(), 0)):
                    return
        except mmfast.MmfastError as error:
            self.error = str(error)

    @property
    def playing(self) -> bool:
        """Whether the world goes on."""
        return self._thread is not None and self._thread.is_alive() and not self._stop.is_set()

    def ask(self, question: str) -> Iterator[str]:
        """The answer as it grows; it is added to the log at its end.

        Raises:
            MmfastError: No question, or nothing was seen yet.
        """
        if not self.session.stats()["frames"]:
            raise mmfast.MmfastError("nothing was seen yet; start the world or the camera first")
        at, text = self.seconds, ""
        with self.session.ask(question, max_new_tokens=32) as reply:
            for delta in reply:
                text += delta
                yield text
        self.log = [*self.log, (at, question, text.strip())][-LOG:]

    def shown(self) -> list[tuple[str, int, str, float]]:
        """Facts of the world that were on screen: name, number, corner, seconds since."""
        events = self.world.events(self.seconds) if self.frame is not None else []
        rows = [(e.name, e.number, e.corner, self.seconds - e.stop) for e in events]
        return [row for row in rows if row[3] >= 0][::-1]

    def figures(self) -> list[tuple[str, str]]:
        """Counters for people."""
        stats = self.session.stats()
        memory = stats["memory"]
        archive = memory.get("archive", {})
        stored = sum(archive.get("bytes", {}).values())
        frames = max(stats["units"], 1)
        return [
            ("frames seen", f"{stats['frames']:,}"),
            ("stream time", _clock(stats["seconds"] or 0.0)),
            ("tokens seen", f"{stats['tokens']:,}"),
            ("live tokens", f"{memory['live_tokens']:,}"),
            ("archived frames", f"{sum(archive.get('blocks', {}).values()):,}"),
            ("memory", f"{(memory['bytes'] + stored) / 1e6:,.1f} MB"),
            ("work per frame", f"{(stats['encode_ms'] + stats['prefill_ms']) / frames:,.0f} ms"),
            ("questions", f"{stats['questions']:,}"),
        ]

    def close(self) -> None:
        """End it."""
        self._stop.set()
        self.session.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
