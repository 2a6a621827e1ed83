"""Recordings that the embedded codec is fitted to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from mmfast.tiny.espeak import say
from mmfast.tiny.speech_text import VOICES, heard_voice, question, sentence

HEARD = 0.1  # of the recordings, in voices the model is spoken to with
ASKED = 0.3  # of them, questions


def recordings(count: int, seed: int = 0) -> Iterator[Tensor]:
    """Sentences and questions of the domain `[n]`, in turn in all ways the model speaks."""
    for index in range(count):
        rng = np.random.default_rng([seed, 25, index])
        text = question(rng) if rng.random() < ASKED else sentence(rng)
        voice = heard_voice(rng) if rng.random() < HEARD else VOICES[index % len(VOICES)]
        yield say(text, voice).pcm
