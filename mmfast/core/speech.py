"""Types of a voice pipeline: turns, sound, codecs, speakers, listeners and chatters.

Sound is float32 mono in -1..1, `[n]` for one stream and `[B, n]` for several; codes of a codec
are int64 `[B, Q, T]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """Text that one side said; of a reply that was cut short, what was heard of it."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True)
class Sound:
    """One piece of speech, as it comes.

    Args:
        pcm: Samples `[n]`, float32 in -1..1; may be empty where only text has come.
        rate: Samples per second.
        text: The text whose sound begins in this piece, spaces included: the texts of all pieces,
            joined, are what was said.
        codes: Its audio codes `[Q, t]`, where the model speaks in codes.
        passes: Passes of the backbone since the piece before.
        drafts: Passes of draft modules since the piece before.
        tokens: Audio tokens that came in them.
        heard: In the first piece of a reply to speech: what was understood.
        notes: Further figures, such as drafts and acceptances per codebook.
    """

    pcm: Tensor
    rate: int
    text: str = ""
    codes: Tensor | None = None
    passes: int = 0
    drafts: int = 0
    tokens: int = 0
    heard: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Stage(Protocol):
    """Something that works on a stream; any split of the input gives the same output.

    State is a value: `step` leaves the one it was given as it was.
    """

    def start(self, batch: int = 1) -> Any:
        """The state before the first chunk, of `batch` streams."""

    def step(self, state: Any, chunk: Tensor) -> tuple[Any, Tensor]:
        """One chunk in, what it makes certain out."""

    def finish(self, state: Any) -> Tensor:
        """Return what is left when the stream ends."""

    def reset(self, state: Any, rows: Tensor) -> Any:
        """The state with some streams (`[B]` bool) started anew."""


@runtime_checkable
class Codec(Protocol):
    """Sound to codes and back."""

    sample_rate: int
    frame_rate: float
    hop: int  # samples per frame
    codebooks: int  # Q
    size: int  # entries per codebook
    encoder: Stage  # pcm [B, n] -> codes [B, Q, t]
    decoder: Stage  # codes [B, Q, t] -> pcm [B, n]

    def encode(self, pcm: Tensor) -> Tensor:
        """`[B, n]` to codes `[B, Q, ceil(n / hop)]`."""

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, Q, T]` to `[B, T * hop]`."""


@runtime_checkable
class Speaker(Protocol):
    """Says text."""

    sample_rate: int

    def speak(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Text, or pieces of it as they come, to sound as it comes."""


@runtime_checkable
class Listener(Protocol):
    """Understands speech."""

    def transcribe(self, pcm: Tensor, rate: int = 16000) -> str:
        """`[n]` to text."""


@runtime_checkable
class Chatter(Protocol):
    """Answers speech with speech, itself."""

    sample_rate: int

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]`, behind what was said before, as it comes."""
