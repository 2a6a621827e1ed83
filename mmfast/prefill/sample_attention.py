"""SampleAttention: a window, and the columns that sampled queries attend to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import (
    at_distances,
    block_counts,
    fewest,
    probe_rows,
    spread_queries,
)
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("sample_attention", paper="2406.15486", role="mass")
def sample_attention(
    budget: Budget,
    *,
    rows: float = 0.02,
    window: float = 0.08,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> SampledColumns:
    """Read a window and the key columns that sampled queries attend to most.

    Zhu et al. (2024): the attention of a few queries at equal distances is computed. Its sum over
    the queries says how much of it the window holds, and which columns outside of the window hold
    enough of the rest.

    Args:
        budget: Share of the sampled attention that window and columns hold; 0.95 if absent.
        rows: Share of the queries that are sampled.
        window: Share of the keys in the window before each block of queries.
        block: Tokens of a block of queries.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A share outside (0, 1].
    """
    mass = share_of("sample_attention", budget, 0.95, "the attention")
    if not 0 < rows <= 1 or not 0 <= window <= 1:
        raise SpecError(
            f"'sample_attention' got rows={rows}, window={window}; choose shares in (0, 1], as in "
            "'sample_attention:0.95?rows=0.02&window=0.08'"
        )
    return SampledColumns(mass, block, least, share, rows, window)


@dataclass(frozen=True)
class SampledColumns(BlockSettings):
    """A window and columns."""

    rows: float = 0.02
    window: float = 0.08

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose columns beside a window of the same width for all heads."""
        size, device = self.block, layer.keys.device
        wide = round(self.window * layer.n / size)
        near = torch.arange(block_counts(layer, size)[1], device=device) <= wide
        blocks = at_distances(layer, near, size).expand(layer.heads, -1, -1)
        sampled = spread_queries(layer, round(self.rows * layer.length))
        # Keys from here on are in the window, or in the query's own block.
        inside = (sampled // size * size + layer.before) // size * size - wide * size
        within = torch.arange(layer.n, device=device) >= inside[:, None]
        columns = []
        for head in range(layer.heads):
            attention = probe_rows(layer, head, sampled).mean(0)
            outside = attention.masked_fill_(within, 0.0).mean(0)
            held = 1 - float(outside.sum())
            columns.append(fewest(outside, self.budget - held))
        return BlockChoice(blocks, size, torch.stack(columns))
