"""The input buffer: sound comes in, turns come out, found by the server or told by the client."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmfast.serve.realtime.conversation import ConversationItem, ItemPart, new_id
from mmfast.serve.realtime.errors import EventError, told
from mmfast.serve.realtime.formats import Incoming, unpack
from mmfast.serve.realtime.protocol import AudioAppend
from mmfast.serve.realtime.response import Response
from mmfast.serve.realtime.settings import EAGERNESS
from mmfast.voice.ear import RATE, Ear, EarEvent, VoiceEar

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import RealtimeSession

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

    def __init__(self, session: RealtimeSession) -> None:
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

    def _heard(self, heard: EarEvent) -> None:
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
        item = ConversationItem(id, "user", [ItemPart("input_audio", pcm=pcm, unheard=True)])
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
        session.add(ConversationItem(id, "user", [ItemPart("input_audio")]))
        session.responder.answer_turn()
        return True


def _detection(turns: dict[str, Any] | None) -> dict[str, Any] | None:
    """What an ear depends on."""
    names = ("type", "threshold", "prefix_padding_ms", "silence_duration_ms", "eagerness")
    return None if turns is None else {name: turns.get(name) for name in names}


@dataclass
class _SeenFrame:
    number: int
    time: float
    picture: Any  # decoded, or an address in base64
    event_id: str | None


class Seeing:
    """Watches for one session.

    Frames are decoded and read one after another, by one task; `most` of them may wait.

    Args:
        session: Whose.
        most: Frames that wait.

    Attributes:
        counts: `came`, `seen`, `dropped` (too many waited), `failed` (were no pictures).
    """

    def __init__(self, session: RealtimeSession, most: int) -> None:
        self._session, self._most = session, most
        self._waiting: deque[_SeenFrame] = deque()
        self.counts: Counter[str] = Counter(came=0, seen=0, dropped=0, failed=0)
        self._task: asyncio.Task[None] | None = None
        self._done = 0  # number of the last frame that was seen or dropped
        self._settled: list[tuple[int, asyncio.Future[None]]] = []

    def check(self, param: str) -> None:
        """Raise an `EventError` where the model sees nothing."""
        if not self._session.brain.sees:
            raise EventError(
                "this model sees nothing; start the server with one that does", param=param
            )

    def add(self, picture: Any, time: float | None = None, event_id: str | None = None) -> None:
        """A frame, decoded or as its data URI, of so many seconds; None is now."""
        if time is None:
            time = self._session.now() - self._session.began
        self.counts["came"] += 1
        self._waiting.append(_SeenFrame(self.counts["came"], time, picture, event_id))
        while len(self._waiting) > self._most:
            self._waiting.popleft()
            self.counts["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while self._waiting and not self._session.closed:
            frame = self._waiting.popleft()
            try:
                await self._read(frame)
                self.counts["seen"] += 1
            except Exception as error:
                self.counts["failed"] += 1
                self._session.fail(error, frame.event_id)
            self._pass(frame.number)

    async def _read(self, frame: _SeenFrame) -> None:
        session, picture = self._session, frame.picture
        if isinstance(picture, str):
            picture = await session.service.picture(picture, "image")
        if not session.closed:
            await session.service.work(lambda: session.brain.see(picture, frame.time))

    def _pass(self, number: int) -> None:
        self._done = number
        left = []
        for wanted, waiter in self._settled:
            if wanted > number and not self._session.closed:
                left.append((wanted, waiter))
            elif not waiter.done():
                waiter.set_result(None)
        self._settled = left

    async def settled(self, number: int) -> None:
        """Wait until frames up to this number have been seen or dropped."""
        if self._done >= number or (not self._waiting and (not self._task or self._task.done())):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._settled.append((number, waiter))
        await waiter

    async def close(self) -> None:
        """Forget what waits, and end."""
        self._waiting.clear()
        if self._task is not None:
            await self._task
        self._pass(self.counts["came"])


_KIND = "conversation.item.input_audio_transcription"


class Understanding:
    """Listens to the recordings of one session.

    Args:
        session: Whose.
        most: Recordings that wait; one more and the oldest is given up.
    """

    def __init__(self, session: RealtimeSession, most: int) -> None:
        self._session, self._most = session, most
        self._waiting: dict[
            str, tuple[ConversationItem, asyncio.Future[None]]
        ] = {}  # the first is at work
        self._task: asyncio.Task[None] | None = None

    def ask(self, item: ConversationItem) -> asyncio.Future[None]:
        """Make text of what was said in an item, once; done when it is, or is given up."""
        if item.id in self._waiting:
            return self._waiting[item.id][1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._session.closed:
            future.set_result(None)
            return future
        self._give_up(self._most - 1)
        self._waiting[item.id] = item, future
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return future

    def heard(self, response: Response, text: str) -> None:
        """A model that answers speech itself says what it understood, of all that it was asked."""
        for item in response.asks:
            for number, part in enumerate(item.parts):
                if part.unheard:
                    part.text, part.unheard, text = text.strip(), False, ""
                    self._tell(item, number)

    def forget(self) -> None:
        """The session ends: nobody reads what still waits."""
        self._give_up(0)

    async def close(self) -> None:
        """Wait until the models have let go of it."""
        if self._task is not None:
            await self._task

    def _give_up(self, most: int) -> None:
        """Leave `most` that wait behind the one at work, the newest."""
        waiting = list(self._waiting.values())[1:]
        text = f"over {self._most} recordings wait to be written down; this one was the oldest"
        error = told(EventError(text, "too_many_recordings", type="server_error"))
        for item, future in waiting[: max(0, len(waiting) - most)]:
            del self._waiting[item.id]
            for number, part in enumerate(item.parts):
                if part.unheard:
                    part.unheard = False
                    self._tell(item, number, error)
            _done(future)

    async def _run(self) -> None:
        while self._waiting:
            item, future = next(iter(self._waiting.values()))
            try:
                await self._understand(item)
            finally:
                del self._waiting[item.id]
                _done(future)

    async def _understand(self, item: ConversationItem) -> None:
        session = self._session
        for number, part in enumerate(item.parts):
            pcm = part.pcm
            if not part.unheard or pcm is None:
                continue
            try:
                text = await session.service.work(partial(session.brain.hear, pcm))
            except Exception as error:
                part.unheard = False
                self._tell(item, number, told(error))
                continue
            if part.unheard:  # nobody else has understood it meanwhile
                part.text, part.unheard = text, False
                self._tell(item, number)

    def _tell(
        self, item: ConversationItem, number: int, error: dict[str, Any] | None = None
    ) -> None:
        """Tell what was understood, where the client wants to read it."""
        session = self._session
        if not session.settings.transcribes or item.id not in session.conversation.items:
            return
        place, part = {"item_id": item.id, "content_index": number}, item.parts[number]
        if error is not None:
            session.send(type=f"{_KIND}.failed", **place, error=error)
            return
        if part.text:
            session.send(type=f"{_KIND}.delta", **place, delta=part.text)
        seconds = 0.0 if part.pcm is None else len(part.pcm) / RATE
        usage = {"type": "duration", "seconds": round(seconds, 3)}
        session.send(type=f"{_KIND}.completed", **place, transcript=part.text, usage=usage)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
