"""Turns and replies of one conversation: the machine that all its drivers share.

`VoiceSession` drives it with threads, `mmfast.serve.realtime` in an event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from mmfast.core.speech import Sound
from mmfast.streams.stream import Clock
from mmfast.voice.channel import Kind, Status
from mmfast.voice.ear import RATE, Ear, EarEvent, VoiceEar
from mmfast.voice.history import Alignment, History, HistoryTurn
from mmfast.voice.playback import Playback, ReplyMeter, Totals


class SpokenReply:
    """A reply on its way.

    It fills the item `item` and answers the item `question`, which gets the text that was
    understood. `make` begins to make it; it is called for the first piece, outside of all locks.
    `over`: no more pieces come, as it was made in full, cancelled, or it failed. `busy`: a thread
    makes a piece just now.
    """

    playback: Playback | None

    def __init__(
        self,
        id: str,
        item: HistoryTurn,
        make: Callable[[], Iterator[Sound]] | None = None,
        question: HistoryTurn | None = None,
    ) -> None:
        self.id, self.item, self.make, self.question = id, item, make, question
        self.words, self.playback = Alignment(), None
        item.words = self.words
        self.meter = ReplyMeter()
        self.over = self.busy = False
        self._sounds = self._begin()

    def _begin(self) -> Iterator[Sound]:
        # beginning may cost as much as a piece, so it waits for the first `next`
        if self.make is not None:
            yield from self.make()

    def pull(self) -> Sound | None:
        """Return the next piece, or None at the end; takes as long as the model does."""
        return self.meter.pull(self._sounds)

    def take(self, sound: Sound, clock: Clock, delay: float) -> None:
        """Note a piece that came."""
        if self.playback is None:
            self.playback = self.item.playback = Playback(clock, sound.rate, delay)
        self.words.add(sound)

    def settle(self) -> None:
        """Stop the sound: the context keeps the words that were heard."""
        if self.item.words is not None:
            self.item.settle(0 if self.playback is None else self.playback.stop())

    def end(self) -> None:
        """Want no more pieces; a thread that makes one just now closes the model after it."""
        self.over = True
        if not self.busy:
            self.close()

    def close(self) -> None:
        """Stop the model."""
        self._sounds.close()  # type: ignore[attr-defined]

    @property
    def waiting(self) -> int:
        """Samples that are made and not played."""
        return 0 if self.playback is None else self.words.samples - self.playback.played()

    @property
    def lead(self) -> float:
        """Seconds that are made and not played."""
        return self.waiting / self.words.rate

    def due_at(self, ahead: float) -> float | None:
        """Return when its next piece is due, `ahead` seconds before the sound runs dry.

        None: only an event changes that, because nothing has been made or fetched yet.
        """
        if self.over or self.busy or self.playback is None:
            return None
        pending = self.words.samples - self.playback.arrived
        return None if pending > 0 else self.playback.dry_at() - ahead + 1e-3

    def stats(self) -> dict[str, Any]:
        """Return what it cost so far, and how it was played."""
        played = self.playback
        gaps = (0, 0.0, 0.0) if played is None else (played.gaps, played.silent, played.longest)
        found = {**self.meter.stats(), "gaps": gaps[0]}
        return {
            **found,
            "gap_ms": round(1e3 * gaps[1], 3),
            "longest_gap_ms": round(1e3 * gaps[2], 3),
        }


# A short sound under a reply is judged when it falls silent for so many seconds, before any ear
# ends the turn; what goes on for longer than a backchannel takes the floor.
LULL, BRIEF = 0.096, 0.7


class Dialogue:
    """Turn-taking: speech becomes turns, replies take the floor and lose it to speech.

    It holds no lock, starts no thread and never waits. A driver calls it, and says in a subclass
    where events go (`emit`), how items are named (`name`) and what a turn becomes (`take_turn`,
    `answer_turn`). The arguments are those of `VoiceSession`.

    `ear` finds turns, None where there is none yet; `offset` counts samples of the input before
    this ear. `open` names the item that is being said, "" during silence; `reply` is the reply that
    is being made or played. `murmur` returns the words of a sound that is a backchannel, else None;
    where it is None, all speech takes the floor. `held` is the beginning of speech under a reply
    that may be a backchannel.
    """

    def __init__(
        self,
        clock: Clock,
        history: History,
        *,
        interrupt: bool = True,
        answer: bool = True,
        delay: float = 0.0,
    ) -> None:
        self.clock, self.history, self.delay = clock, history, delay
        self.interrupting, self.answering = interrupt, answer
        self.ear: Ear | None = None
        self.offset, self.open = 0, ""
        self.reply: SpokenReply | None = None
        self.murmur: Callable[[Tensor], str | None] | None = None
        self.held: EarEvent | None = None
        self.counts: Counter[str] = Counter()
        self.gaps, self.silent, self.played = 0, 0.0, 0.0
        self.totals = Totals()

    # --- what a driver supplies ---

    def emit(self, kind: Kind, reply: SpokenReply | None = None, **fields: Any) -> None:
        """Hand over an event, of a reply where there is one; fields as of `VoiceEvent`."""
        raise NotImplementedError

    def name(self, kind: str) -> str:
        """Return the name of a new `item` or `reply`."""
        raise NotImplementedError

    def take_turn(self, item: str, pcm: Tensor) -> None:
        """Put what was said `[n]` into the conversation as an item of that name."""
        raise NotImplementedError

    def answer_turn(self) -> None:
        """Answer what was just said."""
        raise NotImplementedError

    def understood(self, reply: SpokenReply, text: str) -> None:
        """Note what a model that answers speech itself has understood."""

    # --- speech ---

    def hear(self, heard: EarEvent) -> None:
        """Take what the ear has found: a turn begins, or is over."""
        place = self._place(heard)
        if heard.kind == "timeout":
            self.emit("timeout", audio_ms=place)
        elif heard.kind == "started" and self.held is None and self._under_reply():
            self.held = heard
        elif heard.kind == "started":
            self._begin(heard)
        elif heard.pcm is not None:
            if self.held is not None:
                self.decide(self.judged(heard.pcm))
                if not self.open:
                    return
            item = self.open or self.name("item")
            self.emit("speech_stopped", item=item, audio_ms=place)
            self.open = ""
            self.take_turn(item, heard.pcm)
            if self.answering:
                self.answer_turn()

    def _begin(self, heard: EarEvent) -> None:
        self.held, self.open = None, self.name("item")
        self.emit("speech_started", item=self.open, audio_ms=self._place(heard))
        if self.interrupting:
            self.interrupt("interrupted")

    def _under_reply(self) -> bool:
        if self.murmur is None or not self.interrupting or self.reply is None:
            return False
        return not self.reply.over or self.reply.waiting > 0

    def undecided(self) -> Tensor | None:
        """Return a sound `[n]` under a reply that has to be judged now; what is long takes over."""
        said = self.ear.utterance() if self.held and isinstance(self.ear, VoiceEar) else None
        if said is None:
            return None
        pcm, spoken, quiet = said
        if spoken > BRIEF * RATE or not self._under_reply():
            self.decide(None)
        elif quiet >= LULL * RATE:
            return pcm[: len(pcm) - quiet + RATE // 10]
        return None

    def judged(self, pcm: Tensor) -> str | None:
        """Return the words of a sound `[n]` that is a backchannel, None where it is none."""
        brief = len(pcm) < (BRIEF + 0.5) * RATE  # with the padding around it
        return self.murmur(pcm) if brief and self.murmur is not None else None

    def decide(self, text: str | None) -> None:
        """Pass over a backchannel of these words, or give the floor (None) to what was held."""
        if self.held is None:
            return
        if text is None:
            self._begin(self.held)
            return
        if self.ear is not None:
            self.ear.clear()
        self.counts["backchannels"] += 1
        self.emit("backchannel", audio_ms=self._place(self.held), text=text)
        self.held = None

    def _place(self, heard: EarEvent) -> float:
        return max(0.0, 1e3 * (heard.at + self.offset) / RATE)

    def clear(self) -> None:
        """Forget what is being said."""
        self.held = None
        if self.ear is not None:
            self.ear.clear()
        self.emit("cleared", item=self.open)
        self.open = ""

    # --- replies ---

    def take(self, reply: SpokenReply, sound: Sound | None) -> None:
        """Take the next piece of a reply, or its end; a piece that comes too late is dropped."""
        if reply.over:
            return
        if sound is None:
            self.end(reply, "completed")
            return
        place = 1e3 * reply.words.samples / sound.rate
        reply.take(sound, self.clock, self.delay)
        if sound.heard is not None:
            self.understood(reply, sound.heard)
        if sound.text:
            self.emit("text", reply, audio_ms=place, text=sound.text)
        if len(sound.pcm):
            self.emit("audio", reply, audio_ms=place, pcm=sound.pcm, rate=sound.rate)

    def end(self, reply: SpokenReply, status: Status) -> None:
        """End a reply that is being made; what was made of it goes on sounding."""
        reply.over, reply.words.finished = True, status in ("completed", "incomplete")
        self.counts[status] += 1
        self.totals.add(reply.meter)
        self.history.trim()
        self.emit("done", reply, status=status, stats=reply.stats())

    def interrupt(self, status: Status) -> bool:
        """Take the floor from the reply that has it; returns whether it was made or sounded."""
        reply, self.reply = self.reply, None
        return reply is not None and self.stop(reply, status)

    def stop(self, reply: SpokenReply, status: Status) -> bool:
        """Silence a reply; the context keeps what was heard of it."""
        making, sounding = not reply.over, reply.waiting > 0
        reply.settle()
        if reply.playback is not None:
            self.gaps += reply.playback.gaps
            self.silent += reply.playback.silent
            self.played += reply.item.played / reply.words.rate
        if making or sounding:
            self.counts["cut_off"] += 1
            ms = 1e3 * reply.item.played / reply.words.rate
            self.emit("interrupted", reply, audio_ms=ms, text=reply.item.text)
        if making:
            self.end(reply, status)
            reply.end()
        return making or sounding

    # --- items ---

    def cut(self, item: str, ms: float) -> str:
        """Keep so many milliseconds of a reply's sound; returns the text that stays."""
        found = self.history.get(item)
        if self.reply is not None and self.reply.item is found:
            self.interrupt("cancelled")
        self.emit("truncated", item=item, audio_ms=found.truncate(ms), text=found.text)
        return found.text

    def delete(self, item: str) -> None:
        """Forget an item; a reply that is being said falls silent."""
        found = self.history.get(item)
        if self.reply is not None and self.reply.item is found:
            self.interrupt("cancelled")
        self.history.remove(item)
        self.emit("deleted", item=item)
