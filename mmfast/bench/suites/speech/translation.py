"""Simultaneous translation of generated speech: quality of each policy against its delay.

Of one speaker, and of two who speak at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchaudio.functional import edit_distance

from mmfast.bench.registry import Tick, benchmark, chosen
from mmfast.bench.results import Row
from mmfast.core.speech import Listener
from mmfast.decoding.serialised import TimedWord, serialise_channels, split_channels
from mmfast.decoding.simultaneous import Hypothesis, average_lagging, write_policy
from mmfast.models.speech.overlap import HeardWindow, SpeakerWord, load_overlap
from mmfast.models.translation import (
    EMBEDDED,
    EMBEDDED_INTERLEAVED,
    AnyTranslator,
    Translator,
    load_translator,
)
from mmfast.tiny.evaluate import interval
from mmfast.tiny.speech.overlap import VoiceMixture, mixed
from mmfast.tiny.speech.recordings import RATE, say
from mmfast.tiny.speech.text import VOICES
from mmfast.tiny.translation.grammar import sentence
from mmfast.voice.interpreter import (
    Interpreter,
    OverlapInterpreter,
    Translated,
    joined,
    word_by_word,
)

SENTENCES, SEED = 40, 0
POLICIES = (
    "offline", "greedy", "wait:3", "wait:5", "wait:7", "wait:9", "agreement:2", "agreement:3",
    "agreement:5", "confidence:0.9", "confidence:0.99", "learned:0.5", "learned:0.9",
    "learned:0.98", "interleaved:0", "interleaved:1", "interleaved:3", "interleaved:6", "joint:1",
)  # fmt: skip
# Of speech, too
SPOKEN = ("offline", "wait:7", "agreement:3", "confidence:0.99", "learned:0.9", "interleaved:1")
# Of two speakers at once
PAIRED = ("offline", "confidence:0.99", "learned:0.9", "interleaved:1")
MOST = 10  # words of their sentences, as in the training of the ear for two
REST = 5  # seconds of silence behind them, so that a stream ends no earlier than it would
BANDS = ((0.0, "apart"), (0.5, "under half"), (1.01, "over half"))  # by overlap, at most
CHUNK = RATE // 10


class SpokenSentence(NamedTuple):
    """An unseen sentence `[n]` at 16 kHz, in English and in Velda."""

    pcm: Tensor
    english: str
    velda: str


def spoken_sentences(count: int, seed: int) -> list[SpokenSentence]:
    """Say so many unseen sentences in the embedded model's voices, a second of silence after."""
    rng = np.random.default_rng([seed, 53])
    found = []
    for _ in range(count):
        english, velda = sentence(rng, "eval")
        voice = VOICES[int(rng.integers(len(VOICES)))]
        pcm = torch.nn.functional.pad(say(f"{english}.", voice).pcm, (0, RATE))
        found.append(SpokenSentence(pcm, english, velda))
    return found


class RememberingTranslator(Translator):
    """A translator that is asked the same once: policies differ in what they write of it."""

    def __init__(self, other: Translator) -> None:
        super().__init__(other.model, other.tokenizer, head=other.head)
        self._known: dict[tuple[str, tuple[int, ...]], Hypothesis] = {}

    def hypothesis(self, source: str, written: Sequence[int] = ()) -> Hypothesis:
        """Return how the translation goes on, computed or known."""
        asked = source, tuple(written)
        if asked not in self._known:
            self._known[asked] = super().hypothesis(source, written)
        return self._known[asked]


class RememberingListener:
    """A listener that hears the same sound once, for all policies."""

    def __init__(self, other: Listener) -> None:
        self._other = other
        self._known: dict[bytes, str] = {}

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """Return what sound `[n]` says, computed or known."""
        sound = hashlib.sha256(pcm.numpy().tobytes()).digest()
        if sound not in self._known:
            self._known[sound] = self._other.transcribe(pcm, rate)
        return self._known[sound]


class JudgedTranslation(NamedTuple):
    """Word errors and words of the right translation, lag and length of the source."""

    errors: int
    words: int
    lag: float
    length: float


def judged(wanted: str, pieces: Sequence[Translated], length: float) -> JudgedTranslation:
    """Compare the pieces of a translation with the right one; `length` is that of the source."""
    delays = [min(piece.at, length) for piece in pieces for _ in range(piece.words)]
    words = wanted.split()
    errors = edit_distance(words, joined(pieces).split())
    return JudgedTranslation(errors, len(words), average_lagging(delays, length), length)


def of_speech(
    policy: str, listener: Listener, translator: AnyTranslator, spoken: SpokenSentence
) -> JudgedTranslation:
    """Translate a sentence while it is said; delays are seconds of sound."""
    session = Interpreter(listener, translator, policy)
    pieces = [piece for chunk in spoken.pcm.split(CHUNK) for piece in session.push(chunk)]
    pieces += session.finish()
    return judged(spoken.velda, pieces, len(spoken.pcm) / RATE - 1)


def of_text(policy: str, translator: AnyTranslator, spoken: SpokenSentence) -> JudgedTranslation:
    """Translate a sentence word by word; delays are words."""
    read = spoken.english.split()
    return judged(
        spoken.velda, [*word_by_word(translator, write_policy(policy), read)], float(len(read))
    )


def translation_figures(found: Sequence[JudgedTranslation]) -> Row:
    """Return word errors, whole sentences, and the lag in its unit and as a share of the source."""
    whole = sum(each.errors == 0 for each in found)
    return {
        "score": 1 - sum(each.errors for each in found) / sum(each.words for each in found),
        "whole": whole / len(found),
        "interval": interval(whole, len(found)),
        "lag": sum(each.lag for each in found) / len(found),
        "lag_share": sum(each.lag for each in found) / sum(each.length for each in found),
        "n": len(found),
    }


@benchmark("speech", "translation")
def translation(
    tick: Tick, count: int = SENTENCES, only: Sequence[str] | None = None
) -> Iterator[Row]:
    """Measure quality against delay of the policies, on words and on speech."""
    from mmfast.models.speech.embedded import load_speech

    known = chosen(only, POLICIES, "policy of the benchmark")
    listener = RememberingListener(load_speech())
    offline, own = (
        load_translator(name, device="cpu") for name in (EMBEDDED, EMBEDDED_INTERLEAVED)
    )
    assert isinstance(offline, Translator)
    models = (RememberingTranslator(offline), own)
    spoken = spoken_sentences(count, SEED)
    for number, policy in enumerate(known):
        tick("policies", number, len(known))
        translator = models[write_policy(policy).late is not None]
        ways: dict[str, Any] = {
            "text, words": partial(of_text, policy, translator),
            "speech, s": partial(of_speech, policy, listener, translator),
        }
        for source, judge in [*ways.items()][: 1 + (policy in SPOKEN)]:
            figures = translation_figures([judge(each) for each in spoken])
            named: Row = {"job": f"{policy}, {source}", "source": source, "policy": policy}
            yield {**named, **figures, "seed": SEED, "device": "cpu"}


class SpokenPair(NamedTuple):
    """Two unseen sentences said at once, and the right translation of each."""

    mixture: VoiceMixture
    velda: tuple[str, ...]  # of the channels of the mixture


def spoken_pairs(count: int, seed: int) -> list[SpokenPair]:
    """Lay so many pairs of unseen sentences over each other, in two different voices."""
    rng, found = np.random.default_rng([seed, 54]), list[SpokenPair]()
    while len(found) < count:
        told = dict[str, str]()  # by English
        while len(told) < 2:
            english, velda = sentence(rng, "eval")
            if len(english.split()) <= MOST:
                told[english] = velda
        voices = [VOICES[int(i)] for i in rng.integers(len(VOICES), size=2)]
        if voices[0].name == voices[1].name:
            continue
        first, second = (say(f"{text}.", voice) for text, voice in zip(told, voices, strict=True))
        mixture = mixed(first, second, rng)
        texts = [" ".join(words) for words in mixture.words]
        found.append(SpokenPair(mixture, tuple(told[text] for text in texts)))
    return found


class RightEar:
    """Stands for an ear for two that makes no mistakes and has no delay.

    The words of a mixture are one stream with marks of change, which is parted again.
    """

    def __init__(self, mixture: VoiceMixture) -> None:
        channels = split_channels(serialise_channels(mixture.channels))
        words = [(word, speaker) for speaker, own in enumerate(channels) for word in own]
        words.sort(key=lambda each: each[0].at)
        self._words, self.pushed = words, 0.0

    def open(self, every: float, context: float) -> RightEar:
        """Begin the stream."""
        return self

    def push(self, pcm: Tensor) -> Iterator[HeardWindow]:
        """Yield the words that end in sound `[n]`, then the silence."""
        self.pushed += len(pcm) / RATE
        while self._words and self._words[0][0].at <= self.pushed:
            word, speaker = self._words.pop(0)
            yield HeardWindow([SpeakerWord(speaker, word.text, word.at)], word.at, word.at)
        yield HeardWindow([], self.pushed, self.pushed)

    def finish(self) -> Iterator[HeardWindow]:
        """Yield nothing more."""
        yield from ()


def judged_pair(spoken: SpokenPair, pieces: Sequence[Translated]) -> list[JudgedTranslation]:
    """Compare the pieces of two translations with the right ones, by the best assignment.

    Words and delays of a speaker count from the end of the first word; pieces without a speaker are
    of the first.
    """
    told = [[p for p in pieces if (p.speaker or 0) == speaker] for speaker in range(2)]
    wanted = [velda.split() for velda in spoken.velda]

    def errors(order: tuple[int, ...]) -> int:
        pairs = enumerate(order)
        return sum(int(edit_distance(wanted[i], joined(told[at]).split())) for i, at in pairs)

    found = list[JudgedTranslation]()
    orders: list[tuple[int, ...]] = [*permutations(range(2))]
    best = min(orders, key=errors)
    for i, at in enumerate(best):
        channel: Sequence[TimedWord] = spoken.mixture.channels[i]
        begin, length = channel[0].at, channel[-1].at - channel[0].at
        delays = [max(0.0, p.at - begin) for p in told[at] for _ in range(p.words)]
        wrong = int(edit_distance(wanted[i], joined(told[at]).split()))
        lag = average_lagging(delays, length)
        found.append(JudgedTranslation(wrong, len(wanted[i]), lag, length))
    return found


def pair_figures(spoken: Sequence[SpokenPair], found: Sequence[list[JudgedTranslation]]) -> Row:
    """Return the figures of all speakers, and right words by how much of a voice is overlapped."""
    bands = dict[str, list[JudgedTranslation]]()
    for pair, each in zip(spoken, found, strict=True):
        name = next(name for most, name in BANDS if pair.mixture.overlap <= most)
        bands.setdefault(name, []).extend(each)
    figures = translation_figures([each for pair in found for each in pair])
    by = {name: translation_figures(bands[name])["score"] for _, name in BANDS if name in bands}
    return {**figures, "by_overlap": {name: round(score, 4) for name, score in by.items()}}


@benchmark("speech", "overlap")
def overlap(tick: Tick, count: int = SENTENCES, only: Sequence[str] | None = None) -> Iterator[Row]:
    """Measure translation of two who speak at once: of their right words, and of what is heard."""
    from mmfast.models.speech.embedded import load_speech

    known = chosen(only, PAIRED, "policy of the benchmark")
    alone, pair = RememberingListener(load_speech()), load_overlap()
    models = [load_translator(name, device="cpu") for name in (EMBEDDED, EMBEDDED_INTERLEAVED)]
    spoken = spoken_pairs(count, SEED)
    for number, policy in enumerate(known):
        tick("policies", number, len(known))
        translator = models[write_policy(policy).late is not None]
        ways: dict[str, Any] = {
            "right words": RightEar,
            "ear for two": lambda _: pair,
            "ear for one": lambda _: None,
        }
        for source, ear_of in ways.items():
            judgements = list[list[JudgedTranslation]]()
            for each in spoken:
                ear = ear_of(each.mixture)
                session: Any = (
                    Interpreter(alone, translator, policy)
                    if ear is None
                    else OverlapInterpreter(ear, translator, policy)
                )
                pcm = torch.from_numpy(each.mixture.pcm)
                pcm = torch.nn.functional.pad(pcm, (0, REST * RATE))
                pieces = [piece for chunk in pcm.split(CHUNK) for piece in session.push(chunk)]
                judgements.append(judged_pair(each, [*pieces, *session.finish()]))
            named: Row = {"job": f"{policy}, {source}", "source": source, "policy": policy}
            yield {**named, **pair_figures(spoken, judgements), "seed": SEED, "device": "cpu"}
