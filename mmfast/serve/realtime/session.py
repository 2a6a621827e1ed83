"""One session: events of a client in, events of the server out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mmfast.serve.realtime import events as e
from mmfast.serve.realtime.brain import Brain, Voices
from mmfast.serve.realtime.conversation import Conversation
from mmfast.serve.realtime.errors import EventError, told
from mmfast.serve.realtime.hearing import Hearing
from mmfast.serve.realtime.items import Item, new_id, written
from mmfast.serve.realtime.outbox import Outbox
from mmfast.serve.realtime.responder import Responder
from mmfast.serve.realtime.seeing import Seeing
from mmfast.serve.realtime.service import RealtimeService
from mmfast.serve.realtime.settings import Settings
from mmfast.serve.realtime.understanding import Understanding

_log = logging.getLogger("mmfast.serve")


class Session:
    """A conversation with one client; all of it happens in the event loop.

    Args:
        service: What sessions share.
        voices: What listens and answers.
    """

    def __init__(self, service: RealtimeService, voices: Voices, brain: Brain) -> None:
        self.id, self.service, self.brain, self.pace = new_id("sess"), service, brain, voices.pace
        limits = service.limits
        self.outbox, self.closed = Outbox(), False
        self.settings = Settings(self.id, service.model(), voices.voices, limits.seconds)
        self.conversation = Conversation(letters=limits.text)
        self.began = self.last_event = self.now()
        self.hearing = Hearing(self)
        self.seeing = Seeing(self, limits.frames)
        self.responder = Responder(self)
        self.spend: Callable[[int], None] = lambda tokens: (
            None
        )  # counts them where there are quotas
        self.understanding = Understanding(self, limits.recordings)
        self._handlers: dict[type[e.Event], Callable[[Any], Awaitable[None] | None]] = {
            e.SessionUpdate: self._update,
            e.AudioAppend: self.hearing.append,
            e.AudioCommit: lambda _: self.hearing.commit(),
            e.AudioClear: lambda _: self.hearing.clear(),
            e.OutputClear: lambda _: self.responder.interrupt(),
            e.ItemCreate: self._create,
            e.ItemDelete: self._delete,
            e.ItemRetrieve: self._retrieve,
            e.ItemTruncate: self._truncate,
            e.ResponseCreate: self.responder.create,
            e.ResponseCancel: self.responder.cancel,
            e.ImageAppend: self._image,
        }
        self.send(type="session.created", session=self.settings.values)

    def now(self) -> float:
        """Seconds of the service's clock."""
        return float(self.service.clock.now())

    def send(self, **event: Any) -> None:
        """Tell the client."""
        self.outbox.put(event)

    def fail(self, error: BaseException, event_id: str | None) -> None:
        """Tell the client that an event could not be done; the session goes on."""
        known = told(error)
        if known["type"] == "server_error":
            _log.error("an event failed", exc_info=error)
        self.send(type="error", error={**known, "event_id": event_id})

    async def handle(self, text: str) -> None:
        """One event of the client; whatever is wrong with it, the client is told."""
        self.last_event, event_id = self.now(), None
        try:
            if len(text) > self.service.limits.message:
                raise EventError(
                    f"the event has {len(text)} letters; send {self.service.limits.message} at "
                    "most, sound in smaller pieces",
                    "message_too_large",
                )
            found = e.read(text, self.service.config.max_json_depth)
            given = found.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            event = e.checked(found)
            waits = self._handlers[type(event)](event)
            if waits is not None:
                await waits
        except Exception as error:
            self.fail(error, event_id)

    def check_text(self, texts: Sequence[str], param: str) -> None:
        """Refuse more letters than the server takes in one request.

        Raises:
            EventError: Says how many.
        """
        letters, most = sum(map(len, texts)), self.service.limits.text
        if letters > most:
            text = f"{letters:,} letters of text; {most:,} are allowed: say less"
            raise EventError(text, "string_above_max_length", param)

    def _update(self, event: e.SessionUpdate) -> None:
        self.check_text([event.session.instructions or ""], "session.instructions")
        self.settings.update(event.session)
        self.hearing.configure()
        self.send(type="session.updated", session=self.settings.values)

    def add(self, item: Item, after: str | None = None, content: bool = True) -> None:
        """An item of the conversation, and say so; a reply's content comes later."""
        before = self.conversation.add(item, after)
        shown = item.shown() if content else {**item.shown(), "content": []}
        kind = "conversation.item.added"
        self.send(type=kind, previous_item_id=before, item=shown)
        if content:
            self.done(item, before)

    def done(self, item: Item, before: str | None = None) -> None:
        """An item is complete."""
        if item.id not in self.conversation.items:
            return
        names = list(self.conversation.items)
        at = names.index(item.id)
        before = names[at - 1] if at else None
        kind = "conversation.item.done"
        self.send(type=kind, previous_item_id=before, item=item.shown())

    async def _create(self, event: e.ItemCreate) -> None:
        limit, settings = self.service.limits.message, self.settings
        item = written(event.item, settings.input_format, limit)
        self.check_text([item.text], "item.content")
        frames = []
        for number, part in enumerate(item.parts):
            if part.kind == "input_image":
                place = f"item.content.{number}.image_url"
                self.seeing.check(place)
                frames.append(await self.service.picture(part.picture, place))
                part.picture = ""
        self.add(item, event.previous_item_id)
        for frame in frames:
            self.seeing.add(frame, None, event.event_id)
        if settings.transcribes and item.unheard:
            self.understanding.ask(item)

    def _image(self, event: e.ImageAppend) -> None:
        self.seeing.check("image")
        self.seeing.add(event.image, event.time, event.event_id)

    def _retrieve(self, event: e.ItemRetrieve) -> None:
        item = self.conversation.get(event.item_id)
        shown = item.shown(self.settings.input_format)
        self.send(type="conversation.item.retrieved", item=shown)

    def _delete(self, event: e.ItemDelete) -> None:
        item, current = self.conversation.get(event.item_id), self.responder.current
        if current is not None and current.item is item:
            current.end("cancelled", "client_cancelled")
        self.conversation.remove(item.id)
        self.send(type="conversation.item.deleted", item_id=item.id)

    def _truncate(self, event: e.ItemTruncate) -> None:
        """So much was heard; more than there is means all there is, and is no error.

        Clients ask for more than there is when they count what they have not played yet, and
        some never speak again after an error here.
        """
        item, current = self.conversation.get(event.item_id), self.responder.current
        if item.role != "assistant":
            raise EventError(
                f"item {item.id!r} is of {item.role}; only replies are truncated", param="item_id"
            )
        if event.content_index != 0:
            raise EventError("a reply has one part; give 0", param="content_index")
        if current is not None and current.item is item:
            current.end("cancelled", "client_cancelled")
        ms = _cut(item, event.audio_end_ms)
        place = {"item_id": item.id, "content_index": 0, "audio_end_ms": ms}
        self.send(type="conversation.item.truncated", **place)

    async def close(self) -> None:
        """End: models let go of it, nothing of it is left."""
        self.closed = True
        self.outbox.close()
        self.understanding.forget()
        await self.responder.close()
        await asyncio.gather(self.seeing.close(), self.understanding.close())
        await self.service.listen(self.brain.close)


def _cut(item: Item, ms: float) -> int:
    """Keep so much of a reply; returns the milliseconds that are left."""
    reply = item.reply
    if reply is None or reply.words is None:
        return 0
    if reply.playback is not None:
        reply.settle(reply.playback.stop())
    rate = reply.words.rate
    reply.cut(round(min(max(ms, 0.0), 1e9) * rate / 1e3))
    return int(1e3 * reply.played / rate)
