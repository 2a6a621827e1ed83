"""Random: the baseline that every score has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens


@policy("random", needs=("layer",), role="score")
def random(tokens: Tokens, budget: int, *, seed: int = 0) -> Tensor:
    """Keep tokens drawn by chance, each head and layer its own.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, of which H and N alone are read, and `layer`, the number
            of the layer.
        budget: Tokens to keep in every head; a share is of all tokens.
        seed: Seed of the draw. It is made on the CPU, so all devices agree.
    """
    generator = torch.Generator().manual_seed(seed * 1009 + int(tokens.need("layer")))
    draw = torch.rand(tokens.x.shape[-3:-1], dtype=torch.float64, generator=generator)
    return draw.to(tokens.x.device).expand(tokens.x.shape[:-1])
