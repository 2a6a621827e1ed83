"""Retrieval: attention reads text, generated tokens, and the stored blocks chosen for a question.

Everything stays in the cache, at its own position. While a prompt with media is prefilled all of
it is read; from its end on a layer reads the blocks that the queries of the question have chosen,
and a later prompt of text alone chooses anew before it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import ModelError
from mmfast.core.kv import Clusters, Retriever
from mmfast.core.reduction import gather_rows
from mmfast.models.kv.eviction import hidden
from mmfast.models.kv.notes import CLUSTER, FRAME, KIND, PADDING, READ, VISUAL, fill, mark
from mmfast.models.kv.queries import RawPrompt
from mmfast.models.reduction.cache_layers import is_short
from mmfast.models.reduction.call import PassState
from mmfast.models.reduction.probe import replacing
from mmfast.models.reduction.sequence import MediaItem, Sequences
from mmfast.models.wrappers import attention_at


def parted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, read: Tensor
) -> tuple[Tensor, Tensor, Any]:
    """Keys, values and mask of the entries `read` `[B, S]` alone; the new ones are at the end.

    ModelError where rows of a batch read different numbers of entries under an attention that takes
    no mask of its own, or flex attention.
    """
    counts = read.sum(1)
    if mask is not None and not isinstance(mask, Tensor):
        raise ModelError(
            "retrieval cannot cut a flex attention mask; call model.set_attn_implementation('sdpa')"
        )
    if bool((counts != counts[0]).any()):
        return key, value, _hidden(module, query, mask, read)
    index = read.nonzero()[:, 1].view(len(read), -1)  # [B, m]
    if len(index) == 1:
        where = index[0]
        key, value = key.index_select(2, where), value.index_select(2, where)
        mask = None if mask is None else _last(mask, read.shape[1]).index_select(-1, where)
        return key, value, mask
    wide = index[:, None].expand(-1, key.shape[1], -1)  # [B, Hkv, m]
    key, value = gather_rows(key, wide), gather_rows(value, wide)
    if mask is None:
        return key, value, None
    mask = _last(mask, read.shape[1])
    if mask.ndim == 2:
        return key, value, mask.gather(1, index)
    mask = mask.expand(len(index), *mask.shape[1:])
    return key, value, mask.gather(-1, index[:, None, None].expand(*mask.shape[:3], -1))


def _last(mask: Tensor, size: int) -> Tensor:
    return mask[:, -size:] if mask.ndim == 2 else mask[..., :size]


def _hidden(module: nn.Module, query: Tensor, mask: Any, read: Tensor) -> Any:
    """A mask `[B, 1, L, S]` that hides the others instead."""
    seen = read[:, None, None]
    length, size = query.shape[2], read.shape[1]
    if mask is None and length > 1:
        causal = torch.ones(length, size, dtype=torch.bool, device=read.device)
        seen = seen & causal.tril(size - length)
    return hidden(module, query, mask, seen)


# Tokens of a block where no frames are known, such as those of an image cut into tiles.
BLOCK = 64
WHOLE = 10**6  # as one frame
_KINDS = {"image": 1, "video": 2, "audio": 3}
_NONE = -1


def frames_of(sequences: Sequences, block: int = BLOCK) -> Tensor:
    """A code `[B, n]` for each frame of a call, -1 where a token is no content.

    What has no frames is cut into blocks of so many tokens.
    """
    rows = len(sequences.fixed) or 1
    codes = torch.full((rows, sequences.length), _NONE)
    for item in sequences.items:
        index, size = _spread(item, block)
        codes[item.row, item.where.cpu()] = _code(item) + index // size
    return codes


def spots_of(sequences: Sequences) -> Tensor:
    """The place `[B, n]` of each token of a call in its frame, -1 where it is no content."""
    spots = torch.full((len(sequences.fixed) or 1, sequences.length), _NONE)
    for item in sequences.items:
        index, size = _spread(item, WHOLE)
        spots[item.row, item.where.cpu()] = index % size
    return spots


def _code(item: MediaItem) -> int:
    kind = "" if item.record is None else item.record.kind
    return _KINDS.get(kind, 0) * 10**12 + (item.index + 1) * 10**6


def _spread(item: MediaItem, block: int) -> tuple[Tensor, int]:
    """Places of the tokens of an item in the whole of it, and how many a frame has."""
    grid = None if item.record is None else item.record.layouts[item.index].grid
    start = 0 if item.part is None else item.part[0]
    index = torch.arange(start, start + item.n)
    if item.part is None:
        whole = item.chain[0].n if item.chain else item.n
        index = torch.arange(whole)
        for reduction in item.chain:
            index = index.index_select(0, reduction.keep.cpu())
    return index, block if grid is None else grid[1] * grid[2]


def index_blocks(layer: Any, retriever: Retriever, raw: Tensor) -> None:
    """Represent the blocks that a prompt has brought, nothing of it evicted yet.

    `raw` `[B, H, n, d]` are the keys of the last n entries before RoPE.
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


_CHOSEN = "_mmfast_chosen"  # on a cache layer: the note READ and where it says yes


@dataclass(eq=False)
class Pending:
    """State of a cache layer until the end of a prompt.

    `raw` are keys `[B, H, n, d]` of each call and `queries` `[B, Hq, T, d]` those of the calls from
    the last media on, before RoPE; `seeing` once the prompt has brought media.
    """

    raw: list[Tensor] = field(default_factory=list)
    queries: Tensor | None = None
    seeing: bool = False


class Reading:
    """The retrieval policy of one attached model; position policies say what is always read."""

    def __init__(
        self,
        plan: CachePlan,
        text: Any,
        layers: Collection[int],
        state: PassState,
        prompt: RawPrompt,
    ) -> None:
        self._retriever: Retriever = plan.retriever()
        self._plan, self._text, self._layers, self._state = plan, text, layers, state
        self._prompt = prompt

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Intercept the attention of the layers."""
        with replacing({i: attention_at(self._text, i) for i in self._layers}, self._read):
            yield

    @property
    def _prompting(self) -> bool:
        return self._state.active and self._state.part is not None

    def arrive(self, layer: Any, sequences: Sequences, keys: Tensor, queries: Tensor) -> None:
        """Behind a layer that has stored a part of a prompt; its notes are up to date.

        Keys and queries of the part are those before RoPE.
        """
        codes = frames_of(sequences).to(keys.device)
        mark(layer, FRAME, codes)
        layer.pending = pending = layer.pending or Pending()
        pending.raw.append(keys)
        here = bool((codes >= 0).any())
        before = None if here else pending.queries
        pending.queries = queries if before is None else torch.cat([before, queries], 2)
        pending.seeing |= here

    def prompt_ends(self, layer: Any, drafts: int) -> None:
        """Index what came, and choose what is read from here on."""
        pending: Pending = layer.pending
        layer.pending = None
        index_blocks(layer, self._retriever, torch.cat(pending.raw, 2))
        kinds = layer.notes[KIND][:, 0]
        assert pending.queries is not None
        asked, stop = pending.queries, kinds.shape[1] - drafts
        places = [_question(mine[kinds.shape[1] - asked.shape[2] : stop]) for mine in kinds]
        self._choose(layer, [asked[b].index_select(1, mine) for b, mine in enumerate(places)])

    def together(
        self, sequences: Sequences, kinds: Tensor, raw: Sequence[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """Return the places `[m]` that each layer of a prompt of one row reads from its end on.

        `raw` are keys and queries `[1, H, n, d]` before RoPE by layer, `kinds` `[n]` its tokens'.
        """
        codes = frames_of(sequences)[0].to(kinds.device)
        where = ((codes != _NONE) & (kinds == VISUAL)).nonzero()[:, 0]
        question, stays, found = _question(kinds), kinds != VISUAL, list[Tensor]()
        if self._plan.position:
            stays = stays | self._plan.standing(kinds.long())
        for keys, queries in raw:
            index, owner = _more(None, self._retriever, keys[0], where, codes)
            read = torch.ones_like(stays)
            if index is not None:
                chosen = self._retriever.choose(queries[0].index_select(1, question), index)
                read[where] = chosen.to(read.device)[owner] | stays[where]
            found.append(read.nonzero()[:, 0])
        return found

    def _choose(self, layer: Any, queries: list[Tensor]) -> None:
        """Choose what is read from here on, by the queries `[Hq, T, d]` of each row."""
        notes = fill(layer)
        kinds, clusters = notes[KIND][:, 0], notes[CLUSTER][:, 0]
        read = torch.ones(clusters.shape, dtype=torch.bool, device=clusters.device)
        for b, found in enumerate(layer.per_row["index"]):
            if found is None:
                continue
            chosen = self._retriever.choose(queries[b], found).to(read.device)
            read[b] = (clusters[b] < 0) | chosen[clusters[b].clamp_min(0)]
            if self._plan.position:
                real = (kinds[b] != PADDING).nonzero()[:, 0]
                read[b, real] |= self._plan.standing(kinds[b, real].long())
        rest = {name: note for name, note in notes.items() if name != READ}
        # Where everything is read the layer is as stock as ever.
        layer.notes = rest if bool(read.all()) else {**rest, READ: read[:, None]}

    def _read(
        self, index: int, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any
    ) -> tuple[Tensor, Tensor, Any]:
        raw, prompting = self._prompt.raw, self._prompting
        layers = () if self._state.cache is None else self._state.cache.layers
        layer = layers[index] if index < len(layers) else None
        if layer is not None and is_short(layer) and layer.per_row:
            pending = layer.pending or Pending()
            if not prompting and mask is None and len(key) == 1:
                key, value = as_chosen(layer, key, value)
            elif not prompting or not (pending.seeing or self._state.has_media):
                if prompting and raw is not None:
                    self._choose(layer, list(raw.queries[index]))
                read = fill(layer).get(READ)
                if read is not None:
                    key, value, mask = parted(module, query, key, value, mask, read[:, 0])
        return key, value, mask


def chosen(layer: Any) -> Tensor | None:
    """Places `[m]` of the entries of one conversation that are read; None where all are."""
    read = layer.notes.get(READ)
    if read is None:
        return None
    known: tuple[Tensor, Tensor] | None = layer.__dict__.get(_CHOSEN)
    if known is None or known[0] is not read:
        known = layer.__dict__[_CHOSEN] = (read, read[0, 0].nonzero()[:, 0])
    return known[1]


def as_chosen(layer: Any, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Entries that a decode step of one conversation reads: the chosen ones, and all newer ones.

    This needs no notes that are up to date, so they are not filled at every step.
    """
    where = chosen(layer)
    if where is None:
        return key, value
    new = torch.arange(layer.notes[READ].shape[-1], key.shape[2], device=where.device)
    where = torch.cat([where, new]).to(key.device)
    return key.index_select(2, where), value.index_select(2, where)


def read_of(layer: Any) -> Tensor:
    """Number of entries of each row that are read, `[B]`."""
    notes = fill(layer)
    real = notes[KIND][:, 0] != PADDING
    return (real & notes[READ][:, 0] if READ in notes else real).sum(1)


def _question(kinds: Tensor) -> Tensor:
    """Places of the text behind the last visual token, at least of the last token: `[T]`."""
    real = (kinds != PADDING).nonzero()[:, 0]
    visual = (kinds == VISUAL).nonzero()[:, 0]
    behind = real if not len(visual) else real[real > visual[-1]]
    return behind if len(behind) else real[-1:]
