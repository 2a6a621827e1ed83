"""PBS-Attn: keys are sorted within segments, so that those that matter share blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import fewest, last_queries, pooled_scores, probe_rows
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("pbs", paper="2510.21270", role="mass")
def pbs(
    budget: Budget,
    *,
    segment: int = 8,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> PermutedBlocks:
    """Sort the keys of each segment by the attention they get, and read the fewest blocks of them.

    Wang et al. (2025): attention does not depend on the order of keys. Within segments they are
    sorted by the attention of the last block of queries, so that keys that many queries want lie in
    few blocks; segments stay in order, for causality. Every block of queries reads the fewest
    blocks that hold the wanted share by mean queries and mean keys. Queries keep their order.

    Args:
        budget: Share of the estimated attention; 0.95 if absent.
        segment: Blocks of a segment.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A segment without blocks.
    """
    mass = share_of("pbs", budget, 0.95, "the attention")
    if segment < 1:
        raise SpecError(f"'pbs' got segment={segment}; choose at least 1 block, as in '?segment=8'")
    return PermutedBlocks(mass, block, least, share, segment)


@dataclass(frozen=True)
class PermutedBlocks(BlockSettings):
    """Blocks of sorted keys."""

    segment: int = 8

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Sort the keys of every head and choose blocks of them."""
        last = last_queries(layer, self.block)
        orders, blocks = [], []
        for head in range(layer.heads):
            order = self.sorted_keys(probe_rows(layer, head, last).mean(0).sum(0))
            shares = pooled_scores(layer, head, self.block, layer.keys[head][order])
            blocks.append(fewest(shares, self.budget))
            orders.append(order)
        return BlockChoice(torch.stack(blocks), self.block, order=torch.stack(orders))

    def sorted_keys(self, scores: Tensor) -> Tensor:
        """Key `[S]` at each place, by descending score `[S]` within segments."""
        wide = self.segment * self.block
        found = [
            start + part.sort(descending=True, stable=True).indices
            for start, part in zip(range(0, len(scores), wide), scores.split(wide), strict=True)
        ]
        return torch.cat(found)
