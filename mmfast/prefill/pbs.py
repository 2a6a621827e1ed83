"""PBS-Attn: keys are sorted within segments, so that those that matter share blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import block_counts, fewest, last_queries, pooled_scores
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("pbs", paper="2510.21270", role="mass")
def pbs(
    budget: Budget,
    *,
    segment: int = 2,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> PermutedBlocks:
    """Sort the keys of each segment by the attention they get, and read the fewest blocks of them.

    Wang et al. (2025): attention does not depend on the order of keys. Within segments they are
    sorted by the attention of the last block of queries, so that keys that many queries want lie in
    few blocks; segments stay in order, for causality. Every block of queries reads its own segment,
    the block that holds the first key, and of the segments before the fewest blocks that hold the
    wanted share by mean queries and mean keys. Queries keep their order.

    Args:
        budget: Share of the estimated attention to earlier segments; 0.9 if absent, as published.
        segment: Blocks of a segment.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A segment without blocks.
    """
    mass = share_of("pbs", budget, 0.9, "the attention")
    if segment < 1:
        raise SpecError(f"'pbs' got segment={segment}; choose at least 1 block, as in '?segment=2'")
    return PermutedBlocks(mass, block, least, share, segment)


@dataclass(frozen=True)
class PermutedBlocks(BlockSettings):
    """Blocks of sorted keys."""

    segment: int = 2

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Sort the keys of every head and choose blocks of them."""
        own, earlier = self.segments(layer)
        orders, blocks = [], []
        for head in range(layer.heads):
            order = self.sorted_keys(layer, head)
            keys = layer.keys[head][order]
            shares = pooled_scores(layer, head, self.block, keys, open_to=earlier)
            chosen = fewest(shares, self.budget) | own
            chosen[:, (order == 0).nonzero()[0, 0] // self.block] = True
            blocks.append(chosen)
            orders.append(order)
        return BlockChoice(torch.stack(blocks), self.block, order=torch.stack(orders))

    def segments(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Masks `[q, k]` of blocks of the segment where queries begin, and of those before it."""
        rows, count = (
            torch.arange(number, device=layer.keys.device)
            for number in block_counts(layer, self.block)
        )
        begins = (rows * self.block + layer.before) // (self.segment * self.block)
        segment = count // self.segment
        return segment == begins[:, None], segment < begins[:, None]

    def sorted_keys(self, layer: PromptLayer, head: int) -> Tensor:
        """Key `[S]` at each place, by descending attention within whole segments.

        The last queries attend to the keys of whole segments alone, to later ones as well; a last
        segment that is not full keeps its order.
        """
        wide = self.segment * self.block
        order = torch.arange(layer.n, device=layer.keys.device)
        whole = layer.n // wide * wide
        queries = layer.query[head].index_select(1, last_queries(layer, self.block)).float()
        logits = queries @ layer.keys[head, :whole].float().T * layer.scale
        scores = logits.softmax(-1).mean((0, 1)).view(-1, wide)
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        order[:whole] = (ranked + order[:whole:wide, None]).flatten()
        return order
