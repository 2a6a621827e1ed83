"""MInference: one of three patterns for each head, of equal cost, by what probes keep."""

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
    diagonals,
    early,
    last_queries,
    pooled_scores,
    probe_rows,
)
from mmfast.prefill.plan import BlockSettings, share_of

SPLITS = (0.25, 0.5, 0.75)  # of the keys read, those in columns under vertical-slash


@prefill_method("minference", paper="2407.02490", role="read")
def minference(
    budget: Budget,
    *,
    probes: int = 64,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> MInferencePatterns:
    """Read the first and last keys, columns and diagonals, or blocks: what suits a head.

    Jiang et al. (NeurIPS 2024): every head has one of three patterns. A-shape is the first block
    and a window; vertical-slash the columns and diagonals that the last queries attend to most;
    block-sparse the blocks whose mean keys are most alike to mean queries. All read equally many
    keys. The authors choose the pattern of a head offline; here it is the one that keeps most of
    the attention of the last queries.

    Args:
        budget: Share of the keys that a query of the last block reads; 0.3 if absent.
        probes: Last queries whose attention is computed.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: No probes.
    """
    part = share_of("minference", budget, 0.3, "the keys")
    if probes < 1:
        raise SpecError(f"'minference' got probes={probes}; choose at least 1, as in '?probes=64'")
    return MInferencePatterns(part, block, least, share, probes)


@dataclass(frozen=True)
class MInferencePatterns(BlockSettings):
    """One of three patterns for each head."""

    probes: int = 64

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose for every head the pattern that keeps most of its last queries' attention."""
        last = last_queries(layer, self.probes)
        found = []
        for head in range(layer.heads):
            rows = probe_rows(layer, head, last).mean(0)
            ways = [self.a_shape(layer), *self.vertical_slash(layer, rows, last)]
            ways.append(self.block_sparse(layer, head))
            kept = [float((rows * self._seen(layer, last, *way)).sum()) for way in ways]
            found.append(ways[kept.index(max(kept))])
        blocks, columns = (torch.stack(each) for each in zip(*found, strict=True))
        return BlockChoice(blocks, self.block, columns)

    def _count(self, layer: PromptLayer) -> int:
        """Blocks of keys that the last block of queries reads."""
        return max(1, round(self.budget * block_counts(layer, self.block)[1]))

    def _none(self, layer: PromptLayer) -> Tensor:
        return torch.zeros(layer.n, dtype=torch.bool, device=layer.keys.device)

    def a_shape(self, layer: PromptLayer) -> tuple[Tensor, Tensor]:
        """Blocks and columns of the first block and a window."""
        count = block_counts(layer, self.block)[1]
        near = torch.arange(count, device=layer.keys.device) < self._count(layer) - 1
        blocks = at_distances(layer, near, self.block)
        blocks[:, 0] |= early(layer, self.block)[:, 0]
        return blocks, self._none(layer)

    def vertical_slash(
        self, layer: PromptLayer, rows: Tensor, last: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Blocks and columns of the best columns and diagonals, once for each way to split."""
        size, budget = self.block, self._count(layer)
        order = rows.sum(0).sort(descending=True, stable=True).indices
        lines = diagonals(rows, last + layer.before, size).sort(descending=True, stable=True)
        found = []
        for part in SPLITS:
            slashes = min(budget, max(1, round((1 - part) * budget)))
            columns, near = self._none(layer), torch.zeros_like(lines.values, dtype=torch.bool)
            columns[order[: (budget - slashes) * size]] = True
            near[lines.indices[:slashes]] = True
            found.append((at_distances(layer, near, size), columns))
        return found

    def block_sparse(self, layer: PromptLayer, head: int) -> tuple[Tensor, Tensor]:
        """Blocks and columns of the best blocks by mean queries and keys."""
        shares = pooled_scores(layer, head, self.block)
        top = shares.sort(dim=-1, descending=True, stable=True).indices[:, : self._count(layer)]
        blocks = torch.zeros_like(shares, dtype=torch.bool).scatter_(1, top, True)
        return blocks & early(layer, self.block), self._none(layer)

    def _seen(self, layer: PromptLayer, last: Tensor, blocks: Tensor, columns: Tensor) -> Tensor:
        """Mask `[c, S]` of what the last queries read."""
        size = self.block
        mine = blocks[last // size].repeat_interleave(size, -1)[:, : layer.n]
        places = torch.arange(layer.n, device=last.device)
        return mine | columns | (places >= (last // size * size + layer.before)[:, None])
