"""`speech-chat`: sound in, text and sound out, and who interrupts is listened to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from mmfast.core.speech import Chatter
from mmfast.frontends.audio import iter_audio, load_audio
from mmfast.pipelines.spoken import collect
from mmfast.streams.voice_cascade import Cascade, Chat
from mmfast.streams.voice_ear import RATE, Ear, ManualEar
from mmfast.streams.voice_events import VoiceEvent
from mmfast.streams.voice_metrics import Meter
from mmfast.streams.voice_models import can, given_options, load_voice
from mmfast.streams.voice_session import VoiceSession
from mmfast.streams.voice_turns import VoiceEar


class SpeechChat:
    """Converse by voice with the embedded model, a checkpoint, or any text model.

    Args:
        model: None (embedded), a directory or hub id, or a `Chatter`.
        chat: A function of the turns so far that gives the answer as text or pieces of it: any
            text model gets a voice. None lets the model answer itself.
        listener: Understands speech for `chat`; None takes the model.
        speaker: Says what `chat` answers; None takes the model.
        voice: Name of a voice; None takes the model's own.
        speed: Words per minute.
        pitch: 0 to 99.
        mode: `vanilla`, `balance`, `boost` or `turbo` (default): when drafts are made.
        verify: `exact` (default: what one token per pass says), `typical:0.3`, or `none`: the most
            tokens per pass, and hard to understand on the embedded model.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        **options: Further options of every reply.

    Raises:
        ModelError: The checkpoint cannot be loaded, or cannot do its part.

    Example:
        >>> voice = SpeechChat()
        >>> for event in voice.run("question.wav"):
        ...     if event.kind == "text":
        ...         print(event.text, end="")
    """

    task = "speech-chat"

    def __init__(
        self,
        model: Any = None,
        *,
        chat: Chat | None = None,
        listener: Any = None,
        speaker: Any = None,
        voice: str | None = None,
        speed: int | None = None,
        pitch: int | None = None,
        mode: str | None = None,
        verify: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        **options: Any,
    ) -> None:
        named = {"voice": voice, "speed": speed, "pitch": pitch, "mode": mode, "verify": verify}
        self.options = {**given_options(named), **options}
        self.chatter: Chatter
        if chat is None:
            self.chatter = can(load_voice(model, device, dtype), "reply")
        else:
            self.chatter = cascade(chat, model, listener, speaker, device, dtype)

    def __call__(self, media: Any, **options: Any) -> Any:
        """Answer one recording, all of which is the question; a list gives a list.

        Args:
            media: Path, bytes, file object, array at 16 kHz, or `(array, rate)`.
            **options: `voice`, `speed`, `pitch`, `mode`, `verify`, for this call.

        Returns:
            A `Spoken`, or a list of them.

        Raises:
            MediaError: It is no sound.
        """
        if isinstance(media, list) and media and not isinstance(media[0], int | float):
            return [self(each, **options) for each in media]
        pcm, meter = load_audio(media, RATE), Meter()
        given = {**self.options, **given_options(options)}
        return collect(self.chatter.reply(pcm, RATE, **given), self.chatter.sample_rate, meter)

    def open(self, ear: Ear | Literal["voice", "manual"] = "voice", **options: Any) -> VoiceSession:
        """Begin a conversation; conversations on one model do not touch each other.

        Args:
            ear: `voice` finds turns by voice activity; `manual` waits for `commit`; or an `Ear`,
                such as `VoiceEar(silence_ms=300)`.
            **options: `clock`, `ahead`, `delay`, `interrupt`, `answer`, `history`; see
                `mmfast.streams.voice_dialogue.Dialogue`.
        """
        if isinstance(ear, str):
            ear = ear_of(ear)
        return VoiceSession(self.chatter, ear, options=self.options, **options)

    def run(self, chunks: Any, rate: int = RATE, **options: Any) -> Iterator[VoiceEvent]:
        """One conversation over a stream, as `VoiceSession.run`.

        Args:
            chunks: Chunks of sound as they come; or a recording: path, file object, array.
            rate: Samples per second of chunks and arrays.
            **options: As for `open`.

        Yields:
            Events: `speech_started`, `speech_stopped`, `heard`, `text`, `audio`, `interrupted`,
            `done`, `error` and so on; see `mmfast.streams.voice_events.VoiceEvent`.
        """
        with self.open(**options) as session:
            yield from session.run(*stream_of(chunks, rate))


def ear_of(name: str) -> Ear:
    """An ear by its name.

    Raises:
        MmfastError: There is none of that name.
    """
    from mmfast.core.errors import MmfastError, unknown

    if name not in ("voice", "manual"):
        raise MmfastError(unknown("ear", name, ["voice", "manual"]))
    return ManualEar() if name == "manual" else VoiceEar()


def cascade(
    chat: Chat,
    model: Any,
    listener: Any,
    speaker: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
) -> Cascade:
    """A function of text with the ears and the mouth of models; each is loaded once."""
    own = load_voice(model, device, dtype) if listener is None or speaker is None else None
    ears = own if listener is None else load_voice(listener, device, dtype)
    mouth = own if speaker is None else load_voice(speaker, device, dtype)
    return Cascade(can(ears, "transcribe"), chat, can(mouth, "speak"))


def stream_of(chunks: Any, rate: int) -> tuple[Any, int]:
    """Chunks and their rate; a recording is read as it is needed."""
    whole = isinstance(chunks, str | Path | bytes | bytearray) or hasattr(chunks, "read")
    if whole or hasattr(chunks, "__array__"):
        return iter_audio(chunks, RATE, media_rate=rate), RATE
    return chunks, rate
