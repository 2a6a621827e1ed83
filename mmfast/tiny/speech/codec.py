"""Fitting of the embedded speech codec: codebooks, then the vocoder.

Residual k-means with a price on rare entries (P. Chou, T. Lookabaugh, R. Gray, "Entropy-constrained
vector quantization", 1989). Book 0 sees the envelope alone, so that its codes do not depend on
pitch; book 1 what is left of it, pitch and voicing. Entry 0 of both is silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError
from mmfast.frontends.codecs.embedded.codec import EmbeddedEncoder
from mmfast.frontends.codecs.embedded.features import (
    COEFFICIENTS,
    FRAME,
    LOOKAHEAD,
    PAST,
    PITCH,
    STEPS,
    VocoderNet,
    features,
    pitch_track,
    voicing,
)
from mmfast.frontends.codecs.embedded.synthesis import SynthesisState, synthesise
from mmfast.tiny.speech.recordings import say
from mmfast.tiny.speech.text import VOICES, heard_voice, question, sentence
from mmfast.tiny.training import Course, Figures, Optimiser, Report, Task, train

ENTRIES = 1024
PRICES = (15.0, 22.0)  # of one nat, in squared distance
ROUNDS = 20
SAMPLE = 120_000  # frames to fit to
ENVELOPE = COEFFICIENTS * STEPS
Books = tuple[Tensor, Tensor]


def _nearest(frames: Tensor, book: Tensor, price: Tensor) -> Tensor:
    base = book.square().sum(-1) + price
    return torch.cat([(base - 2.0 * part @ book.mT).argmin(-1) for part in frames.split(8192)])


def fit_book(frames: Tensor, entries: int, price: float, seed: int) -> Books:
    """Fit a book to `[N, D]`: entries `[V, D]`, the first one zero, and their prices `[V]`.

    `price` is the squared distance that a nat of surprise is worth.
    """
    draw = torch.Generator().manual_seed(seed)
    book = frames[torch.randperm(len(frames), generator=draw)[:entries]].clone()
    cost = frames.new_zeros(entries)
    for turn in range(ROUNDS):
        book[0] = 0.0
        own = _nearest(frames, book, cost)
        count = torch.bincount(own, minlength=entries).to(frames.dtype)
        total = torch.zeros_like(book).index_add_(0, own, frames)
        fresh = frames[torch.randint(len(frames), (entries,), generator=draw)]
        unused = count == 0
        book = torch.where(unused[:, None], fresh, total / count.clamp(min=1.0)[:, None])
        cost = -price * ((count + 1.0) / (count + 1.0).sum()).log()
        if turn < ROUNDS - 3:  # a new entry is cheap at first
            cost[unused] = cost.min()
    book[0] = 0.0
    return book, cost


def fit_codec(corpus: Iterable[Tensor], seed: int = 0) -> Books:
    """Codebooks `[2, V, 100]` in float16 and prices `[2, V]` for recordings `[n]` at 16 kHz."""
    padded = (F.pad(pcm.double(), (PAST, -len(pcm) % FRAME)) for pcm in corpus)
    frames = torch.cat([features(pcm[None])[0] for pcm in padded]).float()
    if len(frames) < ENTRIES:
        raise MediaError(f"{len(frames)} frames are too few for {ENTRIES} entries; add recordings")
    draw = torch.Generator().manual_seed(seed)
    left = frames[torch.randperm(len(frames), generator=draw)[:SAMPLE]]
    books, costs = [], []
    for index, price in enumerate(PRICES):
        seen = left.clone()
        if index == 0:
            seen[:, ENVELOPE:] = 0.0
        book, cost = fit_book(seen, ENTRIES, price, seed + index)
        book = book.half().float()
        books.append(book)
        costs.append(cost)
        left = left - book[_nearest(seen, book, cost)]
    return torch.stack(books).half(), torch.stack(costs)


HEARD = 0.1  # of the recordings, in voices the model is spoken to with
ASKED = 0.3  # of them, questions


def recordings(count: int, seed: int = 0) -> Iterator[Tensor]:
    """Sentences and questions of the domain `[n]`, in turn in all ways the model speaks."""
    for index in range(count):
        rng = np.random.default_rng([seed, 25, index])
        text = question(rng) if rng.random() < ASKED else sentence(rng)
        voice = heard_voice(rng) if rng.random() < HEARD else VOICES[index % len(VOICES)]
        yield say(text, voice).pcm


SIZES = (256, 640, 1536)  # samples; hops of a quarter
FLOOR = 5e-3  # of magnitudes at 512 samples, 65 dB under loud speech


def spectra(sound: Tensor, size: int) -> Tensor:
    """Magnitudes `[B, size // 2 + 1, T]` of `[B, n]`, comparable between sizes."""
    window = torch.hann_window(size, dtype=sound.dtype, device=sound.device)
    parts = torch.stft(sound, size, size // 4, window=window, center=False, return_complex=True)
    power = parts.real.square() + parts.imag.square()
    return (power * (512 / size) + FLOOR**2).sqrt()


def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
    """Spectral distance of sounds `[B, n]` (Yamamoto, Song, Kim, "Parallel WaveGAN", 2020)."""
    total = made.new_zeros(())
    for size in SIZES:
        ours, theirs = spectra(made, size), spectra(real, size)
        total = total + (ours.log() - theirs.log()).abs().mean()
        total = total + (ours - theirs).abs().mean() / theirs.mean()
    return total / len(SIZES)


SEGMENT, WARM = 40, 14  # frames in a lesson; of them, at the start, that only fill the layers
BATCH = 6
RATE = 2e-3
PITCH_LOSS = 12.0
_LATE = 2.43  # hops by which the middle of a pitch window lies behind the end of a hop


@dataclass(frozen=True)
class Lessons:
    """Recordings end to end, silence between them."""

    frames: Tensor  # [N, 100] sums of the codes' entries
    pcm: Tensor  # [N * 640]
    pitch: Tensor  # [N * 4] log of Hz over 110 at the end of each hop
    voiced: Tensor  # [N * 4] 0 to 1


def target_pitch(pcm: Tensor) -> tuple[Tensor, Tensor]:
    """Log pitch over 110 Hz by hop `[4 T]`, gaps filled, and voicing 0 to 1 `[4 T]`."""
    later = math.ceil(_LATE)
    heard = F.pad(pcm.double(), (PAST, later * FRAME // STEPS))[None]
    hertz, strength = pitch_track(heard)
    share, tone = voicing(strength)[0], (hertz[0] / PITCH).log()
    part = _LATE - math.floor(_LATE)
    early, late = slice(later - 1, -1), slice(later, None)
    weights = torch.stack([share[early] * (1 - part), share[late] * part])
    total = weights.sum(0)
    mean = (weights * torch.stack([tone[early], tone[late]])).sum(0) / total.clamp(min=1e-3)
    known = total > 0.5
    if not bool(known.any()):
        return torch.zeros_like(mean), torch.zeros_like(total)
    places = torch.arange(len(mean))
    last = torch.where(known, places, -1).cummax(0).values
    last = torch.where(last < 0, places[known][0], last)
    return mean[last], torch.where(known, total, 0.0)


def make_lessons(corpus: Iterable[Tensor], books: Tensor, bias: Tensor) -> Lessons:
    """Codes and targets of recordings `[n]`."""
    encoder, parts = EmbeddedEncoder(books, bias), []
    for pcm in corpus:
        whole = F.pad(pcm, (0, -len(pcm) % FRAME + 4 * FRAME))
        codes = encoder.step(encoder.start(), whole[None])[1][0]  # [Q, T]
        frames = torch.stack([book[code] for book, code in zip(encoder.books, codes, strict=True)])
        pitch, voiced = target_pitch(whole)
        parts.append((frames.sum(0).float(), whole.float(), pitch.float(), voiced.float()))
    return Lessons(*(torch.cat(each) for each in zip(*parts, strict=True)))


def lesson_loss(net: VocoderNet, lessons: Lessons, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Spectral loss and pitch loss of segments that start at frames `[B]`."""
    spots = starts[:, None] + torch.arange(SEGMENT)  # [B, T]
    hops = (starts * STEPS)[:, None] + torch.arange((SEGMENT - LOOKAHEAD) * STEPS)
    samples = (starts * FRAME)[:, None] + torch.arange((SEGMENT - LOOKAHEAD) * FRAME)
    pitch, points, _ = net(lessons.frames[spots])
    first = LOOKAHEAD * STEPS
    pitch, points = pitch[:, first:], points[:, first:]
    wanted, voiced, real = lessons.pitch[hops], lessons.voiced[hops], lessons.pcm[samples]
    error = (((pitch / PITCH).log() - wanted).abs() * voiced)[:, WARM * STEPS :].mean()
    cut = (WARM - 4) * STEPS  # filters and windows overlap: some hops ahead of what is compared
    state = SynthesisState.start(len(starts), points)
    state.made.copy_(starts * FRAME)
    made = synthesise(state, PITCH * wanted[:, cut:].exp(), points[:, cut:])[1]
    warm = 4 * FRAME
    loss = spectral_loss(made[:, warm:], real[:, (WARM - 4) * FRAME + warm :])
    return loss, error


class VocoderTask(Task):
    """A vocoder on random segments of the recordings."""

    def __init__(self, net: VocoderNet, lessons: Lessons, seed: int) -> None:
        self.net, self.lessons = net, lessons
        self.optimiser = Optimiser([], net.parameters(), RATE, decay=1e-3)
        self.rng = torch.Generator().manual_seed(seed)

    def batches(self, step: int, done: float) -> list[Tensor]:
        """First frames of segments `[B]`."""
        count = len(self.lessons.frames) - SEGMENT
        return [torch.randint(count, (BATCH,), generator=self.rng)]

    def loss(self, batch: Tensor) -> tuple[Tensor, Figures]:
        """Spectral loss and pitch loss."""
        spectral, pitch = lesson_loss(self.net, self.lessons, batch)
        figures = {"spectral": spectral.item(), "pitch": pitch.item()}
        return spectral + PITCH_LOSS * pitch, figures


def fit_vocoder(
    corpus: Iterable[Tensor],
    books: Tensor,
    bias: Tensor,
    seed: int = 0,
    steps: int = 4500,
    report: Report = print,
    net: VocoderNet | None = None,
) -> VocoderNet:
    """Train the vocoder of a codec on recordings `[n]` at 16 kHz; `net` is one to continue with."""
    lessons = make_lessons(corpus, books, bias)
    torch.manual_seed(seed)
    net = (net or VocoderNet()).float().train().requires_grad_(True)
    task = VocoderTask(net, lessons, seed)
    train(task, Course("vocoder", steps=steps, warm=0.022, hold=None, every=100), report)
    return net
