"""ReKV: read the stored frames whose mean key answers the question."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.kv import Clusters, Retriever
from mmfast.core.registry import register
from mmfast.ops.block_choice import best_blocks
from mmfast.ops.group_queries import group_queries


@register("rekv", kind="cache", paper="2503.00540", needs=(), sites=("kv",), role="retrieve")
def rekv(budget: int | None, *, chunk: int = 1) -> Retriever:
    """Read the frames whose mean key has the largest product with the question's mean query.

    Each stored block stands as the mean of its keys before RoPE, heads side by side; the
    question as the mean of its queries, where the query heads of a group add up; in every layer
    the blocks with the largest dot products are read, in order of time (Di et al., 2025).

    Args:
        budget: Blocks to read.
        chunk: Blocks that are chosen together with their neighbours, by the mean of their
            products; 1 chooses each for itself.

    Raises:
        SpecError: A budget that is no number of blocks, or a chunk below 1.
    """
    if not isinstance(budget, int) or budget < 1 or chunk < 1:
        raise SpecError(f"'rekv' got {budget!r} blocks in chunks of {chunk}; write 'rekv:64'")
    return MeanKeys(budget, chunk)


@dataclass(frozen=True)
class MeanKeys:
    """One mean key per block, and dot products with the mean query."""

    budget: int
    chunk: int = 1

    def represent(self, keys: Tensor) -> Clusters:
        """The mean of the block's keys `[H, n, d]`, in float32."""
        n = keys.shape[1]
        return Clusters(
            means=keys.float().mean(1)[None],
            counts=torch.tensor([n], device=keys.device),
            owner=torch.zeros(n, dtype=torch.long, device=keys.device),
        )

    def choose(self, query: Tensor, index: Clusters) -> Tensor:
        """Blocks by dot product with the mean of the query `[Hq, T, d]`: `[C]` bool."""
        seen = group_queries(query.float().mean(1, keepdim=True), index.means.shape[1])
        score = index.means.flatten(1) @ seen.sum((1, 2)).flatten()  # [C]
        return best_blocks(score, index.owner, self.budget, self.chunk)


register("retrieve", kind="cache", paper="2503.00540", needs=(), sites=("kv",), role="retrieve")(
    rekv
)
