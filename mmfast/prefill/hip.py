"""HiP: a tree search finds the strongest blocks of keys for every block of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import block_counts, block_means, whole_blocks
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("hip", paper="2406.09827", role="read")
def hip(budget: Budget, *, block: int = 128, least: int = 4096, share: bool = True) -> TreeSearch:
    """Find the strongest blocks of keys by halving the most promising spans again and again.

    Lee et al. (ICLR 2025): neighbouring tokens get similar attention, so that the middle of a span
    stands for all of it. The keys before a block of queries are cut into as many spans as blocks
    are wanted. All spans are halved, each half is scored by the largest product of its middle key
    and the mean queries of the heads, and the best half of the halves stay, until a span is one
    block. The first block is read beside them.

    Args:
        budget: Share of the blocks of keys that a block of queries reads at most; 0.25 if absent.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.
    """
    return TreeSearch(share_of("hip", budget, 0.25, "the keys"), block, least, share)


@dataclass(frozen=True)
class TreeSearch(BlockSettings):
    """Blocks by a search in a tree of spans."""

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Search for every head and block of queries."""
        size = self.block
        rows, count = block_counts(layer, size)
        wanted = max(1, round(self.budget * count))
        blocks = torch.stack([self._search(layer, head, wanted) for head in range(layer.heads)])
        blocks[:, :, 0] |= whole_blocks(layer, size) > 0
        return BlockChoice(blocks.view(layer.heads, rows, count), size)

    def _search(self, layer: PromptLayer, head: int, wanted: int) -> Tensor:
        """Mask `[q, k]` of one head: spans `[low, high)` of blocks, halved at the same time."""
        size, keys = self.block, layer.keys[head]
        rows, count = block_counts(layer, size)
        ends = whole_blocks(layer, size)  # [q]
        queries = block_means(layer.query[head], size).to(keys.dtype)  # [G, q, d]
        cuts = torch.arange(wanted + 1, device=keys.device)
        bounds = torch.maximum(cuts * ends[:, None] // wanted, cuts.new_zeros(()))  # [q, w + 1]
        low, high = bounds[:, :-1], bounds[:, 1:]
        while bool((high - low > 1).any()):
            middle = (low + high + 1) // 2
            low, high = torch.cat([low, middle], 1), torch.cat([middle, high], 1)
            places = ((low + high) * size // 2).clamp_max(layer.n - 1)
            products = torch.einsum("gqd,qwd->gqw", queries, keys[places]).amax(0)
            scores = products.masked_fill(high <= low, -torch.inf)
            best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :wanted]
            low, high = low.gather(1, best), high.gather(1, best)
        chosen = torch.zeros(rows, count + 1, dtype=torch.bool, device=keys.device)
        chosen.scatter_(1, torch.where(high > low, low, count), True)
        return chosen[:, :count]
