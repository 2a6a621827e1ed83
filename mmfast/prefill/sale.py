"""SALE: products of 4-bit queries and keys tell which blocks of keys a prompt reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import block_counts
from mmfast.prefill.plan import BlockSettings, share_of

_KEYS = 1024  # keys of a product at a time, so that its numbers stay in the processor's cache
LEVELS = 7  # largest number of 4 bits with a sign, of which -8 is not used


@prefill_method("sale", paper="2505.24179", role="floor")
def sale(
    budget: Budget,
    *,
    width: int = 32,
    local: int = 128,
    block: int = 64,
    least: int = 4096,
    share: bool = True,
) -> LowBitEstimate:
    """Read the blocks in which 4-bit queries and keys find a key of enough relative attention.

    Ji et al. (2025): queries and keys, less their means over the prompt, are rounded to 4 bits, and
    their products estimate every logit. The relative attention score of a key is its exponential,
    divided by the exact sum of those of the first block and of the last keys, which take most of
    the attention. A block of queries reads a block of keys if one score of one of its queries
    reaches the threshold, and the first and last keys always.

    The numbers are those of 4-bit arithmetic, computed in float32: an estimate costs what exact
    products cost, about half of dense attention. The authors' CUDA kernel multiplies packed 4-bit
    numbers, for 11 % of it.

    Args:
        budget: 1 less the threshold; 0.996 if absent, a score of 0.004.
        width: Tokens of a block of keys.
        local: Tokens before a block of queries that are always read.
        block: Tokens of a block of queries.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A block of keys without tokens, or a negative number of local ones.
    """
    part = share_of("sale", budget, 0.996, "what a score may lack")
    if width < 1 or local < 0:
        raise SpecError(
            f"'sale' got width={width}, local={local}; choose at least 1 token and 0 tokens, as in "
            "'sale:0.996?width=32&local=128'"
        )
    return LowBitEstimate(part, block, least, share, width, local)


@dataclass(frozen=True)
class LowBitEstimate(BlockSettings):
    """Blocks by 4-bit products."""

    width: int = 32
    local: int = 128

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose for every head and block of queries."""
        blocks = torch.stack([self._head(layer, head) for head in range(layer.heads)])
        return BlockChoice(blocks, self.block, width=self.width)

    def _head(self, layer: PromptLayer, head: int) -> Tensor:
        """Mask `[q, k]` of one head."""
        size, wide, keys = self.block, self.width, layer.keys[head].float()
        rows, count = block_counts(layer, size)[0], -(-layer.n // wide)
        query = layer.query[head].float() * layer.scale
        steady = keys - keys.mean(0)  # moves all logits of a query alike
        mean = query.mean(1)  # [G, d]
        small_keys, small = in_4_bits(steady), in_4_bits(query - mean[:, None])
        # Two further parts of a product: what the mean query adds, unrounded, and the threshold.
        wise = torch.cat([small_keys, torch.ones_like(steady[:, :1]), steady @ mean.T], 1)
        heads = torch.eye(len(query), device=keys.device)[:, None]  # [G, 1, G]
        chosen = torch.zeros(rows, count, dtype=torch.bool, device=keys.device)
        for row, start in enumerate(range(0, layer.length, size)):
            mine = slice(start, min(start + size, layer.length))
            first = start + layer.before
            near = max(0, (first - self.local) // wide)  # block in which the local keys begin
            chosen[row, near : -(-first // wide)] = True
            chosen[row, : near > 0] = True
            if near < 2:
                continue
            level = self._level(query[:, mine], steady, first, near * wide)
            bound = level + math.log(max(1 - self.budget, 1e-30))
            whose = heads.expand(-1, level.shape[1], -1)
            asked = torch.cat([small[:, mine], -bound[..., None], whose], -1).flatten(0, 1)
            step = max(1, _KEYS // wide) * wide
            tops = []
            for at in range(wide, near * wide, step):
                above = wise[at : min(at + step, near * wide)] @ asked.T
                tops.append(above.view(-1, wide * len(asked)).amax(1))
            chosen[row, 1:near] = torch.cat(tops) >= 0
        return chosen

    def _level(self, query: Tensor, keys: Tensor, first: int, near: int) -> Tensor:
        """Log-sum-exp `[G, c]` of exact logits of the first block and of the keys from `near`."""
        last = first + query.shape[1]
        known = torch.cat([keys[: self.width], keys[near:last]])
        logits = query @ known.T
        places = torch.arange(near, last, device=keys.device)
        queries = torch.arange(first, last, device=keys.device)
        later = places > queries[:, None]
        logits[:, :, self.width :].masked_fill_(later, -torch.inf)
        return logits.logsumexp(-1)


def in_4_bits(x: Tensor) -> Tensor:
    """Rows `[..., d]` rounded to 4 bits by a scale of each, as the numbers that they stand for."""
    scale = x.abs().amax(-1, keepdim=True) / LEVELS
    scale = torch.where(scale > 0, scale, 1.0)
    return (x / scale).round_().mul_(scale)
