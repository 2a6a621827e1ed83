"""Sound as speech models read it: at their rate, and cut where it is quietest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError
from mmfast.core.trace import Trace
from mmfast.ops.audio import Resampler, resample

LOUDNESS = 1e-3  # sound that never is louder is silence: -60 dB


def tell_if_quiet(sound: Tensor, found: str, trace: Trace) -> None:
    """Warn where nothing was found in sound `[n]` as it counts as silence, and is none."""
    peak = float(sound.abs().max())
    if not found.strip() and 0 < peak <= LOUDNESS:
        trace.warn(
            f"nothing is heard in sound that is never louder than {20 * math.log10(peak):.0f} dB "
            "of full scale, as it counts as silence below -60 dB; make it louder"
        )


def samples(pcm: Tensor, rate: int, target: int) -> Tensor:
    """Sound `[n]` in -1..1 at a rate; MediaError: another shape or type, or no numbers."""
    return resample(_checked(pcm), rate, target)


def _checked(pcm: Tensor) -> Tensor:
    if not isinstance(pcm, Tensor) or pcm.dim() != 1 or not pcm.is_floating_point():
        what = f"{tuple(pcm.shape)} {pcm.dtype}" if isinstance(pcm, Tensor) else type(pcm).__name__
        raise MediaError(f"pcm is {what}; give float samples [n]")
    if not bool(pcm.isfinite().all()):
        raise MediaError("pcm has samples that are NaN or infinite; clean them first")
    return pcm.float().clamp(-1, 1)


def resampled(chunks: Iterable[Tensor], rate: int, target: int) -> Iterator[Tensor]:
    """Chunks of sound `[n]` at a rate, as they come; any split gives the same samples."""
    resampler = Resampler(rate, target)
    state = resampler.start()
    for chunk in chunks:
        state, out = resampler.step(state, _checked(chunk)[None])
        yield out[0]
    yield resampler.finish(state)[0]


class Watched:
    """Chunks of sound as they come, and whether one of them was more than silence so far."""

    def __init__(self, chunks: Iterable[Tensor]) -> None:
        self._chunks, self.loud = chunks, False

    def __iter__(self) -> Iterator[Tensor]:
        for chunk in map(_checked, self._chunks):
            self.loud = self.loud or bool((chunk.abs() > LOUDNESS).any())
            yield chunk


def pieces(pcm: Tensor, rate: int, target: int, longest: float) -> list[Tensor]:
    """Cut sound where it is quietest, into pieces of at most `longest` seconds.

    Without those that are silent. MediaError: as of `samples`.
    """
    return cut(samples(pcm, rate, target), target, longest)


def cut(sound: Tensor, rate: int, longest: float, shortest: float | None = None) -> list[Tensor]:
    """Cut sound `[n]` at a rate; pieces but the last have at least `shortest` seconds or half."""
    most = round(longest * rate)
    least = most // 2 if shortest is None else round(shortest * rate)
    found = []
    while len(sound) > most:
        at = least + quietest(sound[least:most], rate)
        found.append(sound[:at])
        sound = sound[at:]
    found.append(sound)
    return [part for part in found if len(part) and float(part.abs().max()) > LOUDNESS]


def quietest(sound: Tensor, rate: int) -> int:
    """Sample in the middle of the quietest tenth of a second."""
    window = rate // 10
    loud = F.avg_pool1d(sound.square()[None], window, window // 4)[0]
    return int(loud.argmin()) * (window // 4) + window // 2


def taken(buffer: Tensor, chunks: Iterator[Tensor], count: int) -> tuple[Tensor, bool]:
    """Return a buffer `[n]` filled up from a stream to `count` samples; False where that ended."""
    parts, have = [buffer], len(buffer)
    while have < count:
        chunk = next(chunks, None)
        if chunk is None:
            return torch.cat(parts), False
        parts.append(chunk)
        have += len(chunk)
    return torch.cat(parts), True
