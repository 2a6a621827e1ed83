"""From scores of clusters to the blocks that are read."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.ranking import stable_topk


def best_blocks(score: Tensor, owner: Tensor, budget: int, chunk: int = 1) -> Tensor:
    """Clusters of the `budget` blocks with the highest scores; ties go to the earliest block.

    Args:
        score: `[C]`; a block's score is that of its best cluster.
        owner: `[C]` number of each cluster's block, in any order.
        budget: Blocks to choose; all of them where there are no more.
        chunk: Blocks that come in groups of so many neighbours, by the mean of their scores; the
            last group may be smaller. `budget // chunk` groups are chosen, at least one.

    Returns:
        `[C]` bool.
    """
    blocks, index = owner.unique(return_inverse=True)  # ascending, so in time order
    if len(blocks) <= budget:
        return torch.ones_like(owner, dtype=torch.bool)
    best = score.new_full((len(blocks),), -torch.inf).scatter_reduce_(0, index, score, "amax")
    group = torch.arange(len(blocks), device=score.device) // chunk
    sizes = torch.bincount(group)
    mean = torch.zeros(len(sizes), dtype=score.dtype, device=score.device)
    mean = mean.index_add_(0, group, best) / sizes
    chosen = torch.zeros(len(sizes), dtype=torch.bool, device=score.device)
    chosen[stable_topk(mean, max(1, budget // chunk))] = True
    return chosen[group][index]
