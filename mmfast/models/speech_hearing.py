"""Sound as the speech model hears it: one rate, no pieces too long, embeddings 25 a second."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError
from mmfast.models.speech_tower import FRAMES, Tower
from mmfast.ops.log_mel import HOP, log_mel
from mmfast.ops.resample import resample

RATE = 16000
LONGEST, SHORTEST = 9 * RATE, 4 * RATE  # of a piece that is cut from longer sound
LOUDNESS = 1e-3  # sound that never is louder is silence: -60 dB
WINDOW = RATE // 10
AROUND = (3200, 1600)  # samples of silence that a piece gets in front and behind


def pieces(pcm: Tensor, rate: int = RATE) -> list[Tensor]:
    """Sound in pieces that can be understood at once, cut where it is quietest.

    Args:
        pcm: `[n]` float.
        rate: Samples per second.

    Returns:
        Pieces at 16 kHz; none where all is silence.

    Raises:
        MediaError: Samples of another shape or type, or that are no numbers.
    """
    if pcm.dim() != 1 or not pcm.is_floating_point():
        raise MediaError(f"pcm is {tuple(pcm.shape)} {pcm.dtype}; give float samples [n]")
    if not bool(pcm.isfinite().all()):
        raise MediaError("pcm has samples that are NaN or infinite; clean them first")
    sound = resample(pcm.float().clamp(-1, 1), rate, RATE)
    if len(sound):
        sound = sound - sound.mean()
    found = []
    while len(sound) > LONGEST:
        cut = SHORTEST + quietest(sound[SHORTEST:LONGEST])
        found.append(sound[:cut])
        sound = sound[cut:]
    found.append(sound)
    return [part for part in found if len(part) and float(part.abs().max()) > LOUDNESS]


def quietest(sound: Tensor) -> int:
    """Sample in the middle of the quietest tenth of a second."""
    loud = F.avg_pool1d(sound.square()[None], WINDOW, WINDOW // 4)[0]
    return int(loud.argmin()) * (WINDOW // 4) + WINDOW // 2


def embeddings(tower: Tower, sound: Tensor) -> Tensor:
    """Sound at 16 kHz `[n]`, silence around it, to embeddings `[t, D]`, one for 640 samples.

    What was learned from never began at once: without silence in front first words get lost.
    """
    around = F.pad(sound, AROUND)
    whole = F.pad(around, (0, -len(around) % (HOP * FRAMES)))
    found: Tensor = tower(log_mel(whole[None]))[0]
    return found.to(torch.float32)
