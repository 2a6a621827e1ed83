"""Training of the ear: a small stock Parakeet that writes down whole words (CTC).

A. Graves et al., "Connectionist Temporal Classification", 2006; the architecture: D. Rekesh et al.,
"Fast Conformer", 2023. The recordings' word times say at first where a word is to be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, ctc_loss
from transformers import ParakeetCTCConfig, ParakeetEncoderConfig, ParakeetForCTC

from mmfast.models.speech.ear import FOLDER, MEL, SpeechEar, scaled
from mmfast.models.speech.layout import SpeechLayout
from mmfast.tiny import training
from mmfast.tiny.speech.bank import HeardSpeech, buckets

WIDTH, LAYERS, INNER, HEADS = 144, 5, 432, 4
FRAMES = 1800  # of 40 ms, in a batch, padding included
HELD = 400
PLACED = 0.3  # weight of the loss that knows where words are, falling to 0 halfway
BLANKS = 0.2  # weight of a frame without a word in it
MASKS, LONGEST = 2, (12, 20)  # masked stripes; most mel bands, most spectra of one


def make_ear(layout: SpeechLayout) -> ParakeetForCTC:
    """An ear with random weights over the text rows; `<pad>` is the blank."""
    encoder = ParakeetEncoderConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER, subsampling_factor=4, subsampling_conv_channels=32,
        num_mel_bins=MEL, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        layerdrop=0.0, scale_input=False, initializer_range=0.05, max_position_embeddings=1000,
    )  # fmt: skip
    blank = layout.id("<pad>")
    config = ParakeetCTCConfig(
        vocab_size=layout.texts, pad_token_id=blank, encoder_config=encoder,
        ctc_zero_infinity=True,
    )  # fmt: skip
    ear = ParakeetForCTC(config).float()
    nn.init.zeros_(ear.ctc_head.bias)
    return ear


class EarTask(training.Task):
    """An ear on recordings through bad lines."""

    def __init__(
        self,
        layout: SpeechLayout,
        heard: Sequence[HeardSpeech],
        seed: int,
        rate: float,
        held: int = HELD,
    ) -> None:
        torch.manual_seed(seed)
        self.layout, self.heard, self.held = layout, heard[:-held], heard[-held:]
        self.ear = make_ear(layout)
        self.optimiser = training.Optimiser.of(self.ear, (), rate)
        self.rng, self.done = np.random.default_rng([seed, 51]), 0.0
        self.queue: list[NDArray[np.int64]] = []

    def batches(self, step: int, done: float) -> list[list[HeardSpeech]]:
        """Recordings of about one length."""
        if not self.queue:
            self.queue = buckets([len(each.last) for each in self.heard], FRAMES, self.rng)
        self.done = done
        return [[self.heard[int(i)] for i in self.queue.pop()]]

    def loss(self, batch: list[HeardSpeech]) -> tuple[Tensor, training.Figures]:
        """CTC loss per word, and while it begins that of words at their places."""
        features, there = spectra(batch)
        self.ear.train()
        logits = self.ear(masked(features, self.rng), attention_mask=there).logits
        loss = written_loss(logits, batch)
        share = PLACED * max(0.0, 1 - 2 * self.done)
        figures = {"ctc": loss.item()}
        if share:
            placed = placed_loss(logits, batch)
            loss, figures["placed"] = loss + share * placed, placed.item()
        return loss, figures

    @torch.no_grad()
    def look(self) -> training.Figures:
        """Share of held-out recordings and of those without words that are right."""
        self.ear.eval()
        ear, right = SpeechEar(self.ear, self.layout), list[bool]()
        for each in self.held:
            found, _ = ear.words(torch.from_numpy(each.mel.astype(np.float32)))
            right.append(found == each.words)
        wordless = [mark for mark, each in zip(right, self.held, strict=True) if not each.words]
        shares = {"whole": float(np.mean(right)), "wordless": float(np.mean(wordless))}
        return {name: round(share, 4) for name, share in shares.items()}


def spectra(batch: Sequence[HeardSpeech]) -> tuple[Tensor, Tensor]:
    """Features `[B, T, 80]`, padded on the right, and which of them are there `[B, T]`."""
    longest = max(len(each.mel) for each in batch)
    found = torch.zeros(len(batch), longest, MEL)
    there = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, each in enumerate(batch):
        many = len(each.mel)
        found[row, :many] = scaled(torch.from_numpy(each.mel.astype(np.float32)))
        there[row, :many] = True
    return found, there


def masked(features: Tensor, rng: np.random.Generator) -> Tensor:
    """Features without a few stripes of bands and of time (SpecAugment, arXiv 1904.08779)."""
    for row in features:
        for _ in range(int(rng.integers(MASKS + 1))):
            band, time = (int(rng.integers(most)) for most in LONGEST)
            low, start = int(rng.integers(MEL - band)), int(rng.integers(max(1, len(row) - time)))
            row[:, low : low + band] = 0
            row[start : start + time] = 0
    return features


def written_loss(logits: Tensor, batch: Sequence[HeardSpeech], blank: int = 0) -> Tensor:
    """CTC loss of the words, per word."""
    frames = torch.tensor([len(each.last) for each in batch])
    words = torch.tensor([word for each in batch for word in each.words], dtype=torch.long)
    many = torch.tensor([len(each.words) for each in batch])
    chances = logits.log_softmax(-1).transpose(0, 1)
    total = ctc_loss(chances, words, frames, many, blank, reduction="sum", zero_infinity=True)
    return total / (len(words) + len(batch))


def placed_loss(logits: Tensor, batch: Sequence[HeardSpeech]) -> Tensor:
    """Loss of frames that are told their word: the one in which it has just ended."""
    wanted = torch.full(logits.shape[:2], -100)
    for row, each in enumerate(batch):
        ended = np.diff(each.count, prepend=0) > 0
        wanted[row, : len(ended)] = torch.from_numpy(np.where(ended, each.last, 0))
    weight = torch.ones(logits.shape[-1])
    weight[0] = BLANKS
    return cross_entropy(logits.flatten(0, 1), wanted.flatten(), weight)


def train_ear(
    out: Path,
    layout: SpeechLayout,
    heard: Sequence[HeardSpeech],
    minutes: float,
    seed: int,
    rate: float,
    log: training.Log,
) -> None:
    """Train the ear of a speech model, and write it into its folder."""
    task = EarTask(layout, heard, seed, rate)
    course = training.Course("ear", minutes, hold=0.5, watch=4)
    training.train(task, course, log, partial(training.save_half, task.ear, out / FOLDER))
