"""`speech-chat`: sound in, text and sound out, interruptions included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from mmfast.core.errors import MediaError, MmfastError, ModelError, unknown, warn
from mmfast.core.speech import Chatter, Sound
from mmfast.core.trace import Trace
from mmfast.frontends.audio.reader import is_batch, is_recording, iter_audio, load_audio
from mmfast.frontends.audio.wav import write_sound
from mmfast.models.prompt import check_characters
from mmfast.models.speech.sound import tell_if_quiet
from mmfast.ops.audio import check_rate
from mmfast.pipelines.answer import Answer
from mmfast.pipelines.options import (
    check_made,
    check_names,
    check_values,
    checked,
    named,
    within,
)
from mmfast.pipelines.registry import task
from mmfast.voice import models
from mmfast.voice.channel import VoiceEvent
from mmfast.voice.ear import RATE, Ear, ManualEar, ProsodyEar, SemanticEar, VoiceEar, overhear
from mmfast.voice.playback import ReplyMeter
from mmfast.voice.session import VoiceSession

LONGEST = 20_000  # letters: half an hour of speech
PLACE = ("chat", "listener", "talker", "reduce", "cache", "device", "dtype", "model_kwargs")
TALKING = named(VoiceSession.__init__) - {"chatter", "ear", "options"}  # of a conversation
LEFT_OUT = "left out, as the model cannot say them"
KEYS = ("seconds", "first_audio_ms", "rtf", "tokens_per_pass")


def said_otherwise(stats: Mapping[str, Any]) -> str:
    """Return a line on what a listener will not understand, of the figures of a reply, or ""."""
    told = {"spelled": "spelled, as the model does not know them", "left_out": LEFT_OUT}
    found = ((told[key], ", ".join(dict.fromkeys(stats.get(key, ())))) for key in told)
    return "; ".join(f"{what}: {words}" for what, words in found if words)


@dataclass(frozen=True)
class Spoken:
    """Speech that a pipeline made: samples `pcm` `[n]`, float32 in -1..1, at `rate`.

    `text` is what it says; `heard` is what was understood, of an answer to speech; `answer` is that
    about a clip, as it was written. `stats` are
    `seconds`, `first_audio_ms`, `rtf`, `tokens`, `passes`, `tokens_per_pass`, `tokens_per_second`,
    `acceptance` a codebook; see `ReplyMeter.stats`.
    """

    pcm: Tensor = field(repr=False)
    rate: int
    text: str
    stats: dict[str, Any] = field(default_factory=dict, repr=False)
    heard: str = ""
    answer: Answer | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def seconds(self) -> float:
        """Length of the sound."""
        return len(self.pcm) / self.rate

    @property
    def note(self) -> str:
        """A line on what a listener will not understand, or ""."""
        return said_otherwise(self.stats)

    @property
    def trace(self) -> Trace:
        """The stages as rows: listening where there was speech, those of the answer, speaking."""
        found, listened = Trace(), self.stats.get("heard_ms") or 0.0
        if self.heard:
            found.add("listen", 0, len(self.heard.split()), listened)
        if self.answer is not None:
            found.take(self.answer.trace, (0, 0))
            found.notes += self.answer.trace.notes
        spoke = max((self.stats.get("work_ms") or 0.0) - listened, 0.0)
        found.add("speak", self.stats.get("passes", 0), self.stats.get("tokens", 0), spoke)
        found.notes += [self.note] if self.note else []
        found.notes += self.stats.get("notes", ())
        return found

    def noted(self, read: Trace) -> Spoken:
        """Return it with what is noted of the recording that it answers."""
        return replace(self, stats={**self.stats, "notes": read.notes}) if read.notes else self

    def save(self, target: str | Path | BinaryIO) -> None:
        """Write a file by its suffix: .wav (16-bit samples), .flac, .mp3, .ogg or .opus.

        A file object, and a name without a suffix, gets WAV. MediaError where it cannot be written.
        """
        write_sound(target, self.pcm, self.rate)

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast say --json` and `mmfast talk --json` print."""
        first: dict[str, Any] = {"text": self.text, "heard": self.heard} if self.heard else {}
        first = {"text": self.text, **first, **{key: self.stats.get(key) for key in KEYS}}
        return {**first, "sample_rate": self.rate, **self.stats, **self.trace.noted}


def collect(
    sounds: Iterable[Sound],
    rate: int,
    meter: ReplyMeter | None = None,
    each: Callable[[Tensor], Any] | None = None,
) -> Spoken:
    """Join all pieces; `meter` counts each, `each` takes its samples as it comes.

    `rate` holds where there is no piece; the time of the meter began when it was made.
    """
    meter, parts, texts, heard = meter or ReplyMeter(), [torch.zeros(0)], [], ""
    for sound in meter.timed(sounds):
        parts.append(sound.pcm.detach().float().cpu())
        if each is not None:
            each(parts[-1])
        texts.append(sound.text)
        rate, heard = sound.rate, heard or (sound.heard or "")
    return Spoken(torch.cat(parts), rate, "".join(texts).strip(), meter.stats(), heard.strip())


def speech_options(
    task: str, model: Any, options: Mapping[str, Any], part: str = "chat"
) -> dict[str, Any]:
    """Options that are given to a model that may `speak` or `reply`, names and values checked.

    Those of `chat` are of its talker, whose `rate` is `speed`. MmfastError before a model is read.
    """
    place = PLACE[5:] if part == "speak" else PLACE
    check_made(task, options, place)
    with within(task):
        given = models.given_options(options)
        how, method = (models.speaking(given), "speak") if part == "chat" else (given, part)
        names = models.check_options(model, method, how) if given else None
    if names is not None:
        names = {"speed" if (part, name) == ("chat", "rate") else name for name in names}
        check_names(task, given, names, place)
    check_values(task, given)
    return given


def check_text(text: object) -> str:
    """Return a text that can be said; MmfastError for an empty one, or one that is too long."""
    if not isinstance(text, str):
        raise MmfastError(f"{type(text).__name__} cannot be said; give a text")
    if not any(letter.isalnum() for letter in text):
        raise MmfastError(f"there is nothing to say in {text[:40]!r}; give a text with words")
    if len(text) > LONGEST:
        raise MmfastError(
            f"a text of {len(text):,} letters is too long; say at most {LONGEST:,} at once, "
            "or stream it in parts"
        )
    return check_characters("text", text)


def checked_parts(parts: Iterable[Any]) -> Iterator[str]:
    """Pieces of a text as they come, or a whole one; MmfastError where one is no text."""
    several = isinstance(parts, Iterable) and not isinstance(parts, str)
    return map(_checked_part, parts if several else [_checked_part(parts)])


def _checked_part(part: Any) -> str:
    if not isinstance(part, str):
        raise MmfastError(
            f"{type(part).__name__} cannot be said or translated; give pieces of text"
        )
    return check_characters("text", part)


@task("speech-chat")
class SpeechChat:
    """Converse by voice with the embedded model, a checkpoint, or any text model.

    Args:
        model: Answers: None (embedded), a directory or hub id of a model of speech or of a language
            model of text with a chat template, or a `Chatter`. A directory with a `codec` holds a
            model that reads the codes of sound as tokens; see `mmfast.models.speech.fused`.
        chat: A function of the turns so far that gives the answer as text or pieces of it: any
            text model gets a voice. None lets the model answer.
        listener: Understands speech: a directory, a hub id, `tiny-speech` or a `Listener`; None
            takes the model, for a model of text the embedded one.
        talker: Says the answer, likewise.
        reduce: Stages on the audio tokens of the listener, such as `"divprune:0.5"`.
        cache: KV policies of the listener, such as `"snapkv:512"`.
        device: `cpu`, `cuda`, `cuda:1`; None picks CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        model_kwargs: Arguments of `from_pretrained`; see `VisualQA`.
        **options: Of all that is said: `voice`, a name (None takes the model's own); `speed`, words
            per minute; `pitch`, 0 to 99; `mode`: `exact` (default: what one token per pass says),
            `fast` (typical drafts stand) or `turbo` (a looser rule); `verify`, another rule than
            the mode's: `exact`, `typical:0.3`, or `none` (drafts that nothing verifies); and
            further ones of the model, such as `schedule` of the embedded one.

    Raises:
        MmfastError: An unknown option or value, before any weight is read.
        ModelError: The checkpoint cannot be loaded, or cannot do its part.

    Example:
        >>> voice = SpeechChat()
        >>> for event in voice.run("question.wav"):
        ...     if event.kind == "text":
        ...         print(event.text, end="")
    """

    task: str

    def __init__(
        self,
        model: Any = None,
        *,
        chat: models.Chat | None = None,
        listener: Any = None,
        talker: Any = None,
        reduce: str | None = None,
        cache: str | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype, "model_kwargs": model_kwargs}
        check_values(self.task, {**place, "model": model})
        text = chat is None and models.is_text(model)
        self._part = "reply" if chat is None and not text and talker is None else "chat"
        owner = talker if talker is not None else None if text else model
        self.options = speech_options(self.task, owner, options, self._part)
        stages, kwargs = {"reduce": reduce, "cache": cache}, None if chat is None else model_kwargs
        kwargs = kwargs if isinstance(listener, str | Path) else None
        with within(self.task):
            ears = models.load_listener(listener, stages, device, dtype, kwargs)
        self.chatter: Chatter
        if text:
            from mmfast.models.speech.fused import is_fused, load_fused
            from mmfast.models.text_chat import load_text_chat  # imports transformers

            with within(self.task):
                fused = is_fused(model)
                answers: Any = (load_fused if fused else load_text_chat)(model, **place)
            ears = answers if fused and ears is None else ears
            self.chatter = cascade(answers, None, ears, talker, device, dtype)
        elif chat is not None:
            self.chatter = cascade(chat, model, ears, talker, **place)
        else:
            self.chatter = models.can(models.load_voice(model, **place), "reply")
            if not (ears is None and talker is None):
                mouth = None if talker is None else models.load_voice(talker, device, dtype)
                self.chatter = models.Interpreted(self.chatter, ears, mouth)

    def _given(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of a call above those of the pipeline."""
        own = getattr(self.chatter, "chatter", self.chatter)
        speaks = getattr(self.chatter, "talker", None) if self._part == "chat" else own
        return {**self.options, **speech_options(self.task, speaks, options, self._part)}

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
        if is_batch(media):
            return [self(each, **options) for each in media]
        given = self._given(options)
        read, meter = Trace(), ReplyMeter()
        pcm = load_audio(media, RATE, trace=read)
        sounds = self.chatter.reply(pcm, RATE, **given)
        spoken = collect(sounds, self.chatter.sample_rate, meter)
        tell_if_quiet(pcm, spoken.heard + spoken.text, read)
        return spoken.noted(read)

    @checked(TALKING)
    def open(
        self, ear: Ear | Literal["voice", "semantic", "prosody", "manual"] = "voice", **options: Any
    ) -> VoiceSession:
        """Begin a conversation; conversations on one model do not touch each other.

        Args:
            ear: `voice` finds turns by voice activity; `semantic` also by what was said, and waits
                for the end of a sentence; `prosody` waits as long as pitch, energy and words tell;
                `manual` waits for `commit`; or an `Ear`, such as `VoiceEar(speech_ms=64)`.
            **options: `clock`, `ahead`, `delay`, `interrupt`, `answer`, `backchannels`, `echo`,
                `history`; see `mmfast.voice.session.VoiceSession`.
        """
        if isinstance(ear, str):
            ear = ear_of(ear, self.chatter)
        return VoiceSession(self.chatter, ear, options=self.options, **options)

    @checked({*TALKING, "ear"})
    def run(self, chunks: Any, rate: int = RATE, **options: Any) -> Iterator[VoiceEvent]:
        """One conversation over a stream, as `VoiceSession.run`.

        Args:
            chunks: Chunks of sound as they come; or a recording, as for a call.
            rate: Samples per second of chunks and arrays.
            **options: As for `open`.

        Yields:
            Events: `speech_started`, `speech_stopped`, `heard`, `text`, `audio`, `interrupted`,
            `done`, `error` and so on; see `mmfast.voice.channel.VoiceEvent`.
        """
        with self.open(**options) as session:
            yield from session.run(*stream_of(chunks, rate))


def ear_of(name: str, chatter: Any = None) -> Ear:
    """An ear by its name, which may write down what a chatter hears; MmfastError for another."""
    if name not in (known := ("voice", "semantic", "prosody", "manual")):
        raise MmfastError(unknown("ear", name, known))
    own = chatter if hasattr(chatter, "transcribe") else getattr(chatter, "listener", None)
    if not getattr(own, "writes", True):
        if name == "semantic":
            raise ModelError(
                f"{type(own).__name__} writes down no words, by which ear='semantic' finds the "
                "ends of turns; choose 'voice', 'prosody' or 'manual', or give a listener="
            )
        own = None
    if name == "semantic":
        return SemanticEar(hears=partial(overhear, models.can(own, "transcribe")))
    if name == "prosody":
        return ProsodyEar(hears=partial(overhear, own) if hasattr(own, "transcribe") else None)
    return ManualEar() if name == "manual" else VoiceEar()


def cascade(
    chat: models.Chat,
    model: Any,
    listener: Any,
    talker: Any,
    device: str | torch.device | None,
    dtype: str | torch.dtype,
    model_kwargs: Mapping[str, Any] | None = None,
) -> models.Cascade:
    """A function of text with the ears and the mouth of models; each is loaded once."""
    paths = [each for each in (model, listener, talker) if isinstance(each, str | Path)]

    def read(source: Any) -> Any:
        mine = model_kwargs if source in paths or not paths else None
        return models.load_voice(source, device, dtype, mine)

    own: Any = read(model) if listener is None or talker is None else None
    ears = own if listener is None else read(listener)
    mouth = own if talker is None else read(talker)
    return models.Cascade(ears, chat, mouth)


def stream_of(chunks: Any, rate: int) -> tuple[Any, int]:
    """Chunks and their rate; a recording is read as it is needed. MediaError: it is neither."""
    rate = check_rate(rate)
    if is_recording(chunks):
        return iter_audio(chunks, RATE, media_rate=rate), RATE
    if not isinstance(chunks, Iterable):
        raise MediaError(
            f"{type(chunks).__name__} is no stream of sound; give a recording or chunks of one"
        )
    return chunks, rate


def _warned(said: Spoken) -> Spoken:
    """Warn of what was left out of a text."""
    if lost := ", ".join(dict.fromkeys(said.stats.get("left_out", ()))):
        warn(f"{LEFT_OUT}: {lost[:200]}")
    return said


@task("text-to-speech")
class TextToSpeech:
    """Say texts with the embedded model or any other that speaks.

    Args:
        model: None (embedded), a directory or hub id (docs/guides/talkers.md lists the classes), or
            a `Speaker`.
        device, dtype, model_kwargs: As for `SpeechChat`.
        **options: Of all that is said, as of `SpeechChat`; words per minute are `rate`.

    Raises:
        MmfastError: An unknown option or value, before any weight is read.
        ModelError: The checkpoint cannot be loaded, or cannot speak.

    Example:
        >>> spoken = TextToSpeech()("The red circle moves to the left.")
        >>> spoken.save("left.wav")
    """

    task: str

    def __init__(
        self,
        model: Any = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype, "model_kwargs": model_kwargs}
        check_values(self.task, place)
        self.options = speech_options(self.task, model, options, "speak")
        self.talker = models.can(models.load_voice(model, **place), "speak")

    def _given(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of a call above those of the pipeline."""
        return {**self.options, **speech_options(self.task, self.talker, options, "speak")}

    def __call__(self, text: str | Sequence[str], **options: Any) -> Any:
        """Say a text, or each text of a list.

        Args:
            text: What to say; a list is said in batches where the model can.
            **options: `voice`, `rate`, `pitch`, `mode`, `verify`, `schedule`, for this call.

        Returns:
            A `Spoken`, or a list of them for a list. What the model cannot say, such as words in
            other letters, is left out with a warning and a note in the trace.

        Raises:
            MmfastError: Nothing that can be said, or an option that the model does not know.
        """
        if isinstance(text, list | tuple):
            texts = [check_text(each) for each in text]  # all, before the first is said
            if len(texts) > 1 and hasattr(self.talker, "speak_all"):
                return self._say_all(texts, options)
            return [self._say(each, options) for each in texts]
        return self._say(check_text(text), options)

    def _say_all(self, texts: list[str], options: dict[str, Any]) -> list[Spoken]:
        """Say texts in batches; the time of each is that of all."""
        meters = [ReplyMeter() for _ in texts]
        said = self.talker.speak_all(texts, **self._given(options))
        rate = self.talker.sample_rate
        pairs = zip(said, meters, strict=True)
        return [_warned(collect(each, rate, meter)) for each, meter in pairs]

    def _say(self, text: str, options: dict[str, Any]) -> Spoken:
        sounds = self.talker.speak(text, **self._given(options))
        return _warned(collect(sounds, self.talker.sample_rate))

    def stream(self, text: str | Iterable[str], **options: Any) -> Iterator[Sound]:
        """Say a text piece by piece.

        Args:
            text: A text, or an iterator of its pieces as a language model writes them.
            **options: As for a call.

        Yields:
            Sound as it is made, its `notes` with what is `left_out`; leaving the iterator early
            stops the model.
        """
        given = check_text(text) if isinstance(text, str) else checked_parts(text)
        return iter(self.talker.speak(given, **self._given(options)))
