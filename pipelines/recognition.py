"""`speech-to-text`: recordings and streams of speech to text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.decoding.serialised import CHANNELS
from mmfast.frontends.audio.reader import is_batch, load_audio, to_mono
from mmfast.models.speech.overlap import (
    OverlapEar,
    SpeakerWord,
    load_overlap,
    speaker_texts,
)
from mmfast.models.speech.sound import tell_if_quiet
from mmfast.pipelines.options import check_made, check_names, check_values, within
from mmfast.pipelines.registry import task
from mmfast.pipelines.speech import stream_of
from mmfast.voice import models
from mmfast.voice.ear import RATE

PLACE = ("batch_size", "device", "dtype", "model_kwargs")
OTHERS = {"cache", "language", "max_new_tokens", "reduce"}  # what some listeners have


@dataclass(frozen=True)
class Transcript:
    """The text of a recording of so many seconds; its trace is that of its whole batch."""

    text: str
    seconds: float
    trace: Trace = field(default_factory=Trace, repr=False)
    words: tuple[SpeakerWord, ...] = field(default=(), repr=False)  # with speakers=2

    def __str__(self) -> str:
        return self.text

    @property
    def speakers(self) -> tuple[str, ...]:
        """Text of each of two speakers, with `speakers=2`: the first is heard first."""
        return speaker_texts(self.words)

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast transcribe --json` prints."""
        said = [{"speaker": w.speaker, "text": w.text, "at": round(w.at, 2)} for w in self.words]
        return {
            "text": self.text,
            "seconds": round(self.seconds, 4),
            **({"speakers": list(self.speakers), "words": said} if said else {}),
            "trace": self.trace.to_dict()["rows"],
            **self.trace.noted,
        }


def ear_for_two(speakers: int, model: Any, options: Mapping[str, Any]) -> OverlapEar:
    """Return the ear for two speakers of a folder, or the embedded one.

    MmfastError: another number of `speakers`, an object, or an option beside `device` that is no
    default.
    """
    if isinstance(speakers, bool) or speakers != CHANNELS:
        raise MmfastError(f"speakers={speakers!r} is not allowed; give 1 or {CHANNELS}")
    if not (model is None or isinstance(model, str | Path)):
        raise MmfastError(
            f"speakers=2 is of the embedded model, not of {type(model).__name__}; leave one out"
        )
    given = {**options, "dtype": None if options["dtype"] == "auto" else options["dtype"]}
    for name, value in given.items():
        if value is not None and name != "device":
            raise MmfastError(f"speakers=2 takes no {name}; leave it out")
    return load_overlap(None if model == models.EMBEDDED else model, options["device"])


@task("speech-to-text", aliases=("automatic-speech-recognition",))
class SpeechToText:
    """Write speech down with the embedded model or a stock one.

    Args:
        model: None (embedded), a directory or hub id (Whisper, Parakeet, Voxtral, Qwen3-ASR,
            Kyutai STT, wav2vec 2.0 …), or a `Listener`.
        speakers: 2 writes down two people who may speak at once: `text` has a line for each. For
            the embedded model and folders of its kind.
        batch_size: Sounds that share the passes of the model; long ones are cut into several.
        device, dtype, model_kwargs: As for `SpeechChat`.
        **options: Of all recordings, as far as the model has them: `reduce`, a spec of stages on
            its audio tokens; `cache`, a spec of KV policies; `language`, `max_new_tokens` and
            further ones of its class.

    Raises:
        MmfastError: An unknown option, or a stage that the model does not have.
        ModelError: The checkpoint cannot be loaded, or cannot listen.

    Example:
        >>> SpeechToText()("question.wav").text
        'which way does the red circle move'
    """

    task: str

    def __init__(
        self,
        model: Any = None,
        *,
        speakers: int = 1,
        batch_size: int = 8,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype, "model_kwargs": model_kwargs}
        check_values(self.task, {**place, "batch_size": batch_size, "model": model})
        self.speakers, self.batch_size = speakers, batch_size
        if speakers != 1 or isinstance(speakers, bool):
            with within(self.task):
                self.listener: Any = ear_for_two(speakers, model, {**options, **place})
            return
        self._check(model, options)
        loaded = models.can(models.load_voice(model, **place), "transcribe")
        with within(self.task):
            self.listener = models.load_listener(loaded, options)

    def _check(self, model: Any, options: Mapping[str, Any]) -> None:
        check_made(self.task, options, PLACE)
        check_values(self.task, options)
        if options and (names := models.check_options(model, "transcribe", {})) is not None:
            if not names and (others := sorted(options.keys() & OTHERS)):
                raise MmfastError(
                    f"{self.task}: this listener has no option {others[0]!r}; those of "
                    "transformers may: give one as model=, such as openai/whisper-small"
                )
            check_names(self.task, options, names, PLACE)

    def __call__(self, media: Any, **options: Any) -> Any:
        """Write a recording down; a list of recordings gives a list.

        Args:
            media: Path, bytes, file object, array at 16 kHz, or `(array, rate)`.
            **options: Of this call, as of the pipeline.

        Returns:
            A `Transcript`, or a list of them, [] of none; "" is the text of silence.

        Raises:
            MediaError: It is no sound.
        """
        many = is_batch(media)
        self._check(self.listener, options)
        if self.speakers > 1 and options:
            raise MmfastError(f"{self.task}: {', '.join(options)} are of a stream; leave them out")
        if many and not media:
            return []
        trace = Trace()
        sounds = [load_audio(each, RATE, trace=trace) for each in (media if many else [media])]
        words: list[tuple[SpeakerWord, ...]] = [()] * len(sounds)
        with trace.stage("listen") as row, within(self.task):
            if isinstance(self.listener, OverlapEar):
                words = [tuple(self.listener.words(each, RATE)) for each in sounds]
                texts = ["\n".join(filter(None, speaker_texts(each))) for each in words]
                own = Trace()
            elif hasattr(self.listener, "hear"):
                texts, own = self.listener.hear(sounds, RATE, self.batch_size, **options)
            else:
                texts, own = [self.listener.transcribe(each, RATE) for each in sounds], Trace()
            row.tokens_out = sum(len(text.split()) for text in texts)
        for sound, text in zip(sounds, texts, strict=True):
            tell_if_quiet(sound, text, trace)
        trace.rows[:0], trace.reductions = own.rows, own.reductions
        trace.notes += own.notes
        found = [
            Transcript(text.strip(), len(sound) / RATE, trace, said)
            for text, sound, said in zip(texts, sounds, words, strict=True)
        ]
        return found if many else found[0]

    def stream(self, media: Any, rate: int = RATE, **options: Any) -> Iterator[Any]:
        """Write speech down while it comes.

        Args:
            media: An iterator of chunks of sound; or a recording.
            rate: Samples per second of chunks and arrays.
            **options: As for a call.

        Yields:
            Pieces of text; joined they are the whole. With `speakers=2` each word as a
            `SpeakerWord`; options are `chunk` and `context`, in seconds.

        Raises:
            ModelError: The model hears a whole recording at once.
        """
        self._check(self.listener, options)
        with within(self.task):
            own = models.can(self.listener, "stream")
            chunks, rate = stream_of(media, rate)
            sound = (to_mono(chunk, "the chunk") for chunk in chunks)
            heard = own.stream(sound, rate, **options)
        return iter(heard)
