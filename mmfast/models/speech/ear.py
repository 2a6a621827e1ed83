"""The ear of the embedded voice: a stock Parakeet over log-mel spectra that writes words (CTC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.prefix_search import PrefixSearch
from mmfast.ops.audio import HOP, log_mel

FOLDER = "ear"
MEL = 80
SLOTS = 4  # spectra to a frame of the ear: 40 ms
AROUND = (3200, 1600)  # samples of silence that sound gets in front and behind
MEAN, SPREAD = -6.0, 4.0  # of log-mel values
SURE = 0.6  # mean probability of its words: 0.87 in speech and 0.41 in noise, as measured
# Frames that hold a word, by their probabilities, to each word that is written: 1.3 in speech, at
# most 2.0, as measured; more are sounds of another language that one word is made of.
HELD = 2.5


def scaled(mel: Tensor) -> Tensor:
    """Log-mel values as the ear takes them."""
    return (mel - MEAN) / SPREAD


class SpeechEar:
    """Writes down speech; what is no English speech of its words leaves nothing."""

    def __init__(self, model: Any, layout: SpeechLayout) -> None:
        self.model, self.layout = model, layout

    @torch.inference_mode()
    def chances(self, mel: Tensor) -> Tensor:
        """Probabilities `[t, V]` of the words in log-mel spectra `[T, 80]`, four to a frame.

        They lie on the CPU, whatever the device of the model.
        """
        whole = len(mel) // SLOTS * SLOTS
        if not whole:
            return torch.zeros(0, self.layout.texts)
        given = scaled(mel[None, :whole]).to(self.model.device)
        found: Tensor = self.model(given).logits[0].softmax(-1).cpu()
        return found

    def words(self, mel: Tensor) -> tuple[list[int], list[float]]:
        """Ids of the words in log-mel spectra `[T, 80]`, and how sure each is, 0 to 1."""
        return self._likeliest(self.chances(mel))

    def _likeliest(self, chances: Tensor) -> tuple[list[int], list[float]]:
        best, found = chances.max(-1)
        ids, sure, before = list[int](), list[float](), self.blank
        for word, chance in zip(found.tolist(), best.tolist(), strict=True):
            if word != self.blank and word != before:
                ids.append(word)
                sure.append(chance)
            elif word != self.blank:
                sure[-1] = max(sure[-1], chance)
            before = word
        return ids, sure

    @property
    def blank(self) -> int:
        """The row that stands for no word."""
        return self.layout.id("<pad>")

    def hear(
        self, sound: Tensor, search: PrefixSearch | None = None
    ) -> tuple[list[int], list[float]]:
        """The same for sound `[n]` at 16 kHz, with silence around it; nothing where it is unsure.

        What it writes of noise and of other languages it doubts, word by word, or it writes less
        than it has heard. A `search` chooses among words that sound alike.
        """
        around = F.pad(sound, AROUND)
        mel = log_mel(F.pad(around, (0, -len(around) % (HOP * SLOTS))), torch.float32)
        chances = self.chances(mel)
        ids, sure = self._likeliest(chances) if search is None else search(chances)
        held = float((1 - chances[:, self.blank]).sum())  # frames with a word in them
        understood = ids and sum(sure) >= SURE * len(ids) and held <= HELD * len(ids)
        return (ids, sure) if understood else ([], [])
