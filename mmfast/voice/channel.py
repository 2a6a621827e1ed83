"""Sound as it is pushed: any kind of samples at any rate, to blocks at 16 kHz."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from mmfast.core.errors import MediaError
from mmfast.frontends.audio.reader import decode_pcm, to_mono
from mmfast.ops.audio import Resampler, check_rate
from mmfast.streams.stream import Clock
from mmfast.voice.ear import RATE

LONGEST = 600  # seconds of one chunk


class Inlet:
    """Takes chunks of one stream, and changes their rate without a seam between them."""

    def __init__(self) -> None:
        self.samples = 0
        self._resampler: Resampler | None = None
        self._state: Any = None
        self._odd = b""  # half a sample that ended a chunk of bytes

    def take(self, pcm: Any, rate: int) -> Tensor:
        """A chunk as samples `[n]` at 16 kHz; MediaError, and nothing taken, if it is no sound."""
        rate, chunk = check_rate(rate), self._samples(pcm)
        if len(chunk) > LONGEST * rate:
            raise MediaError(
                f"a chunk of {len(chunk) / rate:.0f} s is too long; push {LONGEST} s at most"
            )
        if self._resampler is None or self._resampler.source != rate:
            self._resampler = Resampler(rate, RATE)
            self._state = self._resampler.start()
        self._state, out = self._resampler.step(self._state, chunk[None])
        self.samples += out.shape[-1]
        return out[0]

    def blocks(self, chunks: Iterable[Any], rate: int, size: int) -> Iterator[Tensor]:
        """Chunks of any length as blocks of `size` samples at their own rate, the last shorter."""
        check_rate(rate)
        held = torch.zeros(0)
        for chunk in chunks:
            held = torch.cat([held, self._samples(chunk)])
            whole = len(held) // size * size
            yield from held[:whole].split(size) if whole else ()
            held = held[whole:].clone()
        if len(held):
            yield held

    def _samples(self, pcm: Any) -> Tensor:
        if isinstance(pcm, bytes | bytearray | memoryview):
            found, self._odd = decode_pcm(self._odd + bytes(pcm), "pcm16")
        else:
            found = to_mono(pcm, "the chunk")
        return found.cpu().clamp(-1.0, 1.0)


Kind = Literal[
    "speech_started",  # the user speaks; `audio_ms` of the input, the padding before it included
    "backchannel",  # a short "mhm" under a reply, which goes on; its `text` where it is known
    "speech_stopped",  # the turn is over; `audio_ms` of the input
    "committed",  # what was said is an item of the conversation
    "reply_started",  # a reply is being made; `item` will hold it
    "heard",  # `text`: what was understood; `item` is what was said
    "text",  # `text`: the next piece of the reply, which sounds from `audio_ms` of it on
    "audio",  # `pcm`: the next piece of the reply, from `audio_ms` of it on
    "interrupted",  # the sound stops here: `audio_ms` of the reply were played, `text` was heard
    "truncated",  # as asked for: the context keeps `text`, of `audio_ms`
    "done",  # no more deltas of this reply; `status` says why, `stats` what it cost
    "timeout",  # a silence as long as the ear's `idle_timeout_ms`; `audio_ms` of the input
    "cleared",  # what was being said is forgotten
    "deleted",  # an item is forgotten
    "error",  # `text`: what went wrong; the conversation goes on
]
Status = Literal["", "completed", "interrupted", "cancelled", "failed", "incomplete"]


@dataclass(frozen=True)
class VoiceEvent:
    """One event of a conversation.

    Numbers ascend without gaps, in the order in which events happened; deltas that a cancel
    overtook leave one. `time_ms` counts on the conversation's clock from its beginning; `item` and
    `reply` are what the event is about and belongs to. `audio_ms` is a place in sound: of the input
    for `speech_*` and `backchannel`, else of the reply. Samples `pcm` `[n]` at `rate` come with
    `audio`; `status` and `stats` (see `mmfast.voice.playback.ReplyMeter.stats`) with `done`.
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


MOST = 10_000  # events


class Outlet:
    """Numbers events and keeps them until they are fetched.

    It locks nothing: its owner does. Sound is bounded by its maker, which waits while too much of
    it is here; other events are a few a turn, and the oldest are dropped beyond `MOST`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began, self._number = clock, clock.now(), 0
        self._waiting: deque[VoiceEvent] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._waiting)

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Append an event."""
        ms = round(1e3 * (self._clock.now() - self._began), 3)
        self._waiting.append(VoiceEvent(kind, self._number, ms, **fields))
        self._number += 1

    def purge(self, reply: str) -> None:
        """Forget the deltas of a reply that have not been fetched."""
        left = [e for e in self._waiting if e.reply != reply or e.kind not in ("text", "audio")]
        self._waiting = deque(left, MOST)

    def fetch(self) -> list[VoiceEvent]:
        """Return all that wait, oldest first."""
        found = list(self._waiting)
        self._waiting.clear()
        return found
