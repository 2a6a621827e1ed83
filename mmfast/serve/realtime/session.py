"""One session: events of a client in, events of the server out, a dialogue between them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmfast.serve.realtime import protocol
from mmfast.serve.realtime.brain import ChatterBrain, ChatterVoices
from mmfast.serve.realtime.conversation import (
    Conversation,
    ConversationItem,
    ItemPart,
    new_id,
    written,
)
from mmfast.serve.realtime.engine import media_of
from mmfast.serve.realtime.formats import Incoming, unpack
from mmfast.serve.realtime.player import DeltaPlayer, MakePlayer
from mmfast.serve.realtime.protocol import EventError, error_fields
from mmfast.serve.realtime.queues import Outbox, PictureQueue, RecordingQueue
from mmfast.serve.realtime.response import Response, question_of
from mmfast.serve.realtime.service import RealtimeService
from mmfast.serve.realtime.settings import Settings
from mmfast.voice.channel import Kind, Status
from mmfast.voice.dialogue import Dialogue, SpokenReply
from mmfast.voice.ear import RATE, ManualEar, MurmurEar, SemanticEar

BLOCK = RATE // 4  # samples that are listened to before the loop may do something else
SHORTEST = RATE // 10  # of a turn that a client commits
LONGEST = 120  # seconds that the buffer holds where the client commits its turns
NEAR = 0.25  # least seconds between two pictures of items, which come without times

_log = logging.getLogger("mmfast.serve")
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


class RealtimeSession(Dialogue):
    """A dialogue with one client; all of it happens in the event loop.

    Events of the client become calls of the dialogue, events of the dialogue become events of the
    protocol; models work in the service's threads. `asked` are its first settings (`EventError`),
    and `player` makes the way out for its sound. `running` holds responses by name with their
    tasks, until the model has let go of them; `taken` counts input samples at 16 kHz; `spend` and
    `charge` count tokens and pixels. A session of the kind `transcription` answers nothing.
    """

    def __init__(
        self,
        service: RealtimeService,
        voices: ChatterVoices,
        brain: ChatterBrain,
        kind: str = "realtime",
        asked: Sequence[protocol.SessionShape] = (),
        player: MakePlayer = DeltaPlayer,
    ) -> None:
        limits, most = service.limits, max(service.config.max_media - 1, 1)  # a clip comes on top
        self.conversation = Conversation(letters=limits.text, pictures=most)
        super().__init__(service.clock, self.conversation)
        self.id, self.service, self.brain, self.closed = new_id("sess"), service, brain, False
        self.outbox = Outbox()
        self.player = player(self.outbox)
        given = voices.voices, limits.seconds, voices.pace, service.config.strict_model, kind
        model = getattr(brain, "adapter", None) or service.model()
        calls = getattr(brain, "calls", False)
        self.settings = Settings(self.id, model, *given, calls, service.served)
        for shape in asked:
            self._apply(shape)
        self.began = self.last_event = self.clock.now()
        self.taken, self.quiet_since, self._pictured = 0, 0.0, -NEAR
        self._incoming = Incoming(self.settings.input_format)
        self._detection = self.settings.detection
        self.running: dict[str, tuple[Response, asyncio.Task[None]]] = {}
        self.frames = PictureQueue(limits.frames, self._see, self.fail)
        self.recordings = RecordingQueue(limits.recordings, self._transcribe, self._show_transcript)
        self.spend: Callable[[int], None] = lambda tokens: None
        self.charge = self.spend
        self._configure()
        self._handlers: dict[str, Callable[[Any], Awaitable[None] | None]] = {
            "session.update": self._update,
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": lambda _: self.clear(),
            "output_audio_buffer.clear": self._silence,
            "conversation.item.create": self._create,
            "conversation.item.delete": lambda event: self.delete(event.item_id),
            "conversation.item.retrieve": self._retrieve,
            "conversation.item.truncate": self._truncate,
            "response.create": self._respond,
            "response.cancel": self._cancel,
            "mmfast.input_image_buffer.append": self._image,
        }
        self.send(type="session.created", session=self.settings.shown)

    # --- events of the client ---

    async def handle(self, text: str) -> None:
        """Handle one event of the client; an error is sent back, and the session goes on."""
        self.last_event, event_id = self.clock.now(), None
        try:
            if len(text) > self.service.limits.message:
                raise EventError(
                    f"the event has {len(text)} letters; send {self.service.limits.message} at "
                    "most, sound in smaller pieces",
                    "message_too_large",
                )
            found = protocol.read(text, self.service.config.max_json_depth)
            given = found.get("event_id")
            event_id = given[:512] if isinstance(given, str) else None
            event = protocol.checked(found)
            waits = self._handlers[event.type](event)
            if waits is not None:
                await waits
        except Exception as error:
            self.fail(error, event_id)

    def fail(self, error: BaseException, event_id: str | None) -> None:
        """Tell the client that an event could not be handled."""
        known = self._known(error, "an event failed")
        self.send(type="error", error={**known, "event_id": event_id})

    def _known(self, error: BaseException, text: str) -> dict[str, Any]:
        known = error_fields(error)
        if known["type"] == "server_error":
            _log.error(text, exc_info=error)
        return known

    def send(self, **event: Any) -> None:
        """Send an event to the client."""
        self.outbox.put(event)

    def _check_text(self, text: str | None, param: str) -> None:
        letters, most = len(text or ""), self.service.limits.text
        if letters > most:
            text = f"{letters:,} letters of text; {most:,} are allowed: say less"
            raise EventError(text, "string_above_max_length", param)

    def _apply(self, asked: protocol.SessionShape) -> None:
        self._check_text(asked.instructions, "session.instructions")
        self.settings.update(asked)

    def _update(self, event: Any) -> None:
        self._apply(event.session)
        self._configure()
        self.send(type="session.updated", session=self.settings.shown)

    def _configure(self) -> None:
        """Follow the settings: another way to find turns begins anew."""
        if self.settings.input_format != self._incoming.format:
            self._incoming = Incoming(self.settings.input_format)
        if self.settings.detection != self._detection:
            if self.open or (isinstance(self.ear, ManualEar) and self.ear.held):
                self.clear()  # and tell so: the words were heard by what is gone
            self._detection, self.ear = self.settings.detection, None
        turns = self.settings.turn_detection or {}
        self.interrupting = bool(turns.get("interrupt_response"))
        self.answering = bool(turns.get("create_response")) and self.settings.answers
        self.murmur = MurmurEar(self.brain.overhear) if self.settings.backchannels else None

    async def _append(self, event: Any) -> None:
        sound = unpack(event.audio, "audio", self.service.limits.message)
        await self.listen(self._incoming.take(sound))

    async def listen(self, pcm: Tensor) -> None:
        """Listen to more sound `[n]` at 16 kHz; `ModelError` if nothing can find turns here."""
        service, turns = self.service, self.settings.turn_detection
        if self.ear is None:
            self.offset = self.taken
            self.ear = (
                ManualEar(LONGEST + 1.0)
                if turns is None
                else await service.listen(partial(service.ear, turns))
            )
        ear = self.ear
        if isinstance(ear, SemanticEar) and ear.hears is None:
            ear.hears = self.brain.overhear
        if isinstance(ear, ManualEar):
            if ear.held + len(pcm) > LONGEST * RATE:
                text = f"the buffer holds {LONGEST} s and is full; commit or clear it"
                raise EventError(text, "input_audio_buffer_full")
            self.taken += len(pcm)
            ear.hear(pcm)  # the client says when a turn begins and ends
            return
        for block in pcm.split(BLOCK) if len(pcm) else ():
            self.taken += len(block)
            for heard in await service.listen(partial(ear.hear, block)):
                self.hear(heard)
            if (said := self.undecided()) is not None:
                self.decide(await service.listen(partial(self.judged, said)))

    def _commit(self, _: Any) -> None:
        """End the current turn; `EventError` if it has less than 100 ms of sound."""
        ear, manual = self.ear, self.settings.turn_detection is None
        if isinstance(ear, ManualEar) and ear.held < SHORTEST:
            pcm = torch.zeros(ear.held)
        else:
            found = [] if ear is None else ear.flush()
            pcm = torch.cat([torch.zeros(0), *[h.pcm for h in found if h.pcm is not None]])
        if len(pcm) < SHORTEST:
            raise EventError(
                f"the buffer has {1e3 * len(pcm) / RATE:.0f} ms of sound; at least 100 ms make a "
                "turn" + ("" if manual else " (of speech)"),
                "input_audio_buffer_commit_empty",
            )
        item, self.open = self.open or new_id("item"), ""
        self.take_turn(item, pcm)

    def _silence(self, _: Any) -> None:
        self.interrupt("interrupted")

    async def _create(self, event: Any) -> None:
        item = written(event.item, self.settings.input_format, self.service.limits.message)
        self._check_text(item.text, "item.content")
        pictures = []
        for number, part in enumerate(item.parts):
            if part.kind == "input_image":
                place = f"item.content.{number}.image_url"
                self._check_sight(place)
                picture = await self._decoded(part.picture, place)
                part.picture = ""
                if item.watched:
                    pictures.append(picture)
                else:
                    (part.media,) = media_of([(picture, 0.0)])
        self._add(item, event.previous_item_id)
        for picture in pictures:  # frames of a clip: a client that sends items loses none
            self._pictured = max(self.clock.now() - self.began, self._pictured + NEAR)
            await self.frames.room()
            self.frames.add(picture, self._pictured, event.event_id)
        if self.settings.transcribes and item.unheard:
            self.recordings.put(item.id, item)

    async def _decoded(self, url: str, param: str) -> Any:
        picture = await self.service.picture(url, param)
        self.charge(math.prod(picture.shape[:2]))
        return picture

    def _image(self, event: Any) -> None:
        self._check_sight("image")
        time = self.clock.now() - self.began if event.time is None else event.time
        self.frames.add(event.image, time, event.event_id)

    def _check_sight(self, param: str) -> None:
        if not self.brain.sees:
            raise EventError(
                "this model sees nothing; start the server with one that does", param=param
            )

    def _retrieve(self, event: Any) -> None:
        item = self.conversation.get(event.item_id)
        shown = item.shown(self.settings.input_format)
        self.send(type="conversation.item.retrieved", item=shown)

    def _truncate(self, event: Any) -> None:
        """Keep the part of a reply that was heard; a length beyond its end keeps all of it.

        Clients send such a length when they count sound that they have not played yet, and some
        never speak again after an error here.
        """
        item = self.conversation.get(event.item_id)
        if item.role != "assistant":
            raise EventError(
                f"item {item.id!r} is of {item.role}; only replies are truncated", param="item_id"
            )
        if event.content_index != 0:
            raise EventError("a reply has one part; give 0", param="content_index")
        self.cut(item.id, event.audio_end_ms)

    def _respond(self, event: Any) -> None:
        """Answer the conversation, or the items that the event contains."""
        if not self.settings.answers:
            text = "a session of type 'transcription' answers nothing; update it to 'realtime'"
            raise EventError(text, param="type")
        wish = event.response or protocol.Wish()
        settings, outside = self.settings.of_response(wish), wish.conversation == "none"
        self._check_text(wish.instructions, "response.instructions")
        most = self.service.limits.message
        items = self.conversation.brought(wish, self.settings.input_format, most)
        if not outside:
            self._check_free()
        conversation = None if outside else self.conversation.id
        self._start(Response(settings, conversation, wish.metadata, self.clock.now()), items)

    def _cancel(self, event: Any) -> None:
        """Stop a response; `EventError` if there is none, or none of that name."""
        named: SpokenReply | None = self.running.get(event.response_id or "", (None, None))[0]
        found = self.reply if event.response_id is None else named
        if found is None or found.over:
            raise EventError(
                "no such response is being made; it may be done already",
                "response_cancel_not_active",
                "response_id" if event.response_id else None,
            )
        self.stop(found, "cancelled")

    # --- what the dialogue asks for ---

    def emit(self, kind: Kind, reply: SpokenReply | None = None, **fields: Any) -> None:
        """Send an event of the dialogue as the protocol has it."""
        if isinstance(reply, Response):
            self._show_progress(kind, reply, fields)
            return
        ms, item = fields.get("audio_ms", 0.0), {"item_id": fields.get("item")}
        if kind in ("speech_started", "speech_stopped"):
            place = {f"audio_{'start' if kind == 'speech_started' else 'end'}_ms": round(ms)}
            self.send(type=f"input_audio_buffer.{kind}", **item, **place)
        elif kind == "backchannel":
            said = {"audio_start_ms": round(ms), "transcript": fields["text"]}
            self.send(type=f"mmfast.input_audio_buffer.{kind}", **said)  # OpenAI has none
        elif kind == "cleared":
            self.send(type="input_audio_buffer.cleared")
        elif kind == "truncated":
            kept = {"content_index": 0, "audio_end_ms": int(ms)}
            self.send(type="conversation.item.truncated", **item, **kept)
        elif kind == "deleted":
            self.send(type="conversation.item.deleted", **item)

    def name(self, kind: str) -> str:
        """Return a name such as `item_3f…`."""
        return new_id(kind)

    def take_turn(self, item: str, pcm: Tensor) -> None:
        """Put a turn of the user into the conversation."""
        turn = ConversationItem(
            item, "user", parts=[ItemPart("input_audio", pcm=pcm, unheard=True)]
        )
        self._committed(turn)
        if self.settings.transcribes:
            self.recordings.put(item, turn)

    def _committed(self, turn: ConversationItem) -> None:
        self.quiet_since = self.clock.now()
        before = self.conversation.last
        kind = "input_audio_buffer.committed"
        self.send(type=kind, previous_item_id=before, item_id=turn.id)
        self._add(turn)

    def answer_turn(self) -> None:
        """Answer the latest turn, unless a reply must not be interrupted."""
        settings, now = self.settings.of_response(protocol.Wish()), self.clock.now()
        try:
            self._check_free()
            response = Response(settings, self.conversation.id, None, now)
            self._start(response, list(self.conversation.items.values()))
        except EventError as error:
            self.fail(error, None)

    def understood(self, reply: SpokenReply, text: str) -> None:
        """Note the transcript that a model which answers speech itself gives of its question."""
        for item in reply.asks if isinstance(reply, Response) else ():
            for number, part in item.unheard:
                part.text, part.unheard, text = text.strip(), False, ""
                self._show_transcript(item, number)

    def _add(self, item: ConversationItem, after: str | None = None, content: bool = True) -> None:
        """Add an item to the conversation; a reply's content comes later."""
        before = self.conversation.insert(item, after)
        shown = item.shown() if content else {**item.shown(), "content": []}
        self.send(type="conversation.item.added", previous_item_id=before, item=shown)
        if content:
            self._complete(item)

    def _complete(self, item: ConversationItem) -> None:
        names = list(self.conversation.items)
        if item.id in names:
            at = names.index(item.id)
            before = names[at - 1] if at else None
            kind = "conversation.item.done"
            self.send(type=kind, previous_item_id=before, item=item.shown())

    def idle(self) -> None:
        """Treat a long silence as a turn, if the settings ask for that."""
        limit = (self.settings.turn_detection or {}).get("idle_timeout_ms")
        if limit is None or self.open or self.busy:
            return
        playback = None if self.reply is None else self.reply.item.playback
        since = max(self.quiet_since, 0.0 if playback is None else playback.dry_at())
        if 1e3 * (self.clock.now() - since) < limit:
            return
        item, end = new_id("item"), round(1e3 * self.taken / RATE)
        place = {"audio_start_ms": max(0, end - limit), "audio_end_ms": end}
        self.send(type="input_audio_buffer.timeout_triggered", item_id=item, **place)
        self._committed(ConversationItem(item, "user", parts=[ItemPart("input_audio")]))
        self.answer_turn()

    # --- responses ---

    def interrupt(self, status: Status) -> bool:
        """Take the floor from the reply that has it, and from those that still sound before it."""
        for response in self.player.sounding():
            if response is not self.reply:
                self.stop(response, status)
        return super().interrupt(status)

    @property
    def busy(self) -> bool:
        """True while a response is being made."""
        return any(not response.over for response, _ in self.running.values())

    def _check_free(self) -> None:
        if self.reply is not None and not self.reply.over:
            raise EventError(
                f"response {self.reply.id!r} is being made; wait for response.done or cancel it",
                "conversation_already_has_active_response",
            )

    def _start(self, response: Response, items: Sequence[ConversationItem]) -> None:
        if len(self.running) >= self.service.limits.responses:
            raise EventError(
                f"{len(self.running)} responses are being made; wait for one to end",
                "too_many_responses",
            )
        if response.conversation is not None:
            self.reply = response
        self.emit("reply_started", response)
        response.busy = True  # the task closes the model, in a thread
        frames = self.frames.pending()
        task = asyncio.get_running_loop().create_task(self._make(response, items, frames))
        self.running[response.id] = response, task

    async def _make(
        self,
        response: Response,
        items: Sequence[ConversationItem],
        frames: Sequence[asyncio.Future[None]],
    ) -> None:
        """Answer, unless it is cancelled; every exception ends it as failed."""
        service, brain = self.service, self.brain
        try:
            await asyncio.gather(*frames)
            await self._hear_all(items, response)
            options = self.settings.speaking(response.settings["output"])
            question = question_of(response, items, brain, service.limits, options)
            if question is not None and not response.over:
                response.make = partial(brain.answer, question)
                while await self._ready(response):
                    self._piece(response, await service.work(response.pull))
            self.take(response, None)
        except Exception as error:
            if not response.over:
                known = self._known(error, "a response failed")
                response.error = {name: known[name] for name in ("type", "code", "message")}
                self.stop(response, "failed")
        finally:
            if response.make is not None:
                await service.work(response.close)
            self.running.pop(response.id, None)

    async def _hear_all(self, items: Sequence[ConversationItem], response: Response) -> None:
        """Transcribe all speech, except the last turn for a model that answers speech itself."""
        before = list(items)
        while self.brain.native and before and before[-1].spoken:
            before.pop()
        for item in before:
            if item.unheard and not response.over:
                await self.recordings.put(item.id, item)

    async def _ready(self, response: Response) -> bool:
        """Wait while the client has enough to read or play; return True if it wants more."""
        await self.outbox.room()
        playback = response.item.playback
        while playback is not None and not response.over:
            lead = playback.dry_at() - self.clock.now() - self.service.limits.ahead
            if lead <= 0:
                break
            await asyncio.sleep(min(lead, 0.25))
        return not response.over

    def _piece(self, response: Response, sound: Any) -> None:
        """Take the next piece; one beyond the limit of tokens ends the response."""
        if sound is not None and not response.over:
            words = self.brain.count(sound.text) if sound.text else 0
            if not response.spend(words, sound):
                self.end(response, "incomplete")
                return
        finish = response.run.finish
        if sound is None and not response.over:
            if finish is not None:
                response.spent.settle(finish)
            if finish is not None and finish.reason == "length":
                self.end(response, "incomplete")
            else:  # a call that was cut short is none
                response.read_calls()
        self.take(response, sound)

    def _show_progress(self, kind: Kind, response: Response, fields: dict[str, Any]) -> None:
        if kind == "reply_started":
            self.send(type="response.created", response=response.resource(dict(self.frames.counts)))
            self.send(type="rate_limits.updated", rate_limits=[])
        elif kind == "text":
            self._show_text(response, fields["text"])
        elif kind == "audio" and response.aloud:
            self._show_audio(response, fields["pcm"], fields["rate"])
        elif kind == "interrupted" and self.player.cut(response) and response.conversation:
            self.emit("truncated", item=response.item.id, audio_ms=fields["audio_ms"])
        elif kind == "done":
            self._show_end(response, fields["status"])

    def _show_item(self, response: Response) -> None:
        if response.shown:
            return
        self.send(**response.show())
        if response.conversation is not None:
            self._add(response.item, content=False)
        kind = "response.content_part.added"
        self.send(type=kind, **response.place(), part=response.part(""))

    def _show_text(self, response: Response, text: str) -> None:
        self._show_item(response)
        response.item.parts[0].text += text

        def sent() -> None:
            if not response.over:
                response.sent += text

        kind = "output_audio_transcript" if response.aloud else "output_text"
        self.outbox.put(response.delta(kind, text), response.id, sent)

    def _show_audio(self, response: Response, pcm: Tensor, rate: int) -> None:
        self._show_item(response)
        if response.first_audio is None:
            response.first_audio = self.clock.now() - response.asked
            self.service.count("first_audio", response.first_audio, "realtime")
        self.player.play(response, pcm, rate)

    def _show_end(self, response: Response, status: Any) -> None:
        if not response.conclude(status):
            self.player.finish(response)
        if response.shown:
            for event in response.closing():
                self.send(**event)
            if response.conversation is not None:
                self._complete(response.item)
            which = {"response_id": response.id, "output_index": 0}
            kind = "response.output_item.done"
            self.send(type=kind, **which, item=response.sent_item())
        if status == "completed":
            self._show_calls(response)
        self.send(type="response.done", response=response.resource(dict(self.frames.counts)))
        self.spend(response.spent.charged)

    def _show_calls(self, response: Response) -> None:
        for number, item in enumerate(response.called, int(response.shown)):
            for event in response.call_events(item, number):
                self.send(**event)
                if event["type"] == "response.output_item.added" and response.conversation:
                    self._add(item)

    # --- frames and recordings ---

    async def _see(self, picture: Any, time: float) -> None:
        if isinstance(picture, str):
            picture = await self._decoded(picture, "image")
        if not self.closed:
            await self.service.work(partial(self.brain.see, picture, time))

    async def _transcribe(self, pcm: Tensor) -> str:
        return await self.service.work(partial(self.brain.hear, pcm))

    def _show_transcript(
        self, item: ConversationItem, number: int, error: dict[str, Any] | None = None
    ) -> None:
        """Send a transcript, if the client wants transcripts."""
        if not self.settings.transcribes or item.id not in self.conversation.items:
            return
        place, part = {"item_id": item.id, "content_index": number}, item.parts[number]
        if error is not None:
            self.send(type=f"{_TRANSCRIPTION}.failed", **place, error=error)
            return
        if part.text:
            self.send(type=f"{_TRANSCRIPTION}.delta", **place, delta=part.text)
        seconds = 0.0 if part.pcm is None else len(part.pcm) / RATE
        usage = {"type": "duration", "seconds": round(seconds, 3)}
        kind = f"{_TRANSCRIPTION}.completed"
        self.send(type=kind, **place, transcript=part.text, usage=usage)

    async def close(self) -> None:
        """End the session and free everything that it holds."""
        self.closed = True
        self.outbox.close()
        for backlog in (self.recordings, self.frames):
            backlog.clear()
        running = list(self.running.values())
        for response in (response for response, _ in running if not response.over):
            self.stop(response, "cancelled")
        ends = [task for _, task in running]
        await asyncio.gather(*ends, self.frames.finished(), self.recordings.finished())
        await self.service.listen(self.brain.close)
