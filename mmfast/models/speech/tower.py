"""The ear of the speech model: log-mel frames, 100 a second, to audio embeddings, 25 a second.

Convolutions that look back alone, so that it hears while somebody speaks: a stage with the last
frames of each layer as its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.errors import ModelError

BINS = 80
FRAMES = 4  # log-mel frames per embedding
MEAN, SPREAD = -4.0, 4.0  # of log-mel, about
KERNEL = 5
FILE = "tower.safetensors"


@dataclass(frozen=True)
class TowerState:
    """Past that each convolution still needs `[B, channels, n]`, first to last."""

    tails: tuple[Tensor, ...]


class SpeechTower(nn.Module):
    """Three convolutions down to 25 embeddings a second, two more beside a residual."""

    def __init__(self, width: int = 160, channels: int = 128) -> None:
        super().__init__()
        sizes = (BINS, channels, channels, width, width, width)
        self.sizes, self.strides = sizes, (1, 2, 2, 1, 1)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(a, b, KERNEL, stride)
            for (a, b), stride in zip(pairwise(sizes), self.strides, strict=True)
        )
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, mel: Tensor) -> Tensor:
        """Log-mel frames `[B, T, 80]` to `[B, T // 4, D]`."""
        return self.step(self.start(len(mel)), mel)[1]

    def start(self, batch: int = 1) -> TowerState:
        """The state of streams that have heard nothing: silence before the start."""
        where = self.out.weight
        tails = [
            where.new_zeros(batch, channels, KERNEL - stride)
            for channels, stride in zip(self.sizes[:-1], self.strides, strict=True)
        ]
        return TowerState(tuple(tails))

    def step(self, state: TowerState, chunk: Tensor) -> tuple[TowerState, Tensor]:
        """Frames `[B, T, 80]`, any number of them, to the embeddings they make certain."""
        x = ((chunk.to(self.out.weight.dtype) - MEAN) / SPREAD).mT  # [B, 80, T]
        tails = []
        for i, (layer, stride) in enumerate(zip(self.convolutions, self.strides, strict=True)):
            seen = torch.cat([state.tails[i], x], -1)
            count = max(0, (seen.shape[-1] - KERNEL) // stride + 1)
            tails.append(seen[..., count * stride :])
            made = F.gelu(layer(seen)) if count else seen.new_zeros(len(x), self.sizes[i + 1], 0)
            x = made if i < 3 else x + made
        return TowerState(tuple(tails)), self.norm(self.out(x.mT))

    def finish(self, state: TowerState) -> Tensor:
        """Frames that make no whole embedding are left out: `[B, 0, D]`."""
        return self.out.weight.new_zeros(len(state.tails[0]), 0, self.out.out_features)

    def reset(self, state: TowerState, rows: Tensor) -> TowerState:
        """Streams `rows` (`[B]` bool) started anew; ModelError within an embedding."""
        fresh = self.start(len(rows))
        if any(a.shape != b.shape for a, b in zip(state.tails, fresh.tails, strict=True)):
            raise ModelError(f"reset between embeddings, every {FRAMES} log-mel frames")
        where = rows[:, None, None]
        both = zip(state.tails, fresh.tails, strict=True)
        return TowerState(tuple(torch.where(where, new, old) for old, new in both))


def load_tower(folder: Path) -> SpeechTower:
    """The tower of a checkpoint, in float32; ModelError where it is not there."""
    if not (folder / FILE).is_file():
        raise ModelError(f"{str(folder)!r} holds no {FILE}; give the folder of a speech model")
    weights = {name: value.float() for name, value in load_file(folder / FILE).items()}
    tower = SpeechTower(len(weights["out.bias"]), len(weights["convolutions.0.bias"]))
    tower.load_state_dict(weights)
    return tower.eval()
