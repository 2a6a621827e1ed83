"""Training of the embedded codec's vocoder: codes to sound, by spectra and a pitch track."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.frontends.codecs.embedded_encoder import EmbeddedEncoder
from mmfast.frontends.codecs.embedded_features import (
    FRAME,
    PAST,
    PITCH,
    STEPS,
    pitch_track,
    voicing,
)
from mmfast.frontends.codecs.embedded_network import LOOKAHEAD, VocoderNet
from mmfast.frontends.codecs.embedded_synthesis import SynthesisState, synthesise
from mmfast.tiny.speech_codec_loss import spectral_loss

SEGMENT, WARM = 40, 14  # frames in a lesson; of them, at the start, that only fill the layers
BATCH = 6
RATE = 2e-3
PITCH_LOSS = 12.0
_LATE = 2.43  # hops by which the middle of a pitch window lies behind the end of a hop
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Lessons:
    """All recordings end to end, silence between them."""

    frames: Tensor  # [N, 100] what codes stand for
    pcm: Tensor  # [N * 640]
    pitch: Tensor  # [N * 4] log of Hz over 110 at the end of each hop
    voiced: Tensor  # [N * 4] 0 to 1


def target_pitch(pcm: Tensor) -> tuple[Tensor, Tensor]:
    """Pitch where hops end, gaps filled, and how voiced it is there.

    Args:
        pcm: `[640 T]`.

    Returns:
        Log of Hz over 110 `[4 T]`, and 0 to 1 `[4 T]`.
    """
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
    state.count.copy_(starts * FRAME)
    made = synthesise(state, PITCH * wanted[:, cut:].exp(), points[:, cut:])[1]
    warm = 4 * FRAME
    loss = spectral_loss(made[:, warm:], real[:, (WARM - 4) * FRAME + warm :])
    return loss, error


def fit_vocoder(
    corpus: Iterable[Tensor],
    books: Tensor,
    bias: Tensor,
    seed: int = 0,
    steps: int = 4500,
    report: Report = print,
    net: VocoderNet | None = None,
    rate: float = RATE,
) -> VocoderNet:
    """Train the vocoder of a codec.

    Args:
        corpus: Recordings `[n]` at 16 kHz.
        books: Entries, as `fit_codec` gives them.
        bias: Their prices.
        seed: Of weights and lessons.
        steps: Of the optimiser.
        report: Gets a row of figures now and then.
        net: Goes on from here, else anew.
        rate: Of learning, at its highest.
    """
    lessons = make_lessons(corpus, books, bias)
    torch.manual_seed(seed)
    net = (net or VocoderNet()).float().train().requires_grad_(True)
    optimiser = torch.optim.AdamW(net.parameters(), rate, betas=(0.9, 0.98), weight_decay=1e-3)
    draw = torch.Generator().manual_seed(seed)
    began, sums = time.monotonic(), torch.zeros(2)
    for step in range(steps):
        share = step / steps
        slope = min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * share)) + 0.01
        for group in optimiser.param_groups:
            group["lr"] = rate * slope
        starts = torch.randint(len(lessons.frames) - SEGMENT, (BATCH,), generator=draw)
        loss, error = lesson_loss(net, lessons, starts)
        optimiser.zero_grad()
        (loss + PITCH_LOSS * error).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        sums += torch.tensor([loss.item(), error.item()])
        if (step + 1) % 100 == 0:
            spectral, pitch = (sums / 100).tolist()
            seconds = round(time.monotonic() - began)
            report({"vocoder": step + 1, "spectral": spectral, "pitch": pitch, "seconds": seconds})
            sums.zero_()
    return net
