"""Whether speech is intelligible: a recogniser with the grammar of the domain, and its errors.

The recogniser is pocketsphinx with the English model of its wheel. Its grammar allows every
sentence and question of the domain, so it has to tell them from each other by ear.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from mmfast.core.errors import MmfastError, SpecError
from mmfast.tiny.speech.text import MARKS, groups, jsgf

RATE = 16000
MARGIN = 0.15  # seconds of near silence around an utterance, for the recogniser's own statistics


@dataclass(frozen=True)
class Errors:
    """Substitutions, deletions and insertions, and the words that were said."""

    errors: int = 0
    words: int = 0

    @property
    def rate(self) -> float:
        """Word error rate; may exceed 1."""
        return self.errors / self.words if self.words else 0.0

    def __add__(self, other: Errors) -> Errors:
        return Errors(self.errors + other.errors, self.words + other.words)


def edit_distance(reference: list[str], heard: list[str]) -> int:
    """Fewest words to replace, leave out or add (Levenshtein) from one list to the other."""
    row = list(range(len(heard) + 1))
    for i, wanted in enumerate(reference, 1):
        before, row[0] = row[0], i
        for j, word in enumerate(heard, 1):
            cost = min(row[j] + 1, row[j - 1] + 1, before + (wanted != word))
            before, row[j] = row[j], cost
    return row[-1]


def spoken_words(text: str) -> list[str]:
    """The words of a text of the domain, without punctuation."""
    return [part for part in groups(text.lower()) if part not in MARKS]


def count_errors(reference: str, heard: str) -> Errors:
    """Errors of one utterance."""
    wanted = spoken_words(reference)
    return Errors(edit_distance(wanted, spoken_words(heard)), len(wanted))


class Recogniser:
    """Pocketsphinx with a grammar; the same sound gives the same words whatever came before.

    Args:
        grammar: In the JSpeech Grammar Format; that of the domain unless told.

    Raises:
        MmfastError: Pocketsphinx is missing, or does not take the grammar.
    """

    def __init__(self, grammar: str | None = None) -> None:
        try:
            module: Any = importlib.import_module("pocketsphinx")
        except ImportError:
            raise MmfastError(
                'pocketsphinx is missing; it comes with: pip install "mmfast[speech-eval]"'
            ) from None
        # Means over the utterance alone, so that its words do not depend on the ones before.
        self.decoder: Any = module.Decoder(lm=None, cmn="batch", loglevel="FATAL")
        try:
            self.decoder.add_jsgf_string("domain", grammar or jsgf())
        except (RuntimeError, ValueError) as error:
            raise MmfastError(f"pocketsphinx does not take the grammar: {error}") from None
        self.decoder.activate_search("domain")

    def transcribe(self, pcm: Tensor, rate: int = RATE) -> str:
        """`[n]` float32 in -1..1 to the likeliest words of the grammar, "" for none.

        Raises:
            SpecError: Another rate than 16,000 samples per second.
        """
        if rate != RATE:
            raise SpecError(
                f"rate={rate} is not {RATE}; resample with mmfast.frontends.audio.reader"
            )
        samples = np.nan_to_num(pcm.detach().cpu().numpy().astype(np.float32))
        rng = np.random.default_rng(0)
        pad = round(MARGIN * RATE)
        whole = rng.normal(0.0, 1e-4, len(samples) + 2 * pad)
        whole[pad : pad + len(samples)] += samples
        data = (whole.clip(-1, 1) * 32767).astype(np.int16).tobytes()
        self.decoder.start_utt()
        self.decoder.process_raw(data, full_utt=True)
        self.decoder.end_utt()
        found = self.decoder.hyp()
        return "" if found is None else str(found.hypstr)


def word_error_rate(
    recogniser: Recogniser, spoken: Iterable[tuple[str, Tensor]]
) -> tuple[Errors, list[str]]:
    """Errors over texts and their sound `[n]`, and what was heard of each."""
    total, heard = Errors(), []
    for text, pcm in spoken:
        heard.append(recogniser.transcribe(pcm))
        total += count_errors(text, heard[-1])
    return total, heard
