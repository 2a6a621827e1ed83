"""What a conversation tells whoever listens to it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import Tensor

Kind = Literal[
    "speech_started",  # somebody speaks; `audio_ms` of the input, the padding before it included
    "speech_stopped",  # the turn is over; `audio_ms` of the input
    "committed",  # what was said is an item of the conversation
    "reply_started",  # a reply is being made; `item` will hold it
    "heard",  # `text`: what was understood; `item` is what was said
    "text",  # `text`: the next piece of the reply, which sounds from `audio_ms` of it on
    "audio",  # `pcm`: the next piece of the reply, from `audio_ms` of it on
    "interrupted",  # the sound stops here: `audio_ms` of the reply were played, `text` was heard
    "truncated",  # as asked for: the context keeps `text`, of `audio_ms`
    "done",  # no more deltas of this reply; `status` says why, `stats` what it cost
    "timeout",  # nobody has said anything for as long as the ear was told; `audio_ms` of the input
    "cleared",  # what was being said is forgotten
    "deleted",  # an item is forgotten
    "error",  # `text`: what went wrong; the conversation goes on
]
Status = Literal["", "completed", "interrupted", "cancelled", "failed"]


@dataclass(frozen=True)
class VoiceEvent:
    """One event of a conversation.

    Args:
        kind: What happened.
        number: Ascending, without gaps, in the order in which they happened; deltas that a
            cancel overtook leave one.
        time_ms: When, on the conversation's clock, since it began.
        item: The item of the conversation that it is about.
        reply: The reply that it belongs to.
        audio_ms: A place in sound: of the input for `speech_*`, else of the reply.
        text: See `kind`.
        pcm: Samples `[n]` of `audio`.
        rate: Samples per second of `pcm`.
        status: Of `done`.
        stats: Figures of `done`; see `mmfast.streams.voice_metrics.Meter.stats`.
    """

    kind: Kind
    number: int = 0
    time_ms: float = 0.0
    item: str = ""
    reply: str = ""
    audio_ms: float = 0.0
    text: str = ""
    pcm: Tensor | None = None
    rate: int = 0
    status: Status = ""
    stats: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As plain values; of the sound its length in milliseconds."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        pcm = found.pop("pcm")
        if pcm is not None:
            found["pcm_ms"] = round(1e3 * len(pcm) / self.rate, 3)
        keep = ("kind", "number", "time_ms", "audio_ms")
        return {name: value for name, value in found.items() if value or name in keep}
