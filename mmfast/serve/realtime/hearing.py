"""The input buffer: sound comes in, turns come out, found by the server or told by the client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmfast.serve.realtime.errors import EventError
from mmfast.serve.realtime.events import AudioAppend
from mmfast.serve.realtime.formats import Incoming, unpack
from mmfast.serve.realtime.items import Item, Part, new_id
from mmfast.serve.realtime.settings import EAGERNESS
from mmfast.streams.voice_ear import RATE, Ear, Heard
from mmfast.streams.voice_turns import VoiceEar

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import Session

BLOCK = RATE // 4  # samples that are listened to before the loop may do something else
SHORTEST = RATE // 10  # of a turn that a client commits
LONGEST = 120 * RATE  # that the buffer holds where the client says when a turn is over


def ear_of(turns: dict[str, Any]) -> Ear:
    """What finds turns as the settings ask for.

    Raises:
        ModelError: silero-vad is not installed.
    """
    if turns["type"] == "semantic_vad":
        return VoiceEar(silence_duration_ms=EAGERNESS[turns["eagerness"]])
    threshold = min(max(float(turns["threshold"]), 0.01), 0.99)
    return VoiceEar(
        threshold=threshold,
        exit=min(0.35, 0.7 * threshold),
        silence_duration_ms=turns["silence_duration_ms"],
        prefix_padding_ms=turns["prefix_padding_ms"],
    )


class Hearing:
    """Listens for one session.

    Attributes:
        taken: Samples at 16 kHz that came in so far.
        open: The item that is being said, "" where nobody speaks.
    """

    def __init__(self, session: Session) -> None:
        self._session, self.taken, self.open = session, 0, ""
        self._incoming = Incoming(session.settings.input_format)
        self._turns: dict[str, Any] | None = None
        self._ear: Ear | None = None
        self._base = 0  # samples that came before this ear
        self._held: list[Tensor] = []
        self.quiet_since = 0.0

    def configure(self) -> None:
        """Settings have changed: another way to find turns begins anew."""
        session = self._session
        if session.settings.input_format != self._incoming.format:
            self._incoming = Incoming(session.settings.input_format)
        found = session.settings.turn_detection
        if _detection(found) != _detection(self._turns):
            self._forget()
            self._ear = None
        self._turns = found

    async def append(self, event: AudioAppend) -> None:
        """More sound.

        Raises:
            EventError: It is none, or the buffer is full.
            ModelError: Nothing can find turns here.
        """
        session = self._session
        pcm = self._incoming.take(unpack(event.audio, "audio", session.service.limits.message))
        if session.settings.turn_detection is None:
            self._hold(pcm)
            return
        if self._ear is None:
            self._turns, self._base = session.settings.turn_detection, self.taken
            self._ear = await session.service.listen(lambda: session.service.ear(self._turns or {}))
        ear = self._ear
        for block in pcm.split(BLOCK) if len(pcm) else ():
            self.taken += len(block)
            found = await session.service.listen(partial(ear.hear, block))
            for heard in found:
                self._heard(heard)

    def _hold(self, pcm: Tensor) -> None:
        if self._samples() + len(pcm) > LONGEST:
            raise EventError(
                f"the buffer holds {LONGEST // RATE} s and is full; commit or clear it",
                "input_audio_buffer_full",
            )
        self.taken += len(pcm)
        self._held.append(pcm)

    def _samples(self) -> int:
        return sum(map(len, self._held))

    def _heard(self, heard: Heard) -> None:
        """A turn begins, or is over."""
        session = self._session
        turns = session.settings.turn_detection or {}
        place = max(0, round(1e3 * (heard.at + self._base) / RATE))
        if heard.kind == "started":
            self.open = new_id("item")
            kind = "input_audio_buffer.speech_started"
            session.send(type=kind, item_id=self.open, audio_start_ms=place)
            if turns.get("interrupt_response"):
                session.responder.interrupt()
        elif heard.kind == "stopped" and heard.pcm is not None:
            item = self.open or new_id("item")
            kind = "input_audio_buffer.speech_stopped"
            session.send(type=kind, item_id=item, audio_end_ms=place)
            self._committed(item, heard.pcm)
            if turns.get("create_response"):
                session.responder.answer_turn()

    def commit(self) -> None:
        """What was said is over.

        Raises:
            EventError: Nothing was said, or next to nothing.
        """
        if self._session.settings.turn_detection is None:
            pcm = torch.cat(self._held) if self._held else torch.zeros(0)
        else:
            found = [] if self._ear is None else self._ear.flush()
            pcm = torch.cat([torch.zeros(0), *[h.pcm for h in found if h.pcm is not None]])
        if len(pcm) < SHORTEST:
            raise EventError(
                f"the buffer has {1e3 * len(pcm) / RATE:.0f} ms of sound; at least 100 ms make a "
                "turn" + ("" if self._session.settings.turn_detection is None else " (of speech)"),
                "input_audio_buffer_commit_empty",
            )
        self._held = []
        self._committed(self.open or new_id("item"), pcm)

    def _committed(self, id: str, pcm: Tensor) -> None:
        session, self.open = self._session, ""
        self.quiet_since = session.now()
        item = Item(id, "user", [Part("input_audio", pcm=pcm, unheard=True)])
        before = session.conversation.last
        kind = "input_audio_buffer.committed"
        session.send(type=kind, previous_item_id=before, item_id=id)
        session.add(item)
        if session.settings.transcribes:
            session.understanding.ask(item)

    def clear(self) -> None:
        """Forget what is being said."""
        self._forget()
        self._session.send(type="input_audio_buffer.cleared")

    def _forget(self) -> None:
        self._held, self.open = [], ""
        if self._ear is not None:
            self._ear.clear()

    def timeout(self) -> bool:
        """Say that nobody has said anything for long, as the settings ask for; says whether."""
        session = self._session
        turns = session.settings.turn_detection or {}
        limit = turns.get("idle_timeout_ms")
        waits = limit is not None and not self.open and not session.responder.busy
        since = max(self.quiet_since, session.responder.silent_since())
        if not waits or limit is None or 1e3 * (session.now() - since) < limit:
            return False
        self.quiet_since = session.now()
        end = round(1e3 * self.taken / RATE)
        id, start = new_id("item"), max(0, end - limit)
        kind = "input_audio_buffer.timeout_triggered"
        session.send(type=kind, audio_start_ms=start, audio_end_ms=end, item_id=id)
        before = session.conversation.last
        session.send(type="input_audio_buffer.committed", previous_item_id=before, item_id=id)
        session.add(Item(id, "user", [Part("input_audio")]))
        session.responder.answer_turn()
        return True


def _detection(turns: dict[str, Any] | None) -> dict[str, Any] | None:
    """What an ear depends on."""
    names = ("type", "threshold", "prefix_padding_ms", "silence_duration_ms", "eagerness")
    return None if turns is None else {name: turns.get(name) for name in names}
