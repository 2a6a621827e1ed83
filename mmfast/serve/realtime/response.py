"""One response as the protocol shows it: its prompt, its settings, its events and its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.speech import Sound, Turn
from mmfast.serve.calls import call_schema, prompt_of, read_calls
from mmfast.serve.engine.base import Finish, Media
from mmfast.serve.realtime.brain import (
    BrainQuestion,
    ChatterBrain,
    HeardText,
    ReplyRun,
    SeenTurn,
)
from mmfast.serve.realtime.conversation import ConversationItem, ItemPart, call_item, new_id
from mmfast.serve.realtime.formats import Outgoing
from mmfast.serve.realtime.protocol import CallShape, EventError
from mmfast.serve.realtime.service import SessionLimits
from mmfast.streams.stream import Clock
from mmfast.voice.channel import Status
from mmfast.voice.dialogue import SpokenReply

# status of a reply -> status of a response, reason
_STATUS = {
    "interrupted": ("cancelled", "turn_detected"),
    "cancelled": ("cancelled", "client_cancelled"),
    "incomplete": ("incomplete", "max_output_tokens"),
}


@dataclass
class TokenUsage:
    """Tokens of the question and of the answer, by kind.

    `audio_in` counts speech that the model answers itself, `image_in` the frames that the answer is
    about; `cached` of the question's were read before, and `charged` is what the answer cost.
    """

    text_in: int = 0
    audio_in: int = 0
    image_in: int = 0
    text_out: int = 0
    audio_out: int = 0
    cached: int | None = None  # None: the frames, which were read when they came

    @property
    def total(self) -> int:
        """All tokens together."""
        return sum(value for name, value in asdict(self).items() if name != "cached")

    @property
    def charged(self) -> int:
        """All tokens but those of frames that were read when they came."""
        return self.total - (self.image_in if self.cached is None else 0)

    def settle(self, finish: Finish) -> None:
        """Take the numbers of an engine for those of the question and of the text."""
        seen = int(finish.trace.get("visual_tokens") or 0)
        self.text_in, self.image_in = max(finish.prompt_tokens - seen, 0), seen
        self.text_out, self.cached = finish.completion_tokens, finish.cached_tokens

    def usage(self) -> dict[str, Any]:
        """Return them as the client sees them."""
        out = self.text_out + self.audio_out
        cached = self.image_in if self.cached is None else self.cached
        again = max(cached - self.image_in, 0)  # of the text
        kinds = {"text_tokens": again, "audio_tokens": 0, "image_tokens": cached - again}
        return {
            "total_tokens": self.total,
            "input_tokens": self.total - out,
            "output_tokens": out,
            "input_token_details": {
                "text_tokens": self.text_in,
                "audio_tokens": self.audio_in,
                "image_tokens": self.image_in,
                "cached_tokens": cached,
                "cached_tokens_details": kinds,
            },
            "output_token_details": {"text_tokens": self.text_out, "audio_tokens": self.audio_out},
        }


class Response(SpokenReply):
    """A reply, its settings, and the part of it that the client has been sent.

    `conversation` is None where the reply stands outside of it; `metadata` is returned unchanged;
    `asked` is the time of the request in seconds. `held` are samples whose sound waits for later
    ones, and `out` packs sound once there is any. `asks` are the items that a model which answers
    speech itself is answering.
    """

    item: ConversationItem

    def __init__(
        self,
        settings: dict[str, Any],
        conversation: str | None,
        metadata: dict[str, str] | None,
        asked: float,
    ) -> None:
        item = ConversationItem(new_id("item"), "assistant", status="in_progress")
        super().__init__(new_id("resp"), item)
        self.settings, self.conversation, self.metadata = settings, conversation, metadata
        self.aloud = settings["output_modalities"] == ["audio"]
        if not self.aloud:
            item.words = None  # written text: everything sent counts as heard
        self.status, self.reason, self.error = "in_progress", "", dict[str, Any]()
        self.shown = False
        self.asks: list[ConversationItem] = []
        self.calls: list[str] = []  # as the model writes them
        self.called: list[ConversationItem] = []
        self.spent, self.run = TokenUsage(), ReplyRun()
        self.asked = asked
        self.first_audio: float | None = None
        self.sent, self.held = "", 0
        self.out: Outgoing | None = None

    def take(self, sound: Sound, clock: Clock, delay: float) -> None:
        """Note a piece that came; only a spoken one is played."""
        if self.aloud:
            super().take(sound, clock, delay)

    def end(self) -> None:
        """Want no more pieces, not even the one that a model waits for."""
        self.run.stop()
        super().end()

    def spend(self, words: int, sound: Sound) -> bool:
        """Count the tokens of a piece; return False, without counting, beyond the limit."""
        limit, spent = self.settings["max_output_tokens"], self.spent
        if limit != "inf" and spent.text_out + spent.audio_out + words + sound.tokens > limit:
            return False
        spent.text_out += words
        spent.audio_out += sound.tokens
        return True

    def show(self) -> dict[str, Any]:
        """Return the event that announces the item, before any of its deltas."""
        item = {**self.item.shown(), "content": []}
        self.shown = True
        self.item.parts.append(ItemPart("output_audio" if self.aloud else "output_text"))
        which = {"response_id": self.id, "output_index": 0}
        return {"type": "response.output_item.added", **which, "item": item}

    def read_calls(self) -> None:
        """Read what the model wrote as calls; `ModelError` if one is no call of a function."""
        names = [tool["name"] for tool in self.settings["tools"]]
        for text in self.calls:
            if not (found := read_calls(text, names)):
                raise ModelError("the model wrote a call that is JSON of no function given to it")
            for name, given in found:
                shape = CallShape(type="function_call", name=name, arguments=given)
                self.called.append(call_item(shape))

    def call_events(self, item: ConversationItem, index: int) -> list[dict[str, Any]]:
        """Return the events that tell a call of a function, before that it is done."""
        call = item.call or {}
        which = {"response_id": self.id, "output_index": index}
        place = {**which, "item_id": item.id, "call_id": call["call_id"]}
        kind, given = "response.function_call_arguments", call["arguments"]
        return [
            {"type": "response.output_item.added", **which, "item": item.shown()},
            {"type": f"{kind}.delta", **place, "delta": given},
            {"type": f"{kind}.done", **place, "name": call["name"], "arguments": given},
            {"type": "response.output_item.done", **which, "item": item.shown()},
        ]

    def conclude(self, status: Status) -> bool:
        """Set the reason of the end; return True if the reply was cut off."""
        self.status, self.reason = _STATUS.get(status, (status, ""))
        self.item.status = "completed" if status == "completed" else "incomplete"
        cut = status not in ("completed", "incomplete")
        if self.shown:
            text = self.item.parts[0].text
            self.sent = self.sent if cut else text
            if not self.aloud:
                self.item.parts[0].text = self.sent
        return cut

    def closing(self) -> list[dict[str, Any]]:
        """Return the events that end its content."""
        place, text = self.place(), self.sent
        kinds: list[dict[str, Any]] = [{"type": "response.output_text.done", "text": text}]
        if self.aloud:
            spoken = {"type": "response.output_audio_transcript.done", "transcript": text}
            kinds = [{"type": "response.output_audio.done"}, spoken]
        kinds.append({"type": "response.content_part.done", "part": self.part(text)})
        return [{**kind, **place} for kind in kinds]

    def delta(self, kind: str, delta: str) -> dict[str, Any]:
        """Return the event of the next piece of its content."""
        return {"type": f"response.{kind}.delta", **self.place(), "delta": delta}

    def place(self) -> dict[str, Any]:
        """Return the names of its content."""
        names = {"response_id": self.id, "item_id": self.item.id}
        return {**names, "output_index": 0, "content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        """Return its content with a text."""
        if self.aloud:
            return {"type": "audio", "transcript": text}
        return {"type": "text", "text": text}

    def sent_item(self) -> dict[str, Any]:
        """Return the item as it was sent, whatever of it was heard."""
        content = self.item.parts[0].shown(None)
        content["transcript" if self.aloud else "text"] = self.sent
        return {**self.item.shown(), "content": [content]}

    def resource(self, frames: dict[str, int]) -> dict[str, Any]:
        """Return the response as the client sees it, with counts of the frames seen so far."""
        output = {name: self.settings["output"][name] for name in ("format", "voice")}
        found = {
            "object": "realtime.response",
            "id": self.id,
            "status": self.status,
            "status_details": self._details(),
            "output": self._output() if self.over else [],
            "conversation_id": self.conversation,
            "output_modalities": self.settings["output_modalities"],
            "max_output_tokens": self.settings["max_output_tokens"],
            "audio": {"output": output},
            "usage": self.spent.usage() if self.over else None,
            "metadata": self.metadata,
        }
        if not self.over:
            return found
        first = None if self.first_audio is None else round(1e3 * self.first_audio, 3)
        trace = {} if self.run.finish is None else self.run.finish.trace
        left_out = [*dict.fromkeys(self.meter.left_out)]
        lost = {"left_out": left_out} if left_out else {}
        return {**found, "mmfast": {**trace, **lost, "first_audio_ms": first, "frames": frames}}

    def _output(self) -> list[dict[str, Any]]:
        said = [self.sent_item()] if self.shown else []
        return [*said, *(item.shown() for item in self.called)]

    def _details(self) -> dict[str, Any] | None:
        if self.status in ("in_progress", "completed"):
            return None
        found: dict[str, Any] = {"type": self.status}
        if self.reason:
            found["reason"] = self.reason
        return {**found, "error": self.error} if self.error else found


# Said for a user who has asked nothing: agents speak first.
GREET, GO_ON = "Greet the user.", "Go on."
HEARD_TOKENS = 25 / 16000  # of the embedded model's tower, a sample


def question_of(
    response: Response,
    items: Sequence[ConversationItem],
    brain: ChatterBrain,
    limits: SessionLimits,
    options: dict[str, Any],
) -> BrainQuestion | None:
    """Return the question that a response answers, or None where nothing was said.

    All speech among `items` has a transcript, unless the model answers speech itself. The tokens of
    the question are counted in `response`. Where nobody asked, the model is told to greet, or to
    go on. `EventError`: not even the last turn fits.
    """
    before, settings = list(items), response.settings
    pcm = _speech(before, response) if brain.native else None
    prompted = False
    found, instructions = turns(before), joined_instructions(before, settings["instructions"])
    told = prompt_of(settings["tools"], settings["tool_choice"])
    if pcm is None and (not found or found[-1].role != "user"):
        if items and items[-1].spoken:
            return None  # a cough, or a long silence
        # a response without a question takes its own instructions as one
        if asked := settings["asked"].strip():
            found, instructions = (*found, Turn("user", asked)), ""
        else:
            prompted, found = True, (*found, Turn("user", GO_ON if found else GREET))
    limit = settings["max_output_tokens"]
    limits = replace(limits, context=limits.context or getattr(brain, "context", None))
    instructions = "\n\n".join(text for text in (instructions, told) if text)
    if found or instructions:
        answer = 1 if limit == "inf" else limit
        found = fitting(found, instructions, brain.count, limits, answer)
    spent = response.spent
    spent.text_in = sum(brain.count(t) for t in (instructions, *(u.text for u in found)) if t)
    spent.audio_in = 0 if pcm is None else round(len(pcm) * HEARD_TOKENS)
    spent.image_in = int(brain.figures().get("tokens", 0))
    most = limits.tokens if limit == "inf" else limit
    if limits.context is not None:
        most = min(most, limits.context - spent.text_in)
    tools, calls = tuple(settings["tools"]) if told else (), response.calls
    aloud, run = response.aloud, response.run
    duty = _duty(settings["tools"], settings["tool_choice"])
    return BrainQuestion(
        found, pcm, instructions, aloud, options, most, prompted, tools, calls, duty, run
    )


def _duty(tools: Sequence[dict[str, Any]], choice: Any) -> dict[str, Any] | None:
    """Return the JSON schema of a call that is asked for by name or as `required`; else None."""
    named = None if isinstance(choice, str) else choice["name"]
    if named is None and choice != "required":
        return None
    known = {tool["name"]: tool.get("parameters") for tool in tools}
    return call_schema(known if named is None else {named: known[named]})


def _speech(items: list[ConversationItem], response: Response) -> Tensor | None:
    """Return the sound of the user's last turn, whose items are taken from the list."""
    parts: list[Tensor] = []
    while items and items[-1].spoken:
        item = items.pop()
        response.asks.insert(0, item)
        parts = [part.pcm for part in item.parts if part.pcm is not None] + parts
    return torch.cat(parts) if parts else None


def turns(items: Iterable[ConversationItem]) -> tuple[Turn, ...]:
    """Return the turns of the dialogue, oldest first, without those of which nothing was heard.

    Speech that a pause has divided into two turns is joined again.
    """
    found: list[Turn] = []
    spoken = False  # whether the last turn was said by the user
    for item in items:
        text, parts = item.text, item.content
        seen = any(isinstance(part, Media) for part in parts)
        if item.role == "system" or not (text or seen):
            continue
        if item.spoken and spoken:
            text = f"{found[-1].text} {text}"
            found[-1] = SeenTurn("user", text, (HeardText(text),))
        elif item.role == "user":
            found.append(SeenTurn("user", text, parts))
        else:
            found.append(Turn("assistant", text))
        spoken = item.spoken
    return tuple(found)


def joined_instructions(items: Iterable[ConversationItem], instructions: str) -> str:
    """Join the session's instructions and those in the conversation."""
    texts = (instructions, *(item.text for item in items if item.role == "system"))
    return "\n\n".join(text for text in texts if text.strip())


def fitting(
    found: tuple[Turn, ...],
    instructions: str,
    count: Callable[[str], int],
    limits: SessionLimits,
    answer: int,
) -> tuple[Turn, ...]:
    """Return the newest turns that fit beside the instructions and an answer.

    `count` counts the tokens of a text; `answer` is the most tokens of the answer. If not even the
    last turn fits, `EventError` is raised.
    """
    found = _newest(found, limits.text, instructions, len, "letters")
    if limits.context is None:
        return found
    unit = f"tokens beside an answer of {answer}"
    return _newest(found, limits.context - answer, instructions, count, unit)


def _newest(
    found: tuple[Turn, ...], most: int, instructions: str, size: Callable[[str], int], unit: str
) -> tuple[Turn, ...]:
    left, count = most - (size(instructions) if instructions else 0), 0
    for turn in reversed(found):
        left -= size(turn.text)
        if left < 0:
            break
        count += 1
    if left < 0 and not count:
        text = f"what is to be answered has over {most:,} {unit}; say less, or tell less"
        raise EventError(text, "context_length_exceeded")
    return found[len(found) - count :]
