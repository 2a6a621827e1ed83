"""How familiar the tokens of a chunk of frames are, given all chunks before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.ops.closeness import closeness
from mmfast.ops.snap import snap
from mmfast.ops.steady_channels import parts, steady_channels, sum_of, take_channels
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
    channels = steady_channels(x, max(1, x.shape[-1] // 2))
    n = x.shape[-2] // frames
    chunks = [take_channels(part, channels) for part in parts(x, n)]  # of whole frames
    mean = sum_of(part.double().sum(-2) for part in chunks) / x.shape[-2]  # [..., C]
    old = memory or ChunkMemory(mean.new_zeros(mean.shape), 0)
    new = ChunkMemory(old.total + mean, old.chunks + 1)
    remembered = unit_rows((new.total / new.chunks)[..., None, :])[..., None, :]

    def score(part: Tensor) -> Tensor:
        video = unit_rows(part.double()).unflatten(-2, (-1, n))  # [..., t, n, C]
        return closeness(video, remembered) + closeness(video, video.mean(-2, keepdim=True))

    return Familiarity(snap(torch.cat([score(part) for part in chunks], -2)), channels, new)
