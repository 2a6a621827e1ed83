"""`speech-translation`: speech and text into another language, while they come or as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.decoding.serialised import CHANNELS
from mmfast.decoding.simultaneous import WritePolicy, average_lagging, write_policy
from mmfast.frontends.audio.reader import is_batch, iter_audio, load_audio
from mmfast.models.interleaved import InterleavedTranslator
from mmfast.models.prompt import check_characters
from mmfast.models.speech.overlap import OverlapEar
from mmfast.models.speech.sound import tell_if_quiet
from mmfast.models.translation import EMBEDDED_INTERLEAVED, AnyTranslator, load_translator
from mmfast.pipelines.options import checked, within
from mmfast.pipelines.recognition import ear_for_two
from mmfast.pipelines.registry import task
from mmfast.pipelines.speech import checked_parts, speech_options
from mmfast.voice import models
from mmfast.voice.dubbing import DubbedSentence, dub
from mmfast.voice.ear import RATE
from mmfast.voice.interpreter import (
    LONGEST_WINDOW,
    Interpreter,
    OverlapInterpreter,
    Translated,
    check_pace,
    joined,
    sentence_writer,
    word_by_word,
)

CHUNK = RATE // 10  # samples of a recording that are read at once


@dataclass(frozen=True)
class Translation:
    """The translation of a recording of so many seconds, and how it came about.

    `heard` is the source as it was understood, `lag` the average lagging in seconds: 0 is one who
    speaks with the speaker; one who waits for the end of a sentence lags by all of it. `unknown`
    are words that the translator has no tokens for.

    With `speakers=2`, `text` and `heard` have a line for each who speaks, and `lag` is the mean of
    theirs: each counts from the end of the first word that was heard of them.
    """

    text: str
    heard: str
    seconds: float
    lag: float
    pieces: tuple[Translated, ...] = field(repr=False, default=())
    unknown: tuple[str, ...] = ()
    trace: Trace = field(default_factory=Trace, repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def speakers(self) -> tuple[str, ...]:
        """Translation of each of two speakers, with `speakers=2`: the first is heard first."""
        if not any(piece.speaker is not None for piece in self.pieces):
            return ()
        return tuple(joined(self.pieces, speaker) for speaker in range(CHANNELS))

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast translate --json` prints."""
        return {
            "text": self.text,
            "heard": self.heard,
            "seconds": round(self.seconds, 4),
            "average_lagging": round(self.lag, 4),
            "unknown": list(self.unknown),
            **({"speakers": list(self.speakers)} if self.speakers else {}),
            "pieces": [_piece(piece) for piece in self.pieces],
            "trace": self.trace.to_dict()["rows"],
            **self.trace.noted,
        }


def _piece(piece: Translated) -> dict[str, Any]:
    own = {} if piece.speaker is None else {"speaker": piece.speaker}
    return {"at": round(piece.at, 4), **own, "text": piece.text, "final": piece.final}


@task("speech-translation", aliases=("translation",))
class SpeechTranslation:
    """Translate speech while it is said, with a listener and a stock model that translates text.

    Args:
        model: None (embedded: English to the generated language Velda), a directory or hub id of
            an encoder-decoder (Marian, T5, NLLB, M2M100, BART) or of a causal model that reads and
            writes in one sequence (such as "tiny-interleaved"), a `(model, tokenizer)` pair, or a
            translator.
        listener: As the model of `speech-to-text`.
        policy: Which words are written before the end: "agreement:N", "wait:K", "confidence:P",
            "learned:P", "greedy" or "offline", of a causal model "interleaved:N" or "joint:N";
            None (what the model takes: "confidence:0.99" or "interleaved:1"). See
            `mmfast.decoding.simultaneous.write_policy`.
        speakers: 2 translates two people who may speak at once, each for themselves; for the
            embedded listener and folders of its kind.
        every: Seconds of speech between two hearings, 0.4; with `speakers=2` those that are written
            down at once, 1.0.
        context: Seconds of speech that are heard on both sides of these, with `speakers=2`: 2.0.
        silence: Seconds of silence that end a sentence.
        source, target: Languages, for tokenizers with codes such as "eng_Latn".
        prefix: Text in front of every source, such as T5's "translate English to German: ".
        device, dtype, model_kwargs: As for `SpeechChat`; the last are of `model`.

    Raises:
        MmfastError: An unknown option or value, before any weight is read.
        ModelError: A checkpoint cannot be loaded, cannot listen, or cannot translate.

    Example:
        >>> SpeechTranslation().translate("the red circle moves left")
        'ronda ruva levo mira'
    """

    task: str

    @checked()
    def __init__(
        self,
        model: Any = None,
        *,
        listener: Any = None,
        policy: str | WritePolicy | None = None,
        speakers: int = 1,
        every: float | None = None,
        context: float | None = None,
        silence: float = 0.5,
        source: str | None = None,
        target: str | None = None,
        prefix: str = "",
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self._place = place
        languages: dict[str, Any] = {"source": source, "target": target, "prefix": prefix}
        with within(self.task):
            check_pace(silence=silence)
            check_pace(60 if speakers == 1 else LONGEST_WINDOW, every=every, context=context)
            if context is not None and speakers == 1:
                raise MmfastError("context= is of speakers=2; give that, or leave it out")
            chosen = None if policy is None else write_policy(policy)
            self.listener: Any = (
                models.can(models.load_voice(listener, **place), "transcribe")
                if speakers == 1 and not isinstance(speakers, bool)
                else ear_for_two(speakers, listener, place)
            )
            self._how: dict[str, Any] = {**place, "model_kwargs": model_kwargs, **languages}
            self._embedded = dict[bool, AnyTranslator]()  # by whether it is the interleaved one
            late = chosen is not None and chosen.late is not None
            named = EMBEDDED_INTERLEAVED if model is None and late else model
            self.translator = load_translator(named, **self._how)
            if model is None:
                self._embedded[late] = self.translator
            own = isinstance(self.translator, InterleavedTranslator)
            self.policy = chosen or write_policy("interleaved" if own else "confidence")
        self.speakers = speakers
        paces = {"every": every, "context": context, "silence": silence}
        self._pace: dict[str, Any] = {k: v for k, v in paces.items() if v is not None}
        self._open(None)  # refuses a policy of another model

    def _open(self, policy: str | WritePolicy | None) -> Interpreter | OverlapInterpreter:
        with within(self.task):
            chosen, translator = self._chosen(policy)
            if isinstance(self.listener, OverlapEar):
                return OverlapInterpreter(self.listener, translator, chosen, **self._pace)
            return Interpreter(self.listener, translator, chosen, **self._pace)

    def _chosen(self, policy: str | WritePolicy | None) -> tuple[WritePolicy, AnyTranslator]:
        """Return a policy and the model for it: without a named one, the embedded one it needs."""
        chosen = self.policy if policy is None else write_policy(policy)
        late = chosen.late is not None
        if self._embedded and late not in self._embedded:
            self._embedded[late] = load_translator(
                EMBEDDED_INTERLEAVED if late else None, **self._how
            )
        return chosen, self._embedded.get(late, self.translator)

    def open(self, policy: str | WritePolicy | None = None) -> Interpreter | OverlapInterpreter:
        """Return a session that takes sound at 16 kHz as it comes.

        An `Interpreter`, or with `speakers=2` an `OverlapInterpreter`.
        """
        return self._open(policy)

    def __call__(self, media: Any, policy: str | WritePolicy | None = None) -> Any:
        """Translate a recording as if it were said now.

        Args:
            media: Path, bytes, file object, array at 16 kHz, or `(array, rate)`.
            policy: Instead of the pipeline's.

        Returns:
            A `Translation`, or a list of them for a list of recordings.

        Raises:
            MediaError: It is no sound.
            SpecError: An unknown policy.
        """
        if is_batch(media):
            return [self(each, policy) for each in media]
        session, read = self._open(policy), Trace()
        sound = load_audio(media, RATE, trace=read)
        pieces = [piece for chunk in sound.split(CHUNK) for piece in session.push(chunk)]
        pieces += session.finish()
        tell_if_quiet(sound, "".join(piece.heard for piece in pieces), read)
        trace = replace(session.trace, notes=read.notes)
        if isinstance(session, OverlapInterpreter):
            return self._of_two(pieces, len(sound) / RATE, trace)
        seconds, end = len(sound) / RATE, max((piece.at for piece in pieces), default=0.0)
        delays = [piece.at for piece in pieces for _ in range(piece.words)]
        heard = " ".join(piece.heard for piece in pieces if piece.final).strip()
        text = joined(pieces)
        lag = average_lagging(delays, end)
        unknown = tuple(self.translator.unknown(heard))
        return Translation(text, heard, seconds, lag, tuple(pieces), unknown, trace)

    def _of_two(self, pieces: list[Translated], seconds: float, trace: Trace) -> Translation:
        heard, texts, lags = list[str](), list[str](), list[float]()
        for speaker in range(CHANNELS):
            own = [piece for piece in pieces if piece.speaker == speaker]
            if not own:
                continue
            heard.append(" ".join(piece.heard for piece in own if piece.final))
            texts.append(joined(own))
            begin, end = own[0].span[0], own[-1].span[1]
            delays = [piece.at - begin for piece in own for _ in range(piece.words)]
            lags.append(average_lagging(delays, end - begin))
        both, lag = "\n".join(heard), sum(lags) / max(1, len(lags))
        unknown = tuple(self.translator.unknown(both))
        return Translation("\n".join(texts), both, seconds, lag, tuple(pieces), unknown, trace)

    def stream(
        self, media: Any, rate: int = RATE, policy: str | WritePolicy | None = None
    ) -> Iterator[Translated]:
        """Translate speech while it comes.

        Args:
            media: An iterator of chunks of sound; or a recording.
            rate: Samples per second of chunks and arrays.
            policy: Instead of the pipeline's.

        Yields:
            Words with the seconds of sound that had been heard.
        """
        session = self._open(policy)
        for chunk in iter_audio(media, RATE, media_rate=rate):
            yield from session.push(chunk)
        yield from session.finish()

    def dub(
        self,
        clip: str | Path,
        out: str | Path,
        talker: Any = None,
        trace: Trace | None = None,
        **options: Any,
    ) -> list[DubbedSentence]:
        """Write a clip with its sentences spoken in the other language, and subtitles beside it.

        Args:
            clip: A file with pictures and sound.
            out: The new file, an mp4, mkv or mov; subtitles have its name with ".srt".
            talker: As the model of `text-to-speech`.
            trace: Gets a note on a sound that is cut short.
            **options: As of `text-to-speech`, such as `voice`.

        Raises:
            MediaError: The clip has no pictures or no sound.
            MmfastError: The talker cannot speak, or has no such option; `out` cannot be written, or
                is the clip itself.
        """
        with within(self.task):
            if self.speakers > 1:
                raise MmfastError("speakers=2 speaks no clips; leave it out to dub one")
            given = speech_options("text-to-speech", talker, options, "speak")
            voice = models.can(models.load_voice(talker, **self._place), "speak")
            silence = self._pace["silence"]
            return dub(clip, out, self.listener, self.translator, voice, given, silence, trace)

    def translate(self, text: Any) -> Any:
        """Translate a whole text, or a list of texts as one batch."""
        many = isinstance(text, list)
        texts = text if many else [text]
        if not all(isinstance(each, str) for each in texts):
            raise MmfastError(
                f"{self.task}: {text!r:.60} is no text; give a text or a list of them"
            )
        for each in texts:
            check_characters(f"{self.task}: text", each)
        found = self.translator.translate(texts) if texts else []
        return found if many else found[0]

    def stream_text(
        self, words: Iterable[str], policy: str | WritePolicy | None = None
    ) -> Iterator[Translated]:
        """Translate one sentence of text while its words come; `at` counts words.

        Args:
            words: Words, or pieces of a text whose spaces part the words; or the whole text.
            policy: Instead of the pipeline's.
        """
        with within(self.task):
            chosen, translator = self._chosen(policy)
            sentence_writer(translator, chosen)  # refuses a policy of another model now
        if not isinstance(words, Iterable):
            raise MmfastError(f"{self.task}: {type(words).__name__} is no text; give words of one")
        checked_words = checked_parts(words)
        return word_by_word(translator, chosen, checked_words)
