"""Who has the floor: at most one reply, which yields as soon as it is told to."""

from __future__ import annotations

import threading
from collections import Counter

from mmfast.core.speech import Sound
from mmfast.streams.clock import Clock
from mmfast.streams.voice_events import Status
from mmfast.streams.voice_history import History, Item
from mmfast.streams.voice_metrics import Totals
from mmfast.streams.voice_outlet import Outlet
from mmfast.streams.voice_run import Run


class Floor:
    """Makes the pieces of the current reply, and takes the floor from it.

    All methods but `step` want the lock held; `step` takes it, and lets go of it while the model
    works, so that what a user says is heard at once.

    Args:
        lock: Of the conversation; notified when there is something to do or to fetch.
        clock: Of the playback.
        outlet: Where events go.
        history: What bounds the conversation.
        ahead: Seconds of sound that are made before they are played.
        delay: Seconds from the first sound to its playback.
    """

    def __init__(
        self,
        lock: threading.Condition,
        clock: Clock,
        outlet: Outlet,
        history: History,
        ahead: float,
        delay: float,
    ) -> None:
        self.lock, self.clock, self.outlet, self.history = lock, clock, outlet, history
        self.ahead, self.delay = ahead, delay
        self.run: Run | None = None
        self.counts: Counter[str] = Counter()
        self.gaps, self.silent, self.played = 0, 0.0, 0.0
        self.totals = Totals()
        self.lost: Item | None = None  # cut off before anybody understood it

    def start(self, run: Run) -> None:
        """Give it the floor; whoever had it is cut off."""
        self.interrupt("interrupted")
        self.run = run
        self.history.add(run.item)
        self.counts["replies"] += 1
        self.outlet.emit("reply_started", item=run.item.id, reply=run.id)
        self.lock.notify_all()

    def due(self) -> bool:
        """Whether a piece is to be made now."""
        run = self.run
        return run is not None and not run.over and not run.busy and run.lead < self.ahead

    def due_at(self) -> float | None:
        """When one will be, if nothing happens before; None: only if something does."""
        run = self.run
        if run is None or run.over or run.busy or run.playback is None:
            return None
        pending = (run.words.samples - run.playback.arrived) / run.words.rate
        return None if pending > 0 else run.playback.dry_at() - self.ahead + 1e-3

    def step(self) -> bool:
        """Make a piece, if one is due; says whether it did."""
        with self.lock:
            run = self.run
            if run is None or not self.due():
                return False
            run.busy = True
        sound, failure = None, None
        try:
            sound = run.pull()
        except Exception as error:
            failure = error
        except BaseException:
            run.over = True
            raise
        finally:
            with self.lock:
                run.busy = False
                if not run.over:
                    self._took(run, sound, failure)
                if run.over:  # also where it was cancelled meanwhile: then the piece is lost
                    run.close()
                self.lock.notify_all()
        return True

    def _took(self, run: Run, sound: Sound | None, failure: Exception | None) -> None:
        if failure is not None:
            text = " ".join(f"{failure}".split()) or type(failure).__name__
            self.outlet.emit("error", item=run.item.id, reply=run.id, text=text)
            self._done(run, "failed")
        elif sound is None:
            run.words.finished = True
            self._done(run, "completed")
        else:
            self._deltas(run, sound)

    def _deltas(self, run: Run, sound: Sound) -> None:
        names = {"item": run.item.id, "reply": run.id}
        place = 1e3 * run.words.samples / sound.rate
        run.take(sound, self.clock, self.delay)
        if sound.heard is not None and run.question is not None:
            said = run.question
            self.outlet.emit("heard", item=said.id, reply=run.id, text=said.text)
        if sound.text:
            self.outlet.emit("text", **names, audio_ms=place, text=sound.text)
        if len(sound.pcm):
            self.outlet.emit("audio", **names, audio_ms=place, pcm=sound.pcm, rate=sound.rate)

    def _done(self, run: Run, status: Status) -> None:
        run.over = True
        self.counts[status] += 1
        self.totals.add(run.meter)
        self.history.trim()
        names = {"item": run.item.id, "reply": run.id}
        self.outlet.emit("done", **names, status=status, stats=run.stats())

    def interrupt(self, status: Status) -> bool:
        """Silence the reply and leave in the context what was heard; says whether it sounded."""
        run, self.run = self.run, None
        if run is None:
            return False
        making, sounding = not run.over, run.waiting > 0
        asked, early = run.question, making and status == "interrupted"
        self.lost = asked if early and asked is not None and not asked.understood else None
        if run.playback is not None:
            run.item.settle(run.playback.stop())
            self.gaps, self.silent = (
                self.gaps + run.playback.gaps,
                self.silent + run.playback.silent,
            )
            self.played += run.item.played / run.words.rate
        if making or sounding:
            self.outlet.purge(run.id)
            self.counts["cut_off"] += 1
            ms = 1e3 * run.item.played / run.words.rate
            names = {"item": run.item.id, "reply": run.id}
            self.outlet.emit("interrupted", **names, audio_ms=ms, text=run.item.text)
        if making:
            self._done(run, status)
            run.end()
        self.lock.notify_all()
        return making or sounding
