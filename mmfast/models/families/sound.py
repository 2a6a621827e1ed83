"""What families have in common that hear sound in padded windows: a batch of them, joined frames.

A window is a row of `input_features`; its frames behind the convolutions are joined, several in
one token, and the tokens of padding are dropped or not. A long sound is several windows in a row,
each an item of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Layout
from mmfast.models.families.tower import Tower


def lines(lengths: list[int]) -> list[Layout]:
    """A line of tokens per window."""
    return [Layout(n, (n, 1, 1)) for n in lengths]


def joined_means(values: Tensor, lengths: list[int], joined: int) -> list[Tensor]:
    """Frames `[P, C]` of all windows to tokens `[n, C]` of each: the mean of those joined."""
    whole = values.view(len(lengths), -1, values.shape[-1])  # [windows, frames, C]
    return [
        window[: n * joined].reshape(n, joined, -1).mean(1)
        for window, n in zip(whole, lengths, strict=True)
    ]


def audio_tower(base: Any) -> Tower:
    """The audio encoder: a batch of windows."""
    encoder = base.audio_tower
    return Tower(base, encoder, encoder.layers, packed=False, class_token=False)
