"""How codes of a codebook are chosen from logits, many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.decoding.sampling import Sampling, draw, process


class CodeChoice:
    """Greedy, or drawn after temperature, top-k and top-p.

    Numbers are drawn in the order of the calls: the same calls after the same seed give the same
    codes.

    Args:
        sampling: How; None is greedy. Codes of a frame have no history: a penalty is refused.

    Raises:
        SpecError: A penalty.
    """

    def __init__(self, sampling: Sampling | None = None) -> None:
        self.sampling = sampling or Sampling()
        if self.sampling.penalty != 1:
            raise SpecError(
                f"penalty {self.sampling.penalty!r} is not possible for codes of a frame; use 1"
            )
        self._sources: dict[torch.device, torch.Generator] = {}

    @property
    def greedy(self) -> bool:
        """The likeliest is taken."""
        return self.sampling.greedy

    def probs(self, logits: Tensor, check: bool = True) -> Tensor:
        """Logits `[..., V]` to the probabilities that codes are drawn from.

        Args:
            logits: `[..., V]`.
            check: Look for NaN and infinity, which waits for the device.
        """
        return process(logits, self.sampling, (), check=check).softmax(-1)

    def draw(self, probs: Tensor) -> Tensor:
        """Probabilities `[..., V]` to codes `[...]`."""
        return draw(probs, self.uniform(probs[..., 0]))

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of that shape."""
        if like.device not in self._sources:
            source = torch.Generator(like.device).manual_seed(self.sampling.seed)
            self._sources[like.device] = source
        return torch.rand(like.shape, generator=self._sources[like.device], device=like.device)
