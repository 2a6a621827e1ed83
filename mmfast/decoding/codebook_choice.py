"""How codes of a codebook are chosen from logits, many at once."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError


class CodeChoice:
    """Greedy, or drawn after temperature, top-k and top-p, in that order.

    Args:
        temperature: 0 is greedy.
        top_k: Keep the k likeliest; 0 keeps all.
        top_p: Keep the likeliest that make up this share; 1 keeps all.
        seed: Of the numbers drawn.

    Raises:
        SpecError: A value out of range.
    """

    def __init__(
        self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
    ) -> None:
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise SpecError(
                f"temperature {temperature!r}, top_k {top_k!r}, top_p {top_p!r} cannot be; "
                "use temperature >= 0, top_k >= 0 and top_p in (0, 1]"
            )
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.seed = seed
        self._sources: dict[torch.device, torch.Generator] = {}

    @property
    def greedy(self) -> bool:
        """The likeliest is taken."""
        return self.temperature == 0

    def probs(self, logits: Tensor) -> Tensor:
        """Logits `[..., V]` to the probabilities that codes are drawn from, float32."""
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probs = scores.softmax(-1)
        return probs if self.top_p >= 1 else _nucleus(probs, self.top_p)

    def draw(self, probs: Tensor) -> Tensor:
        """Probabilities `[..., V]` to codes `[...]`."""
        flat = torch.multinomial(probs.flatten(0, -2), 1, generator=self._source(probs.device))
        return flat.view(probs.shape[:-1])

    def uniform(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1) of that shape."""
        return torch.rand(like.shape, generator=self._source(like.device), device=like.device)

    def _source(self, device: torch.device) -> torch.Generator:
        if device not in self._sources:
            self._sources[device] = torch.Generator(device).manual_seed(self.seed)
        return self._sources[device]


def _nucleus(probs: Tensor, share: float) -> Tensor:
    best, order = probs.sort(dim=-1, descending=True)
    kept = best.masked_fill(best.cumsum(-1) - best >= share, 0.0)  # the likeliest always stays
    probs = torch.zeros_like(probs).scatter(-1, order, kept)
    return probs / probs.sum(-1, keepdim=True)
