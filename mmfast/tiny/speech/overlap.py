"""Mixtures of two voices that speak at once, and the errors of what was written of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from torchaudio.functional import edit_distance

from mmfast.core.errors import SpecError
from mmfast.decoding.serialised import TimedWord
from mmfast.models.speech.layout import MARKS
from mmfast.tiny.speech.recordings import RATE, Samples, Speech, say
from mmfast.tiny.speech.text import Split, heard_voice, question, sentence

LOUDER = 5.0  # decibels by which the second voice is louder or softer, at most
LATEST = 1.1  # start of the second voice, as a share of the first one's length: at most
LONGEST = 8  # words of a line
MOST = 6  # speakers whose permutations are tried


@dataclass(frozen=True)
class VoiceMixture:
    """Sound of at most two voices, and the words of each with their ends in seconds."""

    pcm: Samples  # [n] at 16 kHz
    channels: tuple[tuple[TimedWord, ...], ...]  # whose first word ends first is first
    overlap: float = 0.0  # share of the shorter line in which both speak

    @property
    def words(self) -> list[list[str]]:
        """Words of each voice."""
        return [[word.text for word in own] for own in self.channels]


def mixed(first: Speech, second: Speech | None, rng: np.random.Generator) -> VoiceMixture:
    """Lay a second recording over a first, or behind it, at a loudness and from a time at random.

    A second that is None leaves one voice.
    """
    parts = [(first, 0, 1.0)]
    if second is not None:
        start = int(rng.uniform(0, LATEST) * len(first.pcm))
        parts.append((second, start, 10 ** (rng.uniform(-LOUDER, LOUDER) / 20)))
    sound = np.zeros(max(start + len(each.pcm) for each, start, _ in parts), np.float32)
    for each, start, gain in parts:
        sound[start : start + len(each.pcm)] += gain * each.pcm.numpy()
    found = [timed(each, start) for each, start, _ in parts]
    found.sort(key=lambda own: own[0].at if own else np.inf)
    return VoiceMixture(np.clip(sound, -1, 1), tuple(found), _overlap(parts))


def _overlap(parts: Sequence[tuple[Speech, int, float]]) -> float:
    if len(parts) == 1:
        return 0.0
    spans = [(start, start + len(each.pcm)) for each, start, _ in parts]
    both = min(stop for _, stop in spans) - max(start for start, _ in spans)
    return max(0, both) / min(stop - start for start, stop in spans)


def timed(spoken: Speech, start: int = 0) -> tuple[TimedWord, ...]:
    """Return the words of a recording from sample `start` on, without marks."""
    words = (word for word in spoken.words if word.text not in MARKS)
    return tuple(TimedWord(word.text, (start + word.stop) / RATE) for word in words)


def unseen_mixtures(n: int, seed: int, split: Split = "eval") -> list[VoiceMixture]:
    """Return mixtures of two different voices that say lines of the evaluation half."""
    rng, found = np.random.default_rng([79, seed]), list[VoiceMixture]()
    while len(found) < n:
        lines = [_line(rng, split) for _ in range(2)]
        voices = [heard_voice(rng) for _ in lines]
        if voices[0].name.split("+")[-1] != voices[1].name.split("+")[-1]:
            spoken = [say(text, voice) for text, voice in zip(lines, voices, strict=True)]
            found.append(mixed(spoken[0], spoken[1], rng))
    return found


def _line(rng: np.random.Generator, split: Split) -> str:
    while True:
        text = (sentence if rng.random() < 0.5 else question)(rng, split)
        if len(text.split()) <= LONGEST:
            return text


def cp_errors(said: Sequence[Sequence[str]], heard: Sequence[Sequence[str]]) -> tuple[int, int]:
    """Count word errors where speakers have no names, and the words that were said.

    The concatenated minimum-permutation word error (Watanabe et al. 2020, 2004.09249): each
    speaker's words are one text, and the errors are those of the best assignment of what was heard
    to the speakers. Where there are fewer of one side, the others are nobody.

    Raises:
        SpecError: More speakers than are tried in all orders.
    """
    many = max(len(said), len(heard))
    if many > MOST:
        raise SpecError(f"{many} speakers; at most {MOST} are assigned by trying all orders")
    cost = [
        [edit_distance(own, other) for other in _filled(heard, many)] for own in _filled(said, many)
    ]
    orders = permutations(range(many))
    best = min(sum(cost[i][at] for i, at in enumerate(order)) for order in orders)
    return int(best), sum(map(len, said))


def _filled(texts: Sequence[Sequence[str]], many: int) -> list[list[str]]:
    return [list(text) for text in texts] + [[]] * (many - len(texts))
