"""`VoiceSession`: a conversation that listens, answers, and can be interrupted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Chatter, Sound, Turn
from mmfast.frontends.audio.echo import EchoCanceller
from mmfast.streams.stream import Clock, FakeClock
from mmfast.voice.channel import Inlet, Kind, Outlet, VoiceEvent
from mmfast.voice.dialogue import Dialogue, SpokenReply
from mmfast.voice.ear import LONGEST, RATE, Ear, MurmurEar, VoiceEar, overhear
from mmfast.voice.history import History, HistoryTurn
from mmfast.voice.models import speaking
from mmfast.voice.playback import PlayedSound

BLOCK = 512  # samples at 16 kHz: what speech is looked for in


def murmur_ear(ear: Ear, chatter: Any) -> MurmurEar:
    """Return what tells backchannels, with the words of a chatter that writes speech down.

    MmfastError where the ear finds no speech.
    """
    if not isinstance(ear, VoiceEar):
        raise MmfastError(
            f"backchannels=True: {type(ear).__name__} does not find speech; give ear='voice', "
            "'semantic' or 'prosody'"
        )
    own = chatter if hasattr(chatter, "transcribe") else getattr(chatter, "listener", None)
    return MurmurEar(partial(overhear, own) if hasattr(own, "transcribe") else None)


class VoiceSession(Dialogue):
    """Sound goes in, events come out: what was heard, and a reply as text and sound.

    Any thread may call any method. Speech cuts a reply off: the reply stops with the block of
    sound in which speech is found, no delta of it is fetched afterwards, and the context keeps the
    words that had been played. Memory is bounded: of the reply no more than `ahead` seconds are
    made before they are played, of the past the history keeps its last turns.

    Three ways to drive one: `run` over chunks of sound; `push`, `step` and `poll` one after
    another, where no thread is wanted; `start`, then `push` and `events` from different threads.

    Args:
        chatter: Answers speech with speech; see `mmfast.voice.models.Cascade`.
        ear: Finds the turns.
        clock: Of the playback. None: time is what has come in, so that a file gives the same
            conversation on every machine.
        ahead: Seconds of a reply that are made before they are played.
        delay: Seconds from the first sound of a reply to its playback.
        interrupt: Speech cuts a reply off; else only a turn that is over does.
        answer: Every turn is answered; else `respond` is called.
        backchannels: A short "mhm" or "okay" under a reply does not cut it off; speech that goes on
            for more than 0.7 s, or is another word, does. Wants an ear that finds speech.
        echo: Take the sound of replies, as they are played, out of the sound that is pushed; for a
            loudspeaker beside the microphone. Needs `mmfast[echo]`.
        history: Bounds the past.
        options: Of every reply, such as `voice`, `speed`, `pitch`, `mode`, `verify`.
    """

    ear: Ear

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
        backchannels: bool = False,
        echo: bool = False,
        history: History | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("ahead", ahead), ("delay", delay)):
            if not 0 <= value < math.inf or (name == "ahead" and not value):
                raise MmfastError(f"{name}={value!r} is no time; give seconds such as 2.0")
        for name, part, can, words in (
            ("ear", ear, "hear", "'voice', 'semantic', 'prosody', 'manual' or an Ear"),
            ("clock", clock, "now", "a Clock of mmfast.streams.stream"),
            ("history", history, "turns", "a History of mmfast.voice.history"),
        ):
            if part is not None and not hasattr(part, can):
                raise MmfastError(f"{name}={part!r} is not allowed; give {words}")
        self.input_clock = FakeClock() if clock is None else None
        super().__init__(
            clock or self.input_clock or FakeClock(),
            History() if history is None else history,
            interrupt=interrupt,
            answer=answer,
            delay=delay,
        )
        self.chatter, self.ear, self.options = chatter, ear, dict(options or {})
        if backchannels:
            self.murmur = murmur_ear(ear, chatter)
        self._echo = EchoCanceller() if echo else None
        self._played = PlayedSound()
        self.lock = threading.Condition()  # one thread may take it again
        self.outlet, self.inlet = Outlet(self.clock), Inlet()
        self.ahead, self.closed = ahead, False
        self._worker: threading.Thread | None = None
        self._next: dict[str, int] = {"item": 0, "reply": 0}
        self._unanswered: tuple[HistoryTurn, Tensor] | None = None
        self._last: tuple[HistoryTurn, Tensor] | None = None  # the turn that was answered last
        self._lost: HistoryTurn | None = None  # its reply was cut off before it was understood

    # --- what the dialogue asks for; the lock is held ---

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a voice session belongs to its process: open() another one in the other process; "
            "the pipeline can be pickled"
        )

    def emit(self, kind: Kind, reply: SpokenReply | None = None, **fields: Any) -> None:
        """Append an event; one that cuts a reply off takes back its deltas."""
        if reply is not None:
            fields = {"item": reply.item.id, "reply": reply.id, **fields}
            if kind == "interrupted":
                self.outlet.purge(reply.id)
        self.outlet.emit(kind, **fields)

    def name(self, kind: str) -> str:
        """Return `item_1`, `item_2` and so on."""
        self._next[kind] += 1
        return f"{kind}_{self._next[kind]}"

    def take_turn(self, item: str, pcm: Tensor) -> None:
        """Add what was said, joined to a turn before that has not been understood."""
        pcm = torch.cat([*self._unheard(), pcm])
        turn = HistoryTurn(item, "user", seconds=len(pcm) / RATE)
        self.emit("committed", item=item)
        self.history.add(turn)
        self.counts["turns"] += 1
        self._unanswered = turn, pcm

    def _unheard(self) -> list[Tensor]:
        """Take back a turn whose reply was cut off before it was understood: it goes on."""
        lost, self._lost = self._lost, None
        if lost is None or self._last is None or self._last[0] is not lost:
            return []
        pcm = self._last[1]
        if lost.id not in self.history.items or len(pcm) > LONGEST * RATE:
            return []
        self.history.remove(lost.id)
        self.emit("deleted", item=lost.id)
        return [pcm]

    def answer_turn(self) -> None:
        """Answer what was just said."""
        self.respond()

    def understood(self, reply: SpokenReply, text: str) -> None:
        """Write down what was understood of the turn that is answered."""
        if (asked := reply.question) is not None:
            asked.said, asked.understood = text.strip(), True
            self.outlet.emit("heard", item=asked.id, reply=reply.id, text=asked.said)

    def interrupt(self, status: Any) -> bool:
        """Take the floor from the reply that has it; returns whether it was made or sounded."""
        if (reply := self.reply) is None:
            return False
        early = not reply.over and status == "interrupted"
        asked = reply.question if early else None
        self._lost = None if asked is None or asked.understood else asked
        cut = super().interrupt(status)
        self.lock.notify_all()
        return cut

    # --- the user ---

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
            if self._echo is not None:
                played = None if self.reply is None else self.reply.playback
                samples = self._echo.cancel(samples, self._played.take(played, len(samples)))
            # a backchannel is over where it is, however long the chunk is
            for block in (samples,) if self.murmur is None else samples.split(BLOCK):
                self._listen(block)
            self.lock.notify_all()

    def _listen(self, pcm: Tensor) -> None:
        for heard in self.ear.hear(pcm):
            self.hear(heard)
        if (said := self.undecided()) is not None:
            self.decide(self.judged(said))

    def take(self, reply: SpokenReply, sound: Sound | None) -> None:
        """Take the next piece of a reply, or its end; a piece that comes too late is dropped."""
        super().take(reply, sound)
        if self._echo is not None and sound is not None and reply.playback is not None:
            self._played.add(reply.playback, sound.pcm)

    def commit(self) -> None:
        """End the turn that is being said; MmfastError where nothing is being said."""
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
            super().clear()

    def respond(self, **options: Any) -> str:
        """Answer what was said last, or what `add` wrote; returns the name of the reply.

        MmfastError: nothing was said, or it was written and the model answers sound alone.
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
        talker = getattr(self.chatter, "talker", self.chatter)
        if not hasattr(talker, "speak"):
            raise MmfastError("this model answers, but does not read out; give talker=")
        if not isinstance(text, Iterable) or (isinstance(text, str) and not text.strip()):
            raise MmfastError(f"there is nothing to say in {text!r:.60}; give a text with words")
        with self.lock:
            self._check_open()
            how = speaking({**self.options, **options})
            return self._start(lambda: iter(talker.speak(text, **how)))

    def _start(
        self, make: Callable[[], Iterator[Sound]], question: HistoryTurn | None = None
    ) -> str:
        item = HistoryTurn(self.name("item"), "assistant")
        reply = SpokenReply(self.name("reply"), item, make, question)
        self.interrupt("interrupted")
        self.reply = reply
        self.history.add(item)
        self.counts["replies"] += 1
        self.emit("reply_started", reply)
        self.lock.notify_all()
        return reply.id

    def cancel(self) -> bool:
        """Stop the reply and its sound; returns whether there was one."""
        with self.lock:
            return self.interrupt("cancelled")

    # --- the model ---

    def due(self) -> bool:
        """Return whether a piece of the reply is to be made now; wants the lock held."""
        reply = self.reply
        return reply is not None and not (reply.over or reply.busy) and reply.lead < self.ahead

    def due_at(self) -> float | None:
        """Return when one will be, if nothing happens before; wants the lock held."""
        return None if self.reply is None else self.reply.due_at(self.ahead)

    def step(self) -> bool:
        """Make the next piece of the reply, if one is due; returns whether it did.

        The lock is free while the model works, so that what a user says is heard at once.
        """
        with self.lock:
            reply = self.reply
            if reply is None or not self.due():
                return False
            reply.busy = True
        sound, failure = None, None
        try:
            sound = reply.pull()
        except Exception as error:
            failure = error
        except BaseException:
            reply.over = True
            raise
        finally:
            with self.lock:
                reply.busy = False
                if failure is None:
                    self.take(reply, sound)
                elif not reply.over:
                    text = " ".join(f"{failure}".split()) or type(failure).__name__
                    self.emit("error", reply, text=text)
                    self.end(reply, "failed")
                if reply.over:  # also where it was cancelled meanwhile: then the piece is lost
                    reply.close()
                self.lock.notify_all()
        return True

    def poll(self) -> list[VoiceEvent]:
        """Fetch the events so far; sound counts as arrived, and plays, from this moment on."""
        with self.lock:
            found, reply = self.outlet.fetch(), self.reply
            for event in found:
                if event.pcm is not None and reply is not None and reply.playback is not None:
                    reply.playback.add(len(event.pcm))
            self.lock.notify_all()  # what was fetched makes room
            return found

    def run(self, chunks: Iterable[Any], rate: int = RATE) -> Iterator[VoiceEvent]:
        """Converse until the sound ends and the last reply has been played; yields events.

        `chunks` are pieces of sound as for `push`, of any length. Without a clock of its own the
        conversation goes as fast as the model; with one, replies are made in a thread while chunks
        are waited for.
        """
        if self.input_clock is None:
            self.start()
            for chunk in chunks:
                self.push(chunk, rate)
                yield from self.poll()
        else:
            for chunk in self.inlet.blocks(chunks, rate, max(BLOCK * rate // RATE, 1)):
                self.push(chunk, rate)
                yield from self._work()
        yield from self.finish()

    def _work(self) -> Iterator[VoiceEvent]:
        """Make what is due; each piece is fetched before the next is made."""
        yield from self.poll()
        while self.step():
            yield from self.poll()

    def finish(self) -> Iterator[VoiceEvent]:
        """End the sound: answer what is being said, and play the reply to its end."""
        with self.lock:
            for heard in self.ear.flush():
                self.hear(heard)
        yield from self._work()
        while (left := self._left()) > 0:
            if self.input_clock is not None:
                self.input_clock.advance(left)
            else:
                with self.lock:
                    self.clock.wait(self.lock, self.clock.now() + left)
            yield from self._work()

    def _left(self) -> float:
        """Seconds until there is something to do, or the sound has been played; 0: the end."""
        with self.lock:
            reply, clock = self.reply, self.clock
            if reply is None or self.closed:
                return 0.0
            at = self.due_at()
            if at is None and reply.playback is not None and reply.waiting > 0:
                at = reply.playback.dry_at() + 1e-3
            if at is not None:
                return max(at - clock.now(), 1e-3)
            return 0.02 if not reply.over else 0.0  # a thread is at work on it

    def start(self) -> None:
        """Make replies in a thread from now on, until `close`."""
        with self.lock:
            self._check_open()
            if self._worker is None:
                make = self._make_replies
                self._worker = threading.Thread(target=make, name="mmfast-voice", daemon=True)
                self._worker.start()

    def _make_replies(self) -> None:
        while not self.closed:
            if self.step():
                continue
            with self.lock:
                # looked at again with the lock held: nothing comes between this and the wait
                if not self.due() and not self.closed:
                    self.clock.wait(self.lock, self.due_at())

    def events(self, timeout: float | None = None) -> Iterator[VoiceEvent]:
        """Yield events until `close`, or until none has come for `timeout` seconds."""
        while True:
            with self.lock:
                if not len(self.outlet) and not self.closed:
                    self.lock.wait_for(lambda: len(self.outlet) or self.closed, timeout)
                found = self.poll()
            if not found:
                return
            yield from found

    # --- the conversation ---

    def truncate(self, item: str, audio_end_ms: float) -> str:
        """Keep as much of a reply as its listener heard; returns the text that stays.

        `item` names the reply's item; `audio_end_ms` are milliseconds of its sound, more than there
        is means all of it. MmfastError: there is no such item, it is no reply, or the time is
        wrong.
        """
        with self.lock:
            if self.history.get(item).words is None:
                raise MmfastError(f"item {item!r} is no reply with sound; truncate one of those")
            if not isinstance(audio_end_ms, int | float) or math.isnan(audio_end_ms):
                raise MmfastError(f"audio_end_ms={audio_end_ms!r} is no time; give milliseconds")
            text = self.cut(item, audio_end_ms)
            self.lock.notify_all()
            return text

    def add(self, text: str, role: Literal["user", "assistant"] = "user") -> str:
        """Write a turn into the conversation; returns the name of its item."""
        if role not in ("user", "assistant") or not isinstance(text, str) or not text.strip():
            raise MmfastError(f"{role!r}: {text!r} is no turn; give text of user or assistant")
        with self.lock:
            self._check_open()
            item = HistoryTurn(self.name("item"), role, text.strip())
            self.history.add(item)
            self._unanswered = None
            self.emit("committed", item=item.id, text=item.text)
            return item.id

    def delete(self, item: str) -> None:
        """Forget an item; a reply that is being said falls silent, a question stays unanswered."""
        with self.lock:
            super().delete(item)
            if self._unanswered is not None and self._unanswered[0].id == item:
                self._unanswered = None

    def turns(self) -> tuple[Turn, ...]:
        """Return the context: what was heard so far, oldest first."""
        with self.lock:
            return self.history.turns()

    def save(self) -> dict[str, Any]:
        """Return what was heard so far, as plain values; `restore` goes on with it."""
        with self.lock:
            return {"items": self.history.save(), "next": dict(self._next)}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on with a conversation that `save` gave (else MmfastError), and forget this one.

        What is being said just now, and what waits for an answer, belonged to this one.
        """
        with self.lock:
            self._check_open()
            numbers = saved.get("next") if isinstance(saved, dict) else None
            if not isinstance(numbers, dict) or any(type(n) is not int for n in numbers.values()):
                raise MmfastError("this is no saved conversation; give what save() returned")
            self.history.restore(saved.get("items", ()))
            self.interrupt("cancelled")
            if self.open or self.held is not None:
                super().clear()
            self._unanswered = self._last = self._lost = None
            for kind in self._next:
                self._next[kind] = max(self._next[kind], numbers.get(kind, 0))

    def stats(self) -> dict[str, Any]:
        """Return figures so far, as plain numbers: turns, replies, latencies, tokens, gaps."""
        with self.lock:
            reply = self.reply
            playing = None if reply is None else reply.playback
            now = 0.0 if reply is None else reply.item.played / reply.words.rate
            silent = self.silent + (playing.silent if playing else 0.0)
            names = ("turns", "replies", "completed", "interrupted", "cancelled", "failed")
            return {
                **{name: self.counts[name] for name in (*names, "cut_off", "backchannels")},
                **self.totals.stats(),
                "input_seconds": round(self.inlet.samples / RATE, 4),
                "played_seconds": round(self.played + now, 4),
                "gaps": self.gaps + (playing.gaps if playing else 0),
                "gap_ms": round(1e3 * silent, 3),
                "items": len(self.history.items),
                "forgotten": self.history.forgotten,
                "waiting_events": len(self.outlet),
            }

    def close(self) -> None:
        """End the conversation and stop the model; events that wait can still be fetched."""
        with self.lock:
            if not self.closed:
                self.interrupt("cancelled")
            self.closed = True
            worker, self._worker = self._worker, None
            self.lock.notify_all()
        if worker is not None:
            worker.join()

    def _check_open(self) -> None:
        if self.closed:
            raise MmfastError("this conversation is closed; open another one")

    def __enter__(self) -> VoiceSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
