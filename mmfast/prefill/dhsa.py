"""Hierarchical sparse attention over chunks of keys, whose borders are set by a rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.core.blocks import BlockChoice, PromptLayer
from mmfast.core.errors import SpecError
from mmfast.core.registry import prefill_method
from mmfast.core.spec import Budget
from mmfast.ops.block_selection import block_counts, block_means
from mmfast.prefill.plan import BlockSettings, share_of


@prefill_method("dhsa", paper="2510.24606", role="read")
def dhsa(
    budget: Budget,
    *,
    chunk: int = 32,
    window: int = 4,
    block: int = 128,
    least: int = 4096,
    share: bool = True,
) -> ChunkSearch:
    """Read the tokens of the chunks of keys whose length-normalised means are nearest to a query.

    Xiong et al. (2025): keys are cut into chunks of varying length. A chunk, and a block of
    queries, stands for itself by its mean times the square root of its length. Products of both are
    scores of chunks, which every token of a chunk inherits; a block of queries reads as many tokens
    of most score as the budget says, and the first block of keys beside them.

    The authors train a predictor of the borders for each model. Here a rule sets them, which is not
    theirs: a border is where the cosine of the mean keys in windows on both sides is lowest.

    Args:
        budget: Share of the keys that a block of queries reads; 0.25 if absent.
        chunk: Tokens of a chunk at least, on average.
        window: Tokens on either side of a border; borders are further apart.
        block: Tokens of a block of queries.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.

    Raises:
        SpecError: A chunk or window without tokens.
    """
    part = share_of("dhsa", budget, 0.25, "the keys")
    if chunk < 1 or window < 1:
        raise SpecError(
            f"'dhsa' got chunk={chunk}, window={window}; choose at least 1 token of both, as in "
            "'dhsa:0.25?chunk=32&window=4'"
        )
    return ChunkSearch(part, block, least, share, chunk, window)


@dataclass(frozen=True)
class ChunkSearch(BlockSettings):
    """Tokens of chunks."""

    chunk: int = 32
    window: int = 4

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose tokens for every head and block of queries."""
        blocks = torch.stack([self._head(layer, head) for head in range(layer.heads)])
        return BlockChoice(blocks, self.block, width=1)

    def _head(self, layer: PromptLayer, head: int) -> Tensor:
        """Mask `[q, S]` of one head."""
        size, keys = self.block, layer.keys[head].float()
        starts = torch.cat([keys.new_zeros(1, dtype=torch.long), borders(keys, self)])
        lengths = torch.cat([starts[1:], starts.new_tensor([layer.n])]) - starts
        mine = torch.repeat_interleave(torch.arange(len(starts), device=keys.device), lengths)
        sums = torch.zeros(len(starts), keys.shape[1], device=keys.device)
        stands = sums.index_add_(0, mine, keys) / lengths[:, None].sqrt()  # mean times sqrt(length)
        queries = block_means(layer.query[head], size).mean(0)  # [q, d]; its length ranks nothing
        order = (queries @ stands.T).sort(dim=-1, descending=True, stable=True).indices
        firsts = torch.arange(block_counts(layer, size)[0], device=keys.device) * size
        firsts = (firsts + layer.before)[:, None]
        able = torch.minimum((firsts - starts).clamp_min(0), lengths).gather(1, order)
        left = round(self.budget * layer.n) - (able.cumsum(1) - able)
        taken = torch.zeros_like(able).scatter_(1, order, torch.minimum(able, left.clamp_min(0)))
        places = torch.arange(layer.n, device=keys.device)
        chosen = (places - starts[mine]).int() < taken.int()[:, mine]
        return chosen | (places < torch.minimum(firsts, firsts.new_tensor(size)))


def borders(keys: Tensor, settings: ChunkSearch) -> Tensor:
    """First tokens of chunks but the first, ascending, of keys `[S, d]`.

    The cosine of the mean keys before and from a token is compared at all tokens. Those of the
    lowest cosine within a window stay, and of these as many as `chunk` allows, the lowest first.
    """
    n, window = len(keys), settings.window
    if n < 2:
        return torch.zeros(0, dtype=torch.long, device=keys.device)
    sums = F.pad(keys.double().cumsum(0), (0, 0, 1, 0))
    at = torch.arange(1, n, device=keys.device)
    low, high = (at - window).clamp_min(0), (at + window).clamp_max(n)
    drop = F.cosine_similarity(sums[at] - sums[low], sums[high] - sums[at], dim=-1)
    near = -F.max_pool1d(-drop[None], 2 * window + 1, 1, window)[0]
    found = at[drop <= near]
    lowest = drop[found - 1].sort(stable=True).indices[: max(0, n // settings.chunk - 1)]
    return found[lowest].sort().values
