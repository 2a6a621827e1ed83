"""Beam search over what a CTC model may have heard, with a language model beside it.

A. Graves and N. Jaitly, "Towards End-to-End Speech Recognition with Recurrent Neural Networks",
2014; A. Hannun et al., "First-Pass Large Vocabulary Continuous Speech Recognition using
Bi-Directional Recurrent DNNs", arXiv 1408.2873. Shallow fusion: the score of a word sequence is its
probability in the sound, times a power of its probability as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.models.decoder.backbone import Backbone

Prefix = tuple[int, ...]
Prior = Callable[[Sequence[Prefix]], Tensor]  # log-probabilities `[n, V]` of the next word of each

BEAM = 8
MARGIN = 10.0  # a prefix whose score lies further behind the best one is given up
CHOICES = 8  # words of a frame that are tried
LEAST = 1e-3  # probability of a word in its frame that is worth a try
NONE = -np.inf


@dataclass(slots=True)
class HeardPrefix:
    """Log-probabilities of a prefix whose last frame is a blank, and a word; what it is as text."""

    blank: float = NONE
    word: float = NONE
    text: float = 0.0
    chances: list[float] = field(default_factory=list)  # of each word, in its best frame
    best: float = NONE  # of the path that gave `chances`

    @property
    def sound(self) -> float:
        """Log-probability of all alignments."""
        return float(np.logaddexp(self.blank, self.word))

    def take(self, chances: list[float], weight: float) -> None:
        """Have the words' chances of the likeliest path."""
        if weight > self.best:
            self.best, self.chances = weight, chances


@dataclass(frozen=True)
class PrefixSearch:
    """Finds the likeliest words of frames.

    Args:
        prior: Log-probabilities of the next word, and under `end` of none, after prefixes.
        blank: The class that stands for no word.
        end: The class of the prior that ends a sentence.
        weight: Power of the text's probability.
        bonus: Added per word, against the prior's liking for short sentences.
    """

    prior: Prior
    blank: int
    end: int
    weight: float = 0.5
    bonus: float = 1.5

    def __call__(self, chances: Tensor) -> tuple[list[int], list[float]]:
        """Words of probabilities `[T, V]`, and the probability in the sound of each of them.

        Sound alone decides that there are no words: the prior knows nothing of silence.
        """
        known: dict[Prefix, NDArray[np.float32]] = {}
        beam: dict[Prefix, HeardPrefix] = {(): HeardPrefix(blank=0.0, best=0.0)}
        for frame in chances.double().cpu().numpy():
            if words := self._tried(frame):
                self._ask(known, beam)
            beam = self._step(beam, frame, words, known)
        self._ask(known, beam)

        def whole(prefix: Prefix) -> float:
            end = self.weight * float(known[prefix][self.end]) if prefix else 0.0
            return self._score(prefix, beam[prefix]) + end

        prefix = max(beam, key=whole)
        return list(prefix), beam[prefix].chances

    def _tried(self, frame: NDArray[np.float64]) -> list[int]:
        many = min(CHOICES, len(frame) - 1)
        likely = np.argpartition(-frame, many)[: many + 1].tolist()
        return [word for word in likely if word != self.blank and frame[word] > LEAST]

    def _step(
        self,
        beam: dict[Prefix, HeardPrefix],
        frame: NDArray[np.float64],
        words: Sequence[int],
        known: dict[Prefix, NDArray[np.float32]],
    ) -> dict[Prefix, HeardPrefix]:
        found: dict[Prefix, HeardPrefix] = {}
        silent = math.log(max(frame[self.blank], 1e-30))
        for prefix, old in beam.items():
            same = found.setdefault(prefix, HeardPrefix(text=old.text))
            same.blank = float(np.logaddexp(same.blank, old.sound + silent))
            same.take(old.chances, old.best + silent)
            for word in words:
                spoken = math.log(frame[word])
                again = prefix[-1:] == (word,)
                if again:  # the same word goes on
                    same.word = float(np.logaddexp(same.word, old.word + spoken))
                    chances = [*old.chances[:-1], max(old.chances[-1], frame[word])]
                    same.take(chances, old.best + spoken)
                text = old.text + float(known[prefix][word])
                new = found.setdefault((*prefix, word), HeardPrefix(text=text))
                before = old.blank if again else old.sound
                new.word = float(np.logaddexp(new.word, before + spoken))
                new.take([*old.chances, frame[word]], old.best + spoken)
        scores = {prefix: self._score(prefix, each) for prefix, each in found.items()}
        least = max(scores.values()) - MARGIN
        kept = sorted(scores, key=lambda prefix: -scores[prefix])[:BEAM]
        return {prefix: found[prefix] for prefix in kept if scores[prefix] >= least}

    def _ask(self, known: dict[Prefix, NDArray[np.float32]], prefixes: Iterable[Prefix]) -> None:
        new = [prefix for prefix in prefixes if prefix not in known]
        if new:
            known.update(zip(new, self.prior(new).float().cpu().numpy(), strict=True))

    def _score(self, prefix: Prefix, hypothesis: HeardPrefix) -> float:
        return hypothesis.sound + self.weight * hypothesis.text + self.bonus * len(prefix)


@torch.inference_mode()
def next_words(backbone: Backbone, opening: Sequence[int], prefixes: Sequence[Prefix]) -> Tensor:
    """Log-probabilities `[n, V]` of the next word after `opening` and each prefix."""
    lengths = [len(opening) + len(prefix) for prefix in prefixes]
    ids = torch.zeros(len(prefixes), max(lengths), dtype=torch.long)
    for row, prefix, length in zip(ids, prefixes, lengths, strict=True):
        row[:length] = torch.tensor([*opening, *prefix])
    state = backbone.state(len(prefixes), ids.shape[1])
    hidden = backbone.run(state, backbone.embed(ids.to(backbone.device)), lengths)
    last = hidden[torch.arange(len(prefixes)), torch.tensor(lengths) - 1]
    return backbone.logits(backbone.norm(last), slice(None)).log_softmax(-1)
