"""Blocks of visual tokens for retrieval: frames where the layout tells, else runs of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmfast.core.kv import Clusters, Retriever
from mmfast.models.kv_notes import CLUSTER, FRAME, KIND, VISUAL, fill
from mmfast.models.sequence import Item, Sequences

# Tokens of a block where no frames are known, such as those of an image cut into tiles.
BLOCK = 64
_KINDS = {"image": 1, "video": 2, "audio": 3}
_NONE = -1


def frames_of(sequences: Sequences) -> Tensor:
    """A code `[B, n]` that tells the frames of a call apart, -1 at what is no content."""
    rows = len(sequences.fixed) or 1
    codes = torch.full((rows, sequences.length), _NONE)
    for item in sequences.items:
        codes[item.row, item.where.cpu()] = _code(item) + _frame(item)
    return codes


def _code(item: Item) -> int:
    kind = "" if item.record is None else item.record.kind
    return _KINDS.get(kind, 0) * 10**12 + (item.index + 1) * 10**6


def _frame(item: Item) -> Tensor:
    """The frame of each token that is left of an item, `[n]`."""
    grid = None if item.record is None else item.record.layouts[item.index].grid
    start = 0 if item.part is None else item.part[0]
    index = torch.arange(start, start + item.n)
    if item.part is None:
        whole = item.chain[0].n if item.chain else item.n
        index = torch.arange(whole)
        for reduction in item.chain:
            index = index.index_select(0, reduction.keep.cpu())
    return index // (BLOCK if grid is None else grid[1] * grid[2])


def index_blocks(layer: Any, retriever: Retriever, raw: Tensor) -> None:
    """Represent the blocks that a prompt has brought.

    Args:
        layer: A shortened layer with notes, nothing of the prompt evicted yet.
        retriever: Makes the clusters.
        raw: `[B, H, n, d]` keys of the last n entries before RoPE.
    """
    notes, n = fill(layer), raw.shape[2]
    batch, _, width = notes[KIND].shape
    frames = notes[FRAME][:, 0, width - n :]
    old = notes.get(CLUSTER, torch.full((batch, 1, width), _NONE, device=raw.device))
    clusters = old.clone()
    found: list[Clusters | None] = []
    for b in range(batch):
        before: Clusters | None = layer.per_row["index"][b] if layer.per_row else None
        visual = (frames[b] != _NONE) & (notes[KIND][b, 0, width - n :] == VISUAL)
        where = visual.nonzero()[:, 0]
        after, owner = _more(before, retriever, raw[b], where, frames[b])
        clusters[b, :, where + width - n] = owner.to(clusters)
        found.append(after)
    rest = {name: note for name, note in notes.items() if name != FRAME}
    layer.notes = {**rest, CLUSTER: clusters}
    layer.per_row = {"index": tuple(found)}


def _more(
    before: Clusters | None, retriever: Retriever, keys: Tensor, where: Tensor, frames: Tensor
) -> tuple[Clusters | None, Tensor]:
    """An index with new blocks, and the cluster in it of each token at `where`."""
    if not len(where):
        return before, where
    codes = frames[where]
    starts = (codes.diff() != 0).nonzero()[:, 0] + 1
    cuts: Sequence[int] = [0, *starts.tolist(), len(where)]
    parts = [] if before is None else [before]
    owners = []
    blocks = 0 if before is None else int(before.owner.max()) + 1
    for number, (start, stop) in enumerate(pairwise(cuts)):
        one = retriever.represent(keys[:, where[start:stop]])
        owners.append(one.owner + sum(len(part.counts) for part in parts))
        mine = torch.full_like(one.counts, blocks + number)
        parts.append(Clusters(one.means, one.counts, mine))
    joined = Clusters(
        *(torch.cat([getattr(p, f) for p in parts]) for f in ("means", "counts", "owner"))
    )
    return joined, torch.cat(owners)
