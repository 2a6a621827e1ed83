"""What must hold of every event of a realtime session, whoever wrote the server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from openai._models import validate_type
from openai.types.realtime import RealtimeServerEvent
from realtime_tools import unpacked
from tone_models import TONE, read
from torch import Tensor

REPLY = "response."
_CLOSE_AUDIO = [
    "response.output_audio.done",
    "response.output_audio_transcript.done",
    "response.content_part.done",
]
_CLOSE_TEXT = ["response.output_text.done", "response.content_part.done"]
_DELTAS = {
    "response.output_audio.delta": True,
    "response.output_audio_transcript.delta": True,
    "response.output_text.delta": False,
}
# event of a client -> what answers it, where nothing else makes the server say that
_ANSWERS = {
    "session.update": "session.updated",
    "conversation.item.delete": "conversation.item.deleted",
    "conversation.item.retrieve": "conversation.item.retrieved",
    "conversation.item.truncate": "conversation.item.truncated",
    "input_audio_buffer.clear": "input_audio_buffer.cleared",
}


_TAKEN: set[Any] = set()


@dataclass
class Told:
    """A response as its events tell it."""

    id: str
    own: bool
    aloud: bool
    asked: dict[str, Any]
    before_speech: int
    steps: list[str] = field(default_factory=list)
    item: str = ""
    text: str = ""
    sound: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def heard(self) -> Tensor:
        return torch.cat([torch.zeros(0), *map(unpacked, self.sound)])


class Rules:
    """Looks at events as they come, and raises at the first that breaks a rule.

    Args:
        hums: Replies are hummed, so that what sounds can be read.
    """

    def __init__(self, hums: bool = True) -> None:
        self.hums = hums
        self.ids: set[str] = set()
        self.items: list[str] = []
        self.responses: dict[str, Told] = {}
        self.by_item: dict[str, Told] = {}
        self.kinds: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.event_ids: dict[str, str] = {}
        self.cuts: dict[str, int] = {}
        self.speech = 0
        self.speaking = ""
        self.interrupts = True

    def client(self, kind: str, event_id: str) -> None:
        """A client has sent this."""
        self.sent[kind] += 1
        self.event_ids[event_id] = kind

    def server(self, event: dict[str, Any]) -> None:
        """The server has sent this."""
        kind = event["type"]
        self._typed(event)
        assert event["event_id"] not in self.ids, "an event_id comes twice"
        self.ids.add(event["event_id"])
        assert (kind == "session.created") == (not self.kinds), "session.created comes first"
        self.kinds[kind] += 1
        if kind.startswith(REPLY):
            self._response(kind, event)
        look = getattr(self, "_" + kind.replace(".", "_"), None)
        if look is not None:
            look(event)

    def _typed(self, event: dict[str, Any]) -> None:
        """The client's own types take it; of deltas, once for all of the same fields and types."""
        shape = (event["type"], *((name, type(value)) for name, value in event.items()))
        if shape not in _TAKEN or not event["type"].endswith("delta"):
            validate_type(type_=RealtimeServerEvent, value=event)  # type: ignore[arg-type]
            _TAKEN.add(shape)

    def _error(self, event: dict[str, Any]) -> None:
        asked = event["error"]["event_id"]
        assert "\n" not in event["error"]["message"] and event["error"]["message"]
        assert event["error"]["type"] == "invalid_request_error", event
        if asked in self.event_ids:
            self.failed[self.event_ids.pop(asked)] += 1

    def _session_updated(self, event: dict[str, Any]) -> None:
        turns = event["session"]["audio"]["input"]["turn_detection"]
        self.interrupts = bool(turns and turns["interrupt_response"])
        if turns is None:  # the ear is gone, with what it was hearing
            self.speaking = ""

    def _input_audio_buffer_speech_started(self, event: dict[str, Any]) -> None:
        assert not self.speaking, "speech began twice"
        self.speaking = event["item_id"]
        self.speech += self.interrupts

    def _input_audio_buffer_speech_stopped(self, event: dict[str, Any]) -> None:
        assert event["item_id"] == self.speaking, "speech of another item stopped"

    def _input_audio_buffer_committed(self, event: dict[str, Any]) -> None:
        assert event["item_id"] not in self.items
        assert event["previous_item_id"] == (self.items[-1] if self.items else None)
        assert not self.speaking or event["item_id"] == self.speaking
        self.speaking = ""

    def _input_audio_buffer_cleared(self, event: dict[str, Any]) -> None:
        self.speaking = ""

    def _conversation_item_added(self, event: dict[str, Any]) -> None:
        id, before = event["item"]["id"], event["previous_item_id"]
        assert id not in self.items, "an item is added twice"
        assert before is None or before in self.items, "previous_item_id is of no item"
        self.items.insert(0 if before is None else self.items.index(before) + 1, id)

    def _conversation_item_done(self, event: dict[str, Any]) -> None:
        id, before = event["item"]["id"], event["previous_item_id"]
        assert id in self.items, "an item is done that was never added"
        assert event["item"]["status"] != "in_progress"
        at = self.items.index(id)
        assert before is None or before == self.items[at - 1]

    def _conversation_item_deleted(self, event: dict[str, Any]) -> None:
        self.items.remove(event["item_id"])

    def _conversation_item_truncated(self, event: dict[str, Any]) -> None:
        told = self.by_item.get(event["item_id"])
        if told is not None and told.aloud:
            assert told.over, "a reply goes on after it was truncated"
            self.cuts[told.item] = event["audio_end_ms"]

    def _conversation_item_retrieved(self, event: dict[str, Any]) -> None:
        """What the context holds of a cut reply is in the sound before the cut."""
        item = event["item"]
        told = self.by_item.get(item["id"])
        if told is None or item["id"] not in self.cuts or not self.hums:
            return
        kept = item["content"][0]["transcript"].split()
        samples = 16 * self.cuts[item["id"]] + TONE
        audible = read(told.heard[:samples]).split()
        assert kept == audible[: len(kept)], f"{kept} is kept, {audible} was heard"

    def _response(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "response.created":
            self._begun(event["response"])
            return
        id = event["response"]["id"] if "response" in event else event["response_id"]
        told = self.responses[id]
        assert not told.over, f"{kind} after response.done"
        if kind in _DELTAS:
            self._delta(told, kind, event)
            return
        told.steps.append(kind)
        if kind == "response.output_item.added":
            assert event["item"]["role"] == "assistant" and event["item"]["content"] == []
            told.item = event["item"]["id"]
            self.by_item[told.item] = told
        elif kind == "response.content_part.added":
            assert told.own == (told.item not in self.items), "the conversation lacks the item"
        elif kind.endswith(("transcript.done", "text.done")):
            assert event.get("transcript", event.get("text")) == told.text
        elif kind == "response.done":
            self._done(told, event["response"])

    def _begun(self, response: dict[str, Any]) -> None:
        own = response["conversation_id"] is None
        active = [t for t in self.responses.values() if not t.over and not t.own]
        assert own or not active, "two responses in one conversation"
        assert response["status"] == "in_progress" and response["id"] not in self.responses
        aloud = response["output_modalities"] == ["audio"]
        told = Told(response["id"], own, aloud, response, self.speech)
        self.responses[told.id] = told

    def _delta(self, told: Told, kind: str, event: dict[str, Any]) -> None:
        assert told.steps == ["response.output_item.added", "response.content_part.added"], (
            "a delta of an item that was not announced"
        )
        assert event["item_id"] == told.item and _DELTAS[kind] == told.aloud
        assert told.own or told.before_speech == self.speech, "a delta after somebody spoke"
        if kind == "response.output_audio.delta":
            told.sound.append(event["delta"])
        else:
            told.text += event["delta"]

    def _done(self, told: Told, response: dict[str, Any]) -> None:
        told.over = True
        closing = _CLOSE_AUDIO if told.aloud else _CLOSE_TEXT
        opening = ["response.output_item.added", "response.content_part.added"]
        whole = [*opening, *closing, "response.output_item.done", "response.done"]
        assert told.steps == (whole if told.item else ["response.done"]), told.steps
        status, details = response["status"], response["status_details"]
        assert status in ("completed", "cancelled", "incomplete", "failed")
        assert (details is None) == (status == "completed")
        assert details is None or details["type"] == status
        assert response["metadata"] == told.asked["metadata"]
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        for item in response["output"]:
            content = item["content"][0]
            assert item["id"] == told.item
            assert content.get("transcript", content.get("text")) == told.text
        if self.hums and status == "completed" and told.aloud and told.text:
            assert read(told.heard) == told.text.lower(), "what sounds is not what is written"

    def finish(self) -> None:
        """Nothing more comes."""
        assert all(told.over for told in self.responses.values()), "a response never ended"
        for asked, answer in _ANSWERS.items():
            left = self.sent[asked] - self.failed[asked]
            assert self.kinds[answer] == left, f"{left} {asked}, {self.kinds[answer]} {answer}"
        created = self.sent["response.create"] - self.failed["response.create"]
        assert self.kinds["response.created"] >= created
        assert self.kinds["response.created"] == self.kinds["response.done"]
