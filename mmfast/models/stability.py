"""Head on the states of a translator's decoder: does a word stay when more of the source comes?

How much more of the source a word waits for is learned for each word, as the lookahead of adaptive
non-causal transducers is for each frame (ANCAT, 2305.04159); their encoder is not here.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mmfast.core.errors import ModelError

FILE = "stability.safetensors"
WIDTH = 64


class StabilityHead(nn.Module):
    """Two layers over a state of the decoder and the chance of the token that it predicts.

    Args:
        width: Width of the states.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width + 1, WIDTH)
        self.second = nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(width + 1))
        self.register_buffer("scale", torch.ones(width + 1))

    def forward(self, states: Tensor, chances: Tensor) -> Tensor:
        """Return the logit that each token stays.

        Args:
            states: Last states of the decoder `[..., D]`.
            chances: Chance of the token that each state predicts `[...]`.
        """
        both = torch.cat([states.float(), doubt(chances)[..., None]], -1)
        hidden = self.first((both - self.mean) / self.scale).relu()
        logits: Tensor = self.second(hidden)[..., 0]
        return logits

    def save(self, folder: Path) -> None:
        """Write the head beside a checkpoint."""
        save_file(
            {name: value.contiguous() for name, value in self.state_dict().items()}, folder / FILE
        )
        (folder / FILE).chmod(0o644)


def doubt(chances: Tensor) -> Tensor:
    """Return how unsure chances `[...]` are: the logarithm of what they leave to others."""
    return (1 - chances.float()).clamp(min=1e-6).log()


def load_head(folder: str | Path) -> StabilityHead | None:
    """Read the head beside a checkpoint; None where there is none. ModelError: it is broken."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        weights = load_file(path)
        head = StabilityHead(len(weights["mean"]) - 1)
        head.load_state_dict(weights)
    except Exception as error:
        raise ModelError(f"{path} is no head of stability; train it again") from error
    return head.eval()
