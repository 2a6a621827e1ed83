"""What a client is told of one response, in the order that clients rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from mmfast.core.speech import Sound
from mmfast.serve.realtime.formats import Outgoing
from mmfast.serve.realtime.items import Item, Part, new_id
from mmfast.serve.realtime.usage import Spent
from mmfast.streams.voice_history import Item as Reply

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import Session

Status = Literal["in_progress", "completed", "cancelled", "incomplete", "failed"]
PIECE = 0.4  # seconds of one delta: what a cancel overtakes is forgotten by whole deltas


class Telling:
    """A response as its client is told of it; see `Response`, whose arguments these are."""

    def __init__(
        self,
        session: Session,
        settings: dict[str, Any],
        own: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self.id, self.session, self.settings = new_id("resp"), session, settings
        self.own, self.metadata = own, metadata
        self.aloud = settings["output_modalities"] == ["audio"]
        self.item = Item(new_id("item"), "assistant", status="in_progress")
        self.reply = Reply(self.item.id, "assistant")
        self.status: Status = "in_progress"
        self.reason, self.error = "", dict[str, Any]()
        self.shown = self.over = False
        self.asks: list[Item] = []  # what a model that answers speech itself is answering
        self.spent = Spent()
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
        self.item.parts.append(Part("output_audio" if self.aloud else "output_text"))
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
