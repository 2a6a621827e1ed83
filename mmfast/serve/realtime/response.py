"""One response: its pieces as they are made, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mmfast.core.speech import Sound, Turn
from mmfast.serve.realtime.brain import BrainQuestion
from mmfast.serve.realtime.conversation import ConversationItem, ItemPart, new_id
from mmfast.serve.realtime.errors import EventError, told
from mmfast.serve.realtime.formats import Outgoing
from mmfast.voice.history import HistoryTurn as Reply
from mmfast.voice.reply import ReplyRun

if TYPE_CHECKING:
    from mmfast.serve.realtime.service import SessionLimits
    from mmfast.serve.realtime.session import RealtimeSession


@dataclass
class TokenUsage:
    """What went in and out.

    Attributes:
        text_in: Of the turns.
        audio_in: Of speech that the model answers as it is.
        image_in: Of the frames that the answer is about; all of them were read when they came.
        text_out: Of the answer.
        audio_out: Likewise.
    """

    text_in: int = 0
    audio_in: int = 0
    image_in: int = 0
    text_out: int = 0
    audio_out: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.text_in + self.audio_in + self.image_in + self.text_out + self.audio_out

    def usage(self) -> dict[str, Any]:
        """As the client sees it."""
        came = self.text_in + self.audio_in + self.image_in
        went = self.text_out + self.audio_out
        cached = {"text_tokens": 0, "audio_tokens": 0, "image_tokens": self.image_in}
        return {
            "total_tokens": self.total,
            "input_tokens": came,
            "output_tokens": went,
            "input_token_details": {
                "text_tokens": self.text_in,
                "audio_tokens": self.audio_in,
                "image_tokens": self.image_in,
                "cached_tokens": self.image_in,
                "cached_tokens_details": cached,
            },
            "output_token_details": {
                "text_tokens": self.text_out,
                "audio_tokens": self.audio_out,
            },
        }


Status = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
PIECE = 0.4  # seconds of one delta: what a cancel overtakes is forgotten by whole deltas


class Telling:
    """A response as its client is told of it; see `Response`, whose arguments these are."""

    def __init__(
        self,
        session: RealtimeSession,
        settings: dict[str, Any],
        own: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.id, self.session, self.settings = new_id("resp"), session, settings
        self.own, self.metadata = own, metadata
        self.aloud = settings["output_modalities"] == ["audio"]
        self.item = ConversationItem(new_id("item"), "assistant", status="in_progress")
        self.reply = Reply(self.item.id, "assistant")
        self.status: Status = "in_progress"
        self.reason, self.error = "", dict[str, Any]()
        self.shown = self.over = False
        self.asks: list[
            ConversationItem
        ] = []  # what a model that answers speech itself is answering
        self.spent = TokenUsage()
        self.asked = session.now()
        self.first_audio: float | None = None
        self._sent = ""  # text that has left
        self._out: Outgoing | None = None
        self._held = 0  # samples whose sound waits for those behind them

    def begin(self) -> None:
        """Say that it is being made."""
        self._events("response.created", response=self.resource())
        self._events("rate_limits.updated", rate_limits=[])

    def resource(self) -> dict[str, Any]:
        """The response as the client sees it."""
        output = {name: self.settings["output"][name] for name in ("format", "voice")}
        found = {
            "object": "realtime.response",
            "id": self.id,
            "status": self.status,
            "status_details": self._details(),
            "output": [self._item()] if self.shown and self.over else [],
            "conversation_id": None if self.own else self.session.conversation.id,
            "output_modalities": self.settings["output_modalities"],
            "max_output_tokens": self.settings["max_output_tokens"],
            "audio": {"output": output},
            "usage": self.spent.usage() if self.over else None,
            "metadata": self.metadata,
        }
        return {**found, "mmfast": self._figures()} if self.over else found

    def _details(self) -> dict[str, Any] | None:
        if self.status in ("in_progress", "completed"):
            return None
        found: dict[str, Any] = {"type": self.status}
        if self.reason:
            found["reason"] = self.reason
        return {**found, "error": self.error} if self.error else found

    def _figures(self) -> dict[str, Any]:
        first = None if self.first_audio is None else round(1e3 * self.first_audio, 3)
        return {"first_audio_ms": first, "frames": dict(self.session.seeing.counts)}

    def _text(self, text: str) -> None:
        self._show()
        part = self.item.parts[0]
        part.text += text

        def sent() -> None:
            if not self.over:
                self._sent += text

        kind = "output_audio_transcript" if self.aloud else "output_text"
        self._delta(f"response.{kind}.delta", text, sent)

    def _audio(self, sound: Sound) -> None:
        self._show()
        if self._out is None:
            format = self.settings["output"]["format"]["type"]
            self._out = Outgoing(format, sound.rate)
            self.first_audio = self.session.now() - self.asked
            self.session.service.count("first_audio", self.first_audio, "realtime")
        for piece in sound.pcm.split(round(PIECE * sound.rate)):
            self._sound(self._out.step(piece), len(piece))

    def _sound(self, packed: str, samples: int) -> None:
        playback, count = self.reply.playback, self._held + samples
        self._held = 0 if packed else count
        if packed and playback is not None:
            self._delta("response.output_audio.delta", packed, lambda: playback.add(count))

    def _delta(self, kind: str, delta: str, sent: Any) -> None:
        place = self._place()
        self.session.outbox.put({"type": kind, **place, "delta": delta}, self.id, sent)

    def _place(self) -> dict[str, Any]:
        names = {"response_id": self.id, "item_id": self.item.id}
        return {**names, "output_index": 0, "content_index": 0}

    def _events(self, kind: str, **fields: Any) -> None:
        self.session.send(type=kind, **fields)

    def _show(self) -> None:
        """Announce the item, before anything of it is told."""
        if self.shown:
            return
        self.shown = True
        item = {**self.item.shown(), "content": []}
        which = {"response_id": self.id, "output_index": 0}
        self._events("response.output_item.added", **which, item=item)
        self.item.parts.append(ItemPart("output_audio" if self.aloud else "output_text"))
        if self.aloud:
            self.item.reply = self.reply
        if not self.own:
            self.session.add(self.item, content=False)
        self._events("response.content_part.added", **self._place(), part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        if self.aloud:
            return {"type": "audio", "transcript": text}
        return {"type": "text", "text": text}

    def _item(self) -> dict[str, Any]:
        """As it was sent, whatever of it was heard."""
        content = self.item.parts[0].shown(None)
        content["transcript" if self.aloud else "text"] = self._sent
        return {**self.item.shown(), "content": [content]}

    def _close(self, cut: bool) -> None:
        """The events that end the item."""
        self.item.status = "incomplete" if self.status != "completed" else "completed"
        text = self._sent if cut else self.item.parts[0].text
        self._sent, place = text, self._place()
        if self.aloud:
            self._events("response.output_audio.done", **place)
            self._events("response.output_audio_transcript.done", **place, transcript=text)
        else:
            self.item.parts[0].text = text
            self._events("response.output_text.done", **place, text=text)
        self._events("response.content_part.done", **place, part=self._part(text))
        if not self.own:
            self.session.done(self.item)
        which = {"response_id": self.id, "output_index": 0}
        self._events("response.output_item.done", **which, item=self._item())


_log = logging.getLogger("mmfast.serve")


class Response(Telling):
    """One answer.

    A single-threaded value of the event loop: only the model works elsewhere, a piece at a time.
    What is cancelled says so at once, whatever the model is doing; a piece that comes later is
    nobody's.

    Args:
        session: Whose.
        settings: In effect for it; see `Settings.of_response`.
        own: It stands outside of the conversation.
        metadata: Given back as it came.

    Attributes:
        id: Its name.
        item: What it says.
        over: It has said that it is done.
    """

    async def make(self, question: BrainQuestion) -> None:
        """Answer, unless it is cancelled; every exception ends it as failed."""
        session = self.session
        brain, limits = session.brain, session.service.limits
        run = ReplyRun(self.id, self.reply, lambda: brain.answer(question))
        try:
            while await self._ready(limits.ahead):
                self._take(run, await session.service.work(run.pull))
        finally:
            await session.service.work(run.close)

    async def _ready(self, ahead: float) -> bool:
        """Wait while the client has enough to read, or to play; whether more is wanted."""
        session, playback = self.session, self.reply.playback
        await session.outbox.room()
        while playback is not None and not self.over:
            lead = playback.dry_at() - session.now() - ahead
            if lead <= 0:
                break
            await asyncio.sleep(min(lead, 0.25))
        return not self.over

    def _take(self, run: ReplyRun, sound: Sound | None) -> None:
        """A piece has come, or the end; too late, it is nobody's."""
        if self.over or sound is None:
            self.end("completed")
            return
        if sound.heard is not None:
            self.session.understanding.heard(self, sound.heard)
        more = self.session.brain.count(sound.text) if sound.text else 0
        limit = self.settings["max_output_tokens"]
        tokens = self.spent.text_out + self.spent.audio_out + more + sound.tokens
        if limit != "inf" and tokens > limit:
            self.end("incomplete", "max_output_tokens")
            return
        self.spent.text_out += more
        self.spent.audio_out += sound.tokens
        if self.aloud:
            run.take(sound, self.session.service.clock, 0.0)
        if sound.text:
            self._text(sound.text)
        if self.aloud and len(sound.pcm):
            self._audio(sound)

    def end(self, status: Status, reason: str = "") -> None:
        """Say that it is done; nothing of it comes afterwards."""
        if self.over:
            return
        cut = status in ("cancelled", "failed")
        if cut:
            self.session.outbox.purge(self.id)
        elif self._out is not None:
            self._sound(self._out.finish(), 0)
        self.over, self.status, self.reason = True, status, reason
        if self.reply.words is not None:
            self.reply.words.finished = not cut
        if cut:
            self.settle()
        if self.shown:
            self._close(cut)
        self._events("response.done", response=self.resource())
        self.session.responder.ended(self)

    @property
    def sounding(self) -> bool:
        """Whether some of it has not been played yet."""
        playback = self.reply.playback
        return playback is not None and playback.played() < playback.arrived

    def settle(self) -> None:
        """It sounds no more: the context keeps what was heard."""
        if self.reply.playback is not None:
            self.reply.settle(self.reply.playback.stop())
        elif self.aloud and self.reply.limit is None and self.over:
            self.reply.limit = 0

    def fail(self, error: BaseException) -> None:
        """The model could not."""
        if self.over:
            return
        known = told(error)
        if known["type"] == "server_error":
            _log.error("a response failed", exc_info=error)
        self.error = {name: known[name] for name in ("type", "code", "message")}
        self.end("failed")


def fitting(
    found: tuple[Turn, ...],
    instructions: str,
    count: Callable[[str], int],
    limits: SessionLimits,
    answer: int,
) -> tuple[Turn, ...]:
    """The newest turns that fit beside the instructions and an answer.

    Args:
        found: All turns, oldest first.
        instructions: What the model is told to be.
        count: Tokens of a text.
        limits: Of letters, and of tokens where the server names any.
        answer: Tokens that the answer may have.

    Raises:
        EventError: Not even the last turn fits.
    """
    found = _newest(found, limits.text, instructions, len, "letters")
    if limits.context is None:
        return found
    unit = f"tokens beside an answer of {answer}"
    return _newest(found, limits.context - answer, instructions, count, unit)


def _newest(
    found: tuple[Turn, ...], most: int, told: str, size: Callable[[str], int], unit: str
) -> tuple[Turn, ...]:
    left, count = most - (size(told) if told else 0), 0
    for turn in reversed(found):
        left -= size(turn.text)
        if left < 0:
            break
        count += 1
    if left < 0 and not count:
        text = f"what is to be answered has over {most:,} {unit}; say less, or tell less"
        raise EventError(text, "context_length_exceeded")
    return found[len(found) - count :]
