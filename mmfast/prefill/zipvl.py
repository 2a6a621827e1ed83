"""ZipVL: the tokens that probe queries find important, as many as a layer needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import block_counts, last_queries, probe_rows, spread_queries
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("zipvl", paper="2410.08584", role="mass")
def zipvl(
    budget: Budget,
    *,
    probes: int = 64,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> ImportantTokens:
    """Read the tokens that probe queries find important, as many as the layer needs.

    He et al. (2024): the last queries and as many spread over the prompt are probes. The fewest
    keys that hold the wanted share of a probe's attention, mean over probes and heads, are the
    number of important tokens of a layer: layers of even attention keep many, others few. Each head
    keeps so many, those of most attention by probes that see them. Queries also read their block.

    Args:
        budget: Share of the attention of a probe; 0.95 if absent.
        probes: Last queries, and spread ones.
        block: Tokens of a block of queries.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: No probes.
    """
    mass = share_of("zipvl", budget, 0.95, "the attention")
    if probes < 1:
        raise SpecError(f"'zipvl' got probes={probes}; choose at least 1, as in '?probes=64'")
    return ImportantTokens(mass, block, least, share, probes)


@dataclass(frozen=True)
class ImportantTokens(BlockSettings):
    """Important tokens by probes."""

    probes: int = 64

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose equally many tokens in all heads."""
        both = spread_queries(layer, self.probes), last_queries(layer, self.probes)
        probes = torch.cat(both).unique()
        places = torch.arange(layer.n, device=probes.device)
        sees = (places <= (probes + layer.before)[:, None]).sum(0).clamp_min(1)
        scores, needs = [], []
        for head in range(layer.heads):
            rows = probe_rows(layer, head, probes)
            needs.append(torch.stack([_needed(row, self.budget) for row in rows.mean(0)]).mean())
            scores.append(rows.mean(0).sum(0) / sees)
        count = min(layer.n, int(torch.stack(needs).mean().ceil()))
        chosen = torch.stack(scores).topk(count, dim=-1).indices
        columns = torch.zeros(layer.heads, layer.n, dtype=torch.bool, device=probes.device)
        columns.scatter_(1, chosen, True)
        shape = block_counts(layer, self.block)
        blocks = torch.zeros(layer.heads, *shape, dtype=torch.bool, device=probes.device)
        return BlockChoice(blocks, self.block, columns)


def _needed(row: Tensor, mass: float) -> Tensor:
    """Number of the fewest keys that hold a share of a probe's attention `[S]`."""
    ranked = row[row > row.max() * 1e-6].sort(descending=True).values  # the rest never counts
    return (ranked.cumsum(0) < mass).sum() + 1.0
