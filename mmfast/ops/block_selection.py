"""Sums of attention over blocks, columns and diagonals, and the fewest entries that hold a share.

They are what choosers of blocks of keys have in common.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.core.blocks import PromptLayer


def probe_rows(layer: PromptLayer, head: int, queries: Tensor) -> Tensor:
    """Attention `[G, c, S]` in float32 of the queries at `queries` `[c]`, causal."""
    rows = layer.query[head].index_select(1, queries).float()
    logits = rows @ layer.keys[head].float().T * layer.scale
    later = torch.arange(layer.n, device=queries.device) > (queries + layer.before)[:, None]
    return logits.masked_fill_(later, -torch.inf).softmax(-1)


def last_queries(layer: PromptLayer, count: int) -> Tensor:
    """Numbers of the last `count` queries, or of all."""
    start = max(0, layer.length - count)
    return torch.arange(start, layer.length, device=layer.keys.device)


def spread_queries(layer: PromptLayer, count: int) -> Tensor:
    """Numbers of `count` queries at equal distances, the last one among them."""
    count = max(1, min(count, layer.length))
    steps = torch.arange(1, count + 1, device=layer.keys.device)
    return steps * layer.length // count - 1


def block_counts(layer: PromptLayer, size: int) -> tuple[int, int]:
    """Number of blocks of queries and of keys."""
    return -(-layer.length // size), -(-layer.n // size)


def whole_blocks(layer: PromptLayer, size: int) -> Tensor:
    """Number `[q]` of blocks of keys that begin before each block of queries."""
    rows = torch.arange(block_counts(layer, size)[0], device=layer.keys.device)
    return -(-(rows * size + layer.before) // size)


def early(layer: PromptLayer, size: int) -> Tensor:
    """Mask `[q, k]` of the blocks of keys that begin before a block of queries."""
    count = block_counts(layer, size)[1]
    return torch.arange(count, device=layer.keys.device) < whole_blocks(layer, size)[:, None]


def block_sums(x: Tensor, size: int) -> Tensor:
    """Sums `[..., k]` over blocks of the last axis."""
    short = -x.shape[-1] % size
    sums: Tensor = F.pad(x, (0, short)).unflatten(-1, (-1, size)).sum(-1)
    return sums


def block_means(x: Tensor, size: int) -> Tensor:
    """Means `[..., k, d]` over blocks of the axis before the last, of the last one as well."""
    sums = block_sums(x.float().transpose(-1, -2), size).transpose(-1, -2)
    counts = block_sums(torch.ones(x.shape[-2], device=x.device), size)
    return sums / counts[:, None]


def fewest(scores: Tensor, mass: float | Tensor) -> Tensor:
    """Mask of the fewest entries of the last axis whose sum is at least `mass`.

    All entries above zero where even they do not reach it; the lower index goes first on ties.
    """
    ranked, index = scores.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    bound = torch.as_tensor(mass, device=scores.device, dtype=scores.dtype)
    taken = (before < bound) & (ranked > 0)
    return torch.zeros_like(taken).scatter(-1, index, taken)


def pooled_scores(
    layer: PromptLayer,
    head: int,
    size: int,
    keys: Tensor | None = None,
    own: bool = False,
    open_to: Tensor | None = None,
) -> Tensor:
    """Share `[q, k]` of blocks of keys by mean queries and mean keys, of those that are early.

    Others may be named by `open_to` `[q, k]`. With `own` the block where the queries begin has a
    share, too. The G heads of a choice are averaged; `keys` `[S, d]` stand in the place of the
    head's own.
    """
    queries = block_means(layer.query[head], size)  # [G, q, d]
    means = block_means(layer.keys[head] if keys is None else keys, size)
    logits = queries @ means.T * layer.scale
    open_to = early(layer, size) if open_to is None else open_to
    if own:
        places = torch.arange(open_to.shape[1], device=logits.device)
        open_to = open_to | (places == whole_blocks(layer, size)[:, None])
    logits = logits.masked_fill(~open_to, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0).mean(0)


def diagonals(rows: Tensor, places: Tensor, size: int) -> Tensor:
    """Attention `[k]` by distance of the block of a query from that of the key, in blocks.

    `rows` `[c, S]` are those of the queries at `places` `[c]` among the keys.
    """
    sums = block_sums(rows, size)  # [c, k]
    distance = places[:, None] // size - torch.arange(sums.shape[1], device=rows.device)
    found = torch.zeros(sums.shape[1], device=rows.device)
    return found.index_add_(0, distance.clamp_min(0).flatten(), sums.flatten())


def at_distances(layer: PromptLayer, near: Tensor, size: int) -> Tensor:
    """Mask `[q, k]` of the early blocks at the distances marked in `near` `[k]`.

    A block of queries that begins inside a block of keys is where it begins.
    """
    rows, count = block_counts(layer, size)
    starts = (torch.arange(rows, device=near.device) * size + layer.before) // size
    distance = starts[:, None] - torch.arange(count, device=near.device)
    return near[distance.clamp(0, count - 1)] & (distance >= 0) & early(layer, size)
