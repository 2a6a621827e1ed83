"""Types of a voice pipeline: turns, sound, streaming stages, codecs, speakers and listeners.

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
    """Text of one side of a dialogue; of an interrupted reply the part that was played."""

    role: Literal["user", "assistant"]
    text: str


@dataclass(frozen=True)
class Sound:
    """One piece of streamed speech.

    Args:
        pcm: Samples `[n]`, float32 in -1..1; may be empty where only text has come.
        rate: Samples per second.
        text: The text whose sound begins in this piece, spaces included: the joined texts of all
            pieces are the whole text.
        codes: Its audio codes `[Q, t]`, where the model speaks in codes.
        passes: Passes of the backbone since the piece before.
        drafts: Passes of draft modules since the piece before.
        tokens: Audio tokens that came in them.
        heard: In the first piece of a reply to speech: the transcript of the question.
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
    """A streaming function; any split of the input gives the same output.

    State is a value: `step` does not change the one it gets.
    """

    def start(self, batch: int = 1) -> Any:
        """Return the state of `batch` streams before the first chunk."""

    def step(self, state: Any, chunk: Tensor) -> tuple[Any, Tensor]:
        """Add a chunk; return the new state and the output that it makes certain."""

    def finish(self, state: Any) -> Tensor:
        """Return the rest of the output when the stream ends."""

    def reset(self, state: Any, rows: Tensor) -> Any:
        """Return the state with streams `rows` (`[B]` bool) started anew."""


@runtime_checkable
class Codec(Protocol):
    """Sound to codes and back; with a size of 0, to latents `[B, Q, t]` of Q numbers, float32."""

    sample_rate: int
    frame_rate: float
    hop: int  # samples per frame
    codebooks: int  # Q
    size: int  # entries per codebook
    encoder: Stage  # pcm [B, n] -> codes [B, Q, t]
    decoder: Stage  # codes [B, Q, t] -> pcm [B, n]

    def encode(self, pcm: Tensor) -> Tensor:
        """Encode `[B, n]` to codes `[B, Q, ceil(n / hop)]`."""

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes `[B, Q, T]` to `[B, T * hop]`."""


@runtime_checkable
class Speaker(Protocol):
    """Text to speech."""

    sample_rate: int

    def speak(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Speak text or a stream of its pieces; yield sound."""


@runtime_checkable
class Listener(Protocol):
    """Speech to text."""

    def transcribe(self, pcm: Tensor, rate: int = 16000) -> str:
        """Transcribe sound `[n]`."""


@runtime_checkable
class Chatter(Protocol):
    """Speech to speech in one model."""

    sample_rate: int

    def reply(
        self, pcm: Tensor, rate: int = 16000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]` that follows `history`; yield sound."""
