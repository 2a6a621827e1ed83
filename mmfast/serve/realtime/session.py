"""One session: events of a client in, events of the server out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.serve.realtime import protocol as e
from mmfast.serve.realtime.brain import Brain, BrainQuestion, Voices
from mmfast.serve.realtime.conversation import (
    Conversation,
    ConversationItem,
    joined_instructions,
    new_id,
    turns,
    written,
)
from mmfast.serve.realtime.errors import EventError, told
from mmfast.serve.realtime.input import Hearing, Seeing, Understanding
from mmfast.serve.realtime.outbox import Outbox
from mmfast.serve.realtime.protocol import ReferenceShape, ResponseCancel, ResponseCreate, Wish
from mmfast.serve.realtime.response import Response, fitting
from mmfast.serve.realtime.service import RealtimeService
from mmfast.serve.realtime.settings import Settings

HEARD_TOKENS = 25 / 16000  # of the embedded model's tower, a sample


class Responder:
    """Responses of one session: one in the conversation, and a few beside it.

    Attributes:
        running: Tasks by the name of their response, until the model has let go of it.
        current: The response in the conversation, while it is being made.
        last: The one before, whose sound may still be playing.
    """

    def __init__(self, session: RealtimeSession) -> None:
        self._session = session
        self.running: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self.current: Response | None = None
        self.last: Response | None = None

    @property
    def busy(self) -> bool:
        """Whether a response is being made."""
        return any(not response.over for response, _ in self.running.values())

    def silent_since(self) -> float:
        """When the last reply will have been played."""
        playback = None if self.last is None else self.last.reply.playback
        return 0.0 if playback is None else playback.dry_at()

    def create(self, event: ResponseCreate) -> None:
        """Answer what was said, or what the event brings along.

        Raises:
            EventError: A response is being made already, or something cannot be had.
        """
        session, wish = self._session, event.response or Wish()
        settings = session.settings.of_response(wish)
        session.check_text([wish.instructions or ""], "response.instructions")
        own = wish.conversation == "none"
        items = self._brought(wish)
        if not own:
            self._check_free()
        self._start(Response(session, settings, own, wish.metadata), items)

    def answer_turn(self) -> None:
        """Answer what was just said, unless a reply must not be interrupted."""
        settings = self._session.settings.of_response(Wish())
        try:
            self._check_free()
            self._start(Response(self._session, settings), self._items())
        except EventError as error:
            self._session.fail(error, None)

    def _check_free(self) -> None:
        if self.current is not None and not self.current.over:
            raise EventError(
                f"response {self.current.id!r} is being made; wait for response.done or cancel it",
                "conversation_already_has_active_response",
            )

    def _items(self) -> list[ConversationItem]:
        return list(self._session.conversation.items.values())

    def _brought(self, wish: Wish) -> list[ConversationItem]:
        """The items that are to be answered."""
        if wish.input is None:
            return self._items()
        session, found = self._session, []
        for number, each in enumerate(wish.input):
            if isinstance(each, ReferenceShape):
                found.append(session.conversation.get(each.id))
                continue
            format, most = session.settings.input_format, session.service.limits.message
            item = written(each, format, most, f"response.input.{number}")
            if any(part.kind == "input_image" for part in item.parts):
                raise EventError(
                    "frames go into the conversation; create an item of the picture first",
                    param=f"response.input.{number}",
                )
            found.append(item)
        return found

    def _start(self, response: Response, items: Sequence[ConversationItem]) -> None:
        session = self._session
        if len(self.running) >= session.service.limits.responses:
            raise EventError(
                f"{len(self.running)} responses are being made; wait for one to end",
                "too_many_responses",
            )
        if not response.own:
            self.current = self.last = response
        response.begin()
        frames = session.seeing.counts["came"]
        task = asyncio.get_running_loop().create_task(self._make(response, items, frames))
        self.running[response.id] = response, task

    async def _make(
        self, response: Response, items: Sequence[ConversationItem], frames: int
    ) -> None:
        try:
            await self._session.seeing.settled(frames)
            question = await self._question(response, items)
            if question is not None and not response.over:
                await response.make(question)
            response.end("completed")
        except Exception as error:
            response.fail(error)
        finally:
            self.running.pop(response.id, None)

    async def _question(
        self, response: Response, items: Sequence[ConversationItem]
    ) -> BrainQuestion | None:
        """What is to be answered; None where nothing was said."""
        session, settings = self._session, response.settings
        pcm: Tensor | None = None
        before = list(items)
        if session.brain.native:
            pcm = self._said(before, response)
        for item in before:
            if item.unheard and not response.over:
                await session.understanding.ask(item)
        found, instructions = turns(before), joined_instructions(before, settings["instructions"])
        if pcm is None and (not found or found[-1].role != "user"):
            if items and items[-1].spoken:
                return None  # a cough, or nothing for long
            # "greet the user": what nobody asked for is told by the response's own instructions
            found, instructions = (*found, _asked(settings["asked"])), ""
        limit = settings["max_output_tokens"]
        limits, answer = session.service.limits, 1 if limit == "inf" else limit
        if found or instructions:
            found = fitting(found, instructions, session.brain.count, limits, answer)
        self._spend(response, [instructions, *(turn.text for turn in found)], pcm)
        options = self._options(settings["output"])
        most = limits.tokens if limit == "inf" else limit
        if limits.context is not None:
            most = min(most, limits.context - response.spent.text_in)
        return BrainQuestion(found, pcm, instructions, response.aloud, options, most)

    def _said(self, items: list[ConversationItem], response: Response) -> Tensor | None:
        """The sound of the user's last turn, whose items are taken from the list."""
        parts: list[Tensor] = []
        while items and items[-1].spoken:
            item = items.pop()
            response.asks.insert(0, item)
            parts = [part.pcm for part in item.parts if part.pcm is not None] + parts
        return torch.cat(parts) if parts else None

    def _spend(self, response: Response, texts: Sequence[str], pcm: Tensor | None) -> None:
        brain, spent = self._session.brain, response.spent
        spent.text_in = sum(brain.count(text) for text in texts if text)
        spent.audio_in = 0 if pcm is None else round(len(pcm) * HEARD_TOKENS)
        spent.image_in = int(brain.figures().get("tokens", 0))

    def _options(self, output: dict[str, Any]) -> dict[str, Any]:
        """Voice and speed as the speaker knows them."""
        session, found = self._session, dict[str, Any]()
        voice = session.settings.own_voice(output["voice"])
        if voice is not None:
            found["voice"] = voice
        if session.pace is not None and output["speed"] != 1.0:
            least, usual, most = session.pace
            found["speed"] = round(min(max(usual * output["speed"], least), most))
        return found

    def interrupt(self) -> None:
        """Somebody speaks: what is being said, or still played, falls silent."""
        if self.current is not None and not self.current.over:
            self.current.end("cancelled", "turn_detected")
        elif self.last is not None and self.last.sounding:
            self.last.settle()

    def cancel(self, event: ResponseCancel) -> None:
        """Stop a response.

        Raises:
            EventError: None is being made, or none of that name.
        """
        if event.response_id is None:
            found = self.current
        else:
            found = self.running.get(event.response_id, (None, None))[0]
        if found is None or found.over:
            raise EventError(
                "no such response is being made; it may be done already",
                "response_cancel_not_active",
                "response_id" if event.response_id else None,
            )
        found.end("cancelled", "client_cancelled")

    def ended(self, response: Response) -> None:
        """A response has said that it is done."""
        self._session.spend(response.spent.total - response.spent.image_in)
        if response is self.current:
            self.current = None

    async def close(self) -> None:
        """Stop all of them, and wait until the models have let go."""
        for response, _ in list(self.running.values()):
            response.end("cancelled", "client_cancelled")
        await asyncio.gather(*(task for _, task in self.running.values()))


def _asked(instructions: str) -> Turn:
    """Instructions of a response as a question.

    Raises:
        EventError: There are none.
    """
    if not instructions.strip():
        raise EventError(
            "there is nothing to answer; create an item of the user, commit sound, or give "
            "response.instructions",
            "nothing_to_answer",
        )
    return Turn("user", instructions)


_log = logging.getLogger("mmfast.serve")


class RealtimeSession:
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
        self._handlers: dict[type[e.RealtimeEvent], Callable[[Any], Awaitable[None] | None]] = {
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

    def add(self, item: ConversationItem, after: str | None = None, content: bool = True) -> None:
        """An item of the conversation, and say so; a reply's content comes later."""
        before = self.conversation.add(item, after)
        shown = item.shown() if content else {**item.shown(), "content": []}
        kind = "conversation.item.added"
        self.send(type=kind, previous_item_id=before, item=shown)
        if content:
            self.done(item, before)

    def done(self, item: ConversationItem, before: str | None = None) -> None:
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


def _cut(item: ConversationItem, ms: float) -> int:
    """Keep so much of a reply; returns the milliseconds that are left."""
    reply = item.reply
    if reply is None or reply.words is None:
        return 0
    if reply.playback is not None:
        reply.settle(reply.playback.stop())
    rate = reply.words.rate
    reply.cut(round(min(max(ms, 0.0), 1e9) * rate / 1e3))
    return int(1e3 * reply.played / rate)
