"""FlexPrefill: blocks by mean queries and keys where these tell, else columns and diagonals."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import (
    at_distances,
    block_counts,
    block_means,
    block_sums,
    diagonals,
    early,
    fewest,
    last_queries,
    pooled_scores,
    probe_rows,
)
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("flexprefill", paper="2502.20766", role="mass")
def flexprefill(
    budget: Budget,
    *,
    tau: float = 0.1,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> FlexiblePattern:
    """Read the fewest blocks, or columns and diagonals, that hold a share of the attention.

    Lai et al. (ICLR 2025): the last block of queries is compared with its mean. Where the attention
    by mean queries and mean keys is near to the true one over blocks (Jensen-Shannon distance under
    `tau`), each head reads the blocks of most estimated attention, the fewest over all blocks of
    queries that hold the share together with the queries' own blocks. Else it reads the fewest
    columns and the fewest diagonals that hold it in the attention of the last block of queries.

    Args:
        budget: Share of the attention; 0.95 if absent.
        tau: Distance under which the estimate is trusted; 0 is never.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A negative tau.
    """
    mass = share_of("flexprefill", budget, 0.95, "the attention")
    if not tau >= 0:
        raise SpecError(f"'flexprefill' got tau={tau}; choose 0 or more, as in '?tau=0.1'")
    return FlexiblePattern(mass, block, least, share, tau)


@dataclass(frozen=True)
class FlexiblePattern(BlockSettings):
    """One of two patterns for each head."""

    tau: float = 0.1

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose a pattern for every head, and what it reads."""
        size, last = self.block, last_queries(layer, self.block)
        rows, count = block_counts(layer, size)
        shape = layer.heads, rows, count
        blocks = torch.zeros(shape, dtype=torch.bool, device=last.device)
        columns = torch.zeros(layer.heads, layer.n, dtype=torch.bool, device=last.device)
        for head in range(layer.heads):
            attention = probe_rows(layer, head, last).mean(0)
            if jensen_shannon(estimate(layer, head, size), block_sums(attention, size)) < self.tau:
                shares = pooled_scores(layer, head, size, own=True)
                chosen = fewest(shares.flatten(), self.budget * rows).view(rows, count)
                blocks[head] = chosen & early(layer, size)  # the own block is always read
                continue
            columns[head] = fewest(attention.mean(0), self.budget)
            lines = diagonals(attention, last + layer.before, size) / len(last)
            blocks[head] = at_distances(layer, fewest(lines, self.budget), size)
        return BlockChoice(blocks, size, columns)


def estimate(layer: PromptLayer, head: int, size: int) -> Tensor:
    """Attention `[k]` of the mean of the last queries to means of keys."""
    mean = layer.query[head][:, -size:].float().mean(1)  # [G, d]
    means = block_means(layer.keys[head], size)
    return (mean @ means.T * layer.scale).softmax(-1).mean(0)


def jensen_shannon(estimate: Tensor, attention: Tensor) -> float:
    """Jensen-Shannon distance of two distributions `[k]`, the second as rows `[c, k]`."""
    true = attention.mean(0)
    middle = (estimate + true) / 2
    halves = [torch.special.xlogy(x, x / middle).nan_to_num(0.0).sum() for x in (estimate, true)]
    return float((sum(halves) / 2).clamp_min(0).sqrt())
