"""Listening and answering: turns of speech in, replies that can be cut off out."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Chatter, Sound
from mmfast.streams.stream import Clock, FakeClock
from mmfast.voice.channel import Inlet, Outlet, Status, VoiceEvent
from mmfast.voice.ear import LONGEST, RATE, Ear, EarEvent
from mmfast.voice.history import History, HistoryTurn
from mmfast.voice.models import speaking
from mmfast.voice.playback import Totals
from mmfast.voice.reply import ReplyRun


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
        self.run: ReplyRun | None = None
        self.counts: Counter[str] = Counter()
        self.gaps, self.silent, self.played = 0, 0.0, 0.0
        self.totals = Totals()
        self.lost: HistoryTurn | None = None  # cut off before anybody understood it

    def start(self, run: ReplyRun) -> None:
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

    def _took(self, run: ReplyRun, sound: Sound | None, failure: Exception | None) -> None:
        if failure is not None:
            text = " ".join(f"{failure}".split()) or type(failure).__name__
            self.outlet.emit("error", item=run.item.id, reply=run.id, text=text)
            self._done(run, "failed")
        elif sound is None:
            run.words.finished = True
            self._done(run, "completed")
        else:
            self._deltas(run, sound)

    def _deltas(self, run: ReplyRun, sound: Sound) -> None:
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

    def _done(self, run: ReplyRun, status: Status) -> None:
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


class Dialogue:
    """Sound goes in, events come out: what was heard, and a reply as text and sound.

    Any thread may call any method. Who speaks while a reply sounds cuts it off: it stops with the
    block of sound in which speech is found, no delta of it is fetched afterwards, and the context
    keeps the words that had been played. Memory is bounded: of the reply no more than `ahead`
    seconds are made before they are played, of the past the history keeps its last turns.

    Args:
        chatter: Answers speech with speech; see `mmfast.voice.models.Cascade`.
        ear: Finds the turns.
        clock: Of the playback. None: time is what has come in, so that a file gives the same
            conversation on every machine.
        ahead: Seconds of a reply that are made before they are played.
        delay: Seconds from the first sound of a reply to its playback.
        interrupt: Speech cuts a reply off; else only a turn that is over does.
        answer: Every turn is answered; else `respond` is called.
        history: What bounds the past.
        options: Of every reply, such as `voice`, `speed`, `pitch`, `mode`, `verify`.
    """

    def __init__(
        self,
        chatter: Chatter,
        ear: Ear,
        *,
        clock: Clock | None = None,
        ahead: float = 2.0,
        delay: float = 0.0,
        interrupt: bool = True,
        answer: bool = True,
        history: History | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("ahead", ahead), ("delay", delay)):
            if not 0 <= value < math.inf or (name == "ahead" and not value):
                raise MmfastError(f"{name}={value!r} is no time; give seconds such as 2.0")
        self.chatter, self.ear, self.options = chatter, ear, dict(options or {})
        self.interrupting, self.answering = interrupt, answer
        self.history = History() if history is None else history
        self.input_clock = FakeClock() if clock is None else None
        self.clock: Clock = clock or self.input_clock or FakeClock()
        self.lock = threading.Condition()  # one thread may take it again
        self.outlet, self.inlet = Outlet(self.clock), Inlet()
        self.floor = Floor(self.lock, self.clock, self.outlet, self.history, ahead, delay)
        self.closed = False
        self._next: dict[str, int] = {"item": 0, "reply": 0}
        self._open = ""  # the item that is being said
        self._unanswered: tuple[HistoryTurn, Tensor] | None = None
        self._last: tuple[HistoryTurn, Tensor] | None = None  # the turn that was answered last

    def push(self, pcm: Any, rate: int = RATE) -> None:
        """Take the next sound of the user.

        Args:
            pcm: Samples: tensor, array or list, `[n]` or with channels `[n, channels]`, or bytes
                of 16-bit PCM.
            rate: Samples per second.

        Raises:
            MediaError: They cannot be taken for sound; the conversation goes on.
            MmfastError: The conversation is closed.
        """
        with self.lock:
            self._check_open()
            samples = self.inlet.take(pcm, rate)
            if self.input_clock is not None:
                self.input_clock.advance(len(samples) / RATE)
            for heard in self.ear.hear(samples):
                self.hear(heard)
            self.lock.notify_all()

    def hear(self, heard: EarEvent) -> None:
        """A turn begins, or is over; wants the lock held."""
        place = 1e3 * heard.at / RATE
        if heard.kind == "timeout":
            self.outlet.emit("timeout", audio_ms=place)
            return
        if heard.kind == "started":
            self._open = self._name("item")
            self.outlet.emit("speech_started", item=self._open, audio_ms=place)
            if self.interrupting:
                self.floor.interrupt("interrupted")
            return
        assert heard.pcm is not None
        pcm = torch.cat([*self._unheard(), heard.pcm])
        item = HistoryTurn(self._open or self._name("item"), "user", seconds=len(pcm) / RATE)
        self.outlet.emit("speech_stopped", item=item.id, audio_ms=place)
        self.outlet.emit("committed", item=item.id)
        self.history.add(item)
        self.floor.counts["turns"] += 1
        self._open, self._unanswered = "", (item, pcm)
        if self.answering:
            self.respond()

    def _unheard(self) -> list[Tensor]:
        """A turn whose reply was cut off before it was understood: the next one goes on with it."""
        lost, self.floor.lost = self.floor.lost, None
        if lost is None or self._last is None or self._last[0] is not lost:
            return []
        pcm = self._last[1]
        if lost.id not in self.history.items or len(pcm) > LONGEST * RATE:
            return []
        self.history.remove(lost.id)
        self.outlet.emit("deleted", item=lost.id)
        return [pcm]

    def respond(self, **options: Any) -> str:
        """Answer what was said last, or what `add` wrote; returns the name of the reply.

        Raises:
            MmfastError: Nothing was said, or it was written and the model answers sound alone.
        """
        with self.lock:
            self._check_open()
            asked, self._unanswered = self._unanswered, None
            turns, options = self.history.turns(), {**self.options, **options}
            if asked is not None:
                reply = self.chatter.reply
                self._last = item, pcm = asked
                return self._start(lambda: iter(reply(pcm, RATE, turns, **options)), item)
            answer = getattr(self.chatter, "answer_turns", None)
            if answer is None or not turns:
                raise MmfastError(
                    "there is nothing to answer; push() speech, or add() text where the model "
                    "answers text (chat=)"
                )
            return self._start(lambda: iter(answer(turns, **options)))

    def say(self, text: str | Iterable[str], **options: Any) -> str:
        """Say a text, a greeting for one; returns the name of the reply."""
        speaker = getattr(self.chatter, "speaker", self.chatter)
        if not hasattr(speaker, "speak"):
            raise MmfastError("this model answers, but does not read out; give speaker=")
        with self.lock:
            self._check_open()
            how = speaking({**self.options, **options})
            return self._start(lambda: iter(speaker.speak(text, **how)))

    def _start(
        self, make: Callable[[], Iterator[Sound]], question: HistoryTurn | None = None
    ) -> str:
        run = ReplyRun(
            self._name("reply"), HistoryTurn(self._name("item"), "assistant"), make, question
        )
        self.floor.start(run)
        return run.id

    def commit(self) -> None:
        """What is being said is over.

        Raises:
            MmfastError: Nothing is being said.
        """
        with self.lock:
            self._check_open()
            found = self.ear.flush()
            if not found:
                raise MmfastError("there is no speech to commit; push() some first")
            for heard in found:
                self.hear(heard)

    def clear(self) -> None:
        """Forget what is being said."""
        with self.lock:
            self.ear.clear()
            self.outlet.emit("cleared", item=self._open)
            self._open = ""

    def cancel(self) -> bool:
        """Stop the reply and its sound; says whether there was one."""
        with self.lock:
            return self.floor.interrupt("cancelled")

    def step(self) -> bool:
        """Make the next piece of the reply, if one is due; says whether it did."""
        return self.floor.step()

    def poll(self) -> list[VoiceEvent]:
        """The events so far; sound counts as arrived, and plays, from this moment on."""
        with self.lock:
            found, run = self.outlet.fetch(), self.floor.run
            for event in found:
                if event.pcm is not None and run is not None and run.playback is not None:
                    run.playback.add(len(event.pcm))
            self.lock.notify_all()  # what was fetched makes room
            return found

    def _name(self, kind: str) -> str:
        self._next[kind] += 1
        return f"{kind}_{self._next[kind]}"

    def _check_open(self) -> None:
        if self.closed:
            raise MmfastError("this conversation is closed; open another one")
