"""How familiar the tokens of a chunk of frames are, given all chunks before it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmfast.ops.closeness import closeness
from mmfast.ops.snap import snap
from mmfast.ops.steady_channels import steady_channels, take_channels
from mmfast.ops.unit import unit_rows


@dataclass(frozen=True)
class ChunkMemory:
    """What is remembered of the chunks so far; a value of fixed size, however long the stream.

    Attributes:
        total: `[..., C]` float64, sum of the chunks' means over their steady channels.
        chunks: How many they are.
    """

    total: Tensor
    chunks: int


@dataclass(frozen=True)
class Familiarity:
    """Scores of one chunk.

    Attributes:
        score: `[..., T, n]` float64, high for tokens near the memory and near their frame's mean.
        channels: `[..., C]` channels used, steadiest first.
        memory: The memory with this chunk in it.
    """

    score: Tensor
    channels: Tensor
    memory: ChunkMemory


def familiarity(x: Tensor, frames: int, memory: ChunkMemory | None = None) -> Familiarity:
    """Score the tokens of a chunk against the memory and against their own frame.

    Half of the channels count, those that vary least over the chunk. Entries of the memory come
    from different channels in every chunk and are averaged by rank all the same: the memory
    holds levels of steady channels, not a picture.

    Args:
        x: `[..., T * n, D]`, frame after frame.
        frames: T.
        memory: Of the chunks before; None at the start.
    """
    wide = x.double()
    channels = steady_channels(wide, max(1, x.shape[-1] // 2))
    steady = take_channels(wide, channels)  # [..., T * n, C]
    mean = steady.mean(-2)
    old = memory or ChunkMemory(mean.new_zeros(mean.shape), 0)
    new = ChunkMemory(old.total + mean, old.chunks + 1)
    video = unit_rows(steady).unflatten(-2, (frames, -1))  # [..., T, n, C]
    remembered = unit_rows((new.total / new.chunks)[..., None, :])[..., None, :]
    score = closeness(video, remembered) + closeness(video, video.mean(-2, keepdim=True))
    return Familiarity(snap(score), channels, new)
