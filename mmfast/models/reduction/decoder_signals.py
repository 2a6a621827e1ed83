"""Signals of a decoder layer: attention and keys of its tokens, for the site before the next one.

Only the attention rows that a signal asks for are recomputed, a chunk at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.models.reduction.probe import head_mass, last_query_scores, rows_of
from mmfast.models.reduction.sequence import MediaItem, Sequences

# Signals of a decoder layer about the visual tokens that it saw.
_OF_KEYS = {"key_norm", "text_key_norm", "key_mean", "values", "text_values"}
# Rotary angles at the cut itself: mean cosine and mean sine of each token, see `angles`.
ROPE = "rope"
INNER = frozenset({"attn", "attn_window", "attn_visual", "attn_text", "text_attn", ROPE, *_OF_KEYS})
# Change of a token's hidden state in the layer before the cut, see `drift`.
DRIFT = "drift"
# Attention as `attn`, of the layer with attention before that one.
BEFORE = "attn_before"
# Signal of a look ahead, a pass over the first layers before layer 0.
AHEAD = "attn_ahead"
_OF_TEXT = {"attn_text", "text_attn"}
WINDOWED = frozenset({"attn_window"})  # signals of the last queries

# Queries at the end of the prompt that FastKV looks through.
WINDOW = 8


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one decoder layer, as its attention function got it.

    Queries `[B, H, L, d]` are rotated, keys `[B, Hkv, S, d]` include the cached ones; the cache
    layer `held` so many tokens before. `causal` applies where there is no mask. Values are those of
    the keys, `[B, Hkv, S, d]`, where the caller has them.
    """

    query: Tensor
    key: Tensor
    mask: Any
    scaling: float | None
    causal: bool
    held: int
    value: Tensor | None = None

    @property
    def start(self) -> int:
        """Place of the first new token among the keys."""
        return min(self.held, self.key.shape[2] - self.query.shape[2])

    def rows(self, row: int, places: Tensor) -> Any:
        """Attention rows of the queries at `places` in a batch row; see `rows_of`."""
        q, k = self.query, self.key
        return rows_of(q, k, row, places.to(q.device), self.mask, self.scaling, self.causal)

    def key_norm(self, row: int, keys: Tensor) -> Tensor:
        """`[len(keys)]` float32: sum of the absolute values of new keys, over all heads."""
        columns = (keys + self.start).to(self.key.device)
        return self.key[row].index_select(1, columns).float().abs().sum((0, 2))

    def key_mean(self, row: int, keys: Tensor) -> Tensor:
        """`[len(keys), d]` float32: new keys, mean over heads."""
        columns = (keys + self.start).to(self.key.device)
        return self.key[row].index_select(1, columns).float().mean(0)

    def values(self, row: int, keys: Tensor) -> Tensor:
        """`[len(keys), Hkv, d]`: values of new tokens."""
        assert self.value is not None
        columns = (keys + self.start).to(self.value.device)
        return self.value[row].index_select(1, columns).transpose(0, 1)

    def mean(self, row: int, queries: Tensor, keys: Tensor) -> Tensor:
        """`[len(keys)]`: attention of new tokens to new tokens, mean over the queries."""
        columns = (keys + self.start).to(self.key.device)
        q, k, places = self.query, self.key, queries.to(self.query.device)
        mass = head_mass(q, k, row, places, self.mask, self.scaling, self.causal)
        return mass.mean(0).index_select(0, columns) / max(1, len(queries))


def inner_signals(
    needs: Collection[str],
    sequences: Sequences,
    seen: LayerAttention,
    items: Sequence[MediaItem] | None = None,
) -> list[dict[str, Tensor]]:
    """The signals `needs` for every item, from the attention of one decoder layer.

    The items are those of the sequences where none are given.

    Returns:
        Per item, of n tokens in a row of T text tokens: `attn` `[n]` from the last query of the
        row, `attn_window` `[n]` mean over its last 8, `attn_visual` `[n]` mean over the item's
        own tokens, `attn_text` `[n, T]` from each text token (0 where it stands before the item),
        `text_attn` `[T]` what each text token receives from those that may see it. These are means
        over heads, softmax over the full row. `key_norm` `[n]` and `text_key_norm` `[T]` are the
        L1 norms of keys, `key_mean` `[n, d]` is the mean of keys over heads, `values` `[n, Hkv *
        d]` and `text_values` `[T, Hkv, d]` are the values that belong to them. Text signals are
        left out where there is no text.
    """
    items = sequences.items if items is None else items
    found: list[dict[str, Tensor]] = [{} for _ in items]
    last = _last_rows(sequences, seen) if "attn" in needs else None
    texts: dict[int, dict[int, dict[str, Tensor]]] = {}
    for number, (item, signals) in enumerate(zip(items, found, strict=True)):
        if last is not None:
            columns = (item.where + seen.start).to(last.device)
            signals["attn"] = last[item.row].index_select(0, columns)
        if "attn_window" in needs:
            window = sequences.real(item.row)[-WINDOW:]
            signals["attn_window"] = seen.mean(item.row, window, item.where)
        if "attn_visual" in needs:
            signals["attn_visual"] = seen.mean(item.row, item.where, item.where)
        text = sequences.text[item.row]
        signals |= _of_keys(needs, item, text, seen)
        if _OF_TEXT & set(needs) and len(text):
            if item.row not in texts:
                texts[item.row] = _of_text(needs, sequences, item.row, seen)
            signals |= texts[item.row][number]
    return found


def _of_keys(
    needs: Collection[str], item: MediaItem, text: Tensor, seen: LayerAttention
) -> dict[str, Tensor]:
    """Return what keys and values say by themselves, of one item and the text of its row."""
    found: dict[str, Tensor] = {}
    if "key_norm" in needs:
        found["key_norm"] = seen.key_norm(item.row, item.where)
    if "text_key_norm" in needs and len(text):
        found["text_key_norm"] = seen.key_norm(item.row, text)
    if "key_mean" in needs:
        found["key_mean"] = seen.key_mean(item.row, item.where)
    if "values" in needs and seen.value is not None:
        found["values"] = seen.values(item.row, item.where).flatten(1)
    if "text_values" in needs and seen.value is not None and len(text):
        found["text_values"] = seen.values(item.row, text)
    return found


def angles(embeddings: Sequence[Tensor], item: MediaItem) -> Tensor:
    """Mean cosine and sine `[n, 2]` of an item's rotary angles, over channels and axes.

    `embeddings` are cosines and sines `[..., B or 1, L, d]`, with an axis of positions in front
    where a model rotates by frames, rows and columns.
    """
    means = []
    for each in embeddings:
        row = each.select(-3, min(item.row, each.shape[-3] - 1))  # [..., L, d]
        mean = row.index_select(-2, item.where.to(row.device)).float().mean(-1)
        means.append(mean.reshape(-1, item.n).mean(0))
    return torch.stack(means, 1)


def drift(before: Tensor, after: Tensor) -> Tensor:
    """Return how far tokens `[n, D]` moved in a layer over their length before it, `[n]`."""
    length = before.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    change: Tensor = (after.float() - before.float()).norm(dim=-1) / length
    return change


def _of_text(
    needs: Collection[str], sequences: Sequences, row: int, seen: LayerAttention
) -> dict[int, dict[str, Tensor]]:
    """Text signals of all items of a batch row, in one pass over its text."""
    text = sequences.text[row]
    mine: dict[int, MediaItem] = {
        number: item for number, item in enumerate(sequences.items) if item.row == row
    }
    device = seen.key.device
    columns = (text + seen.start).to(device)
    places = {number: (item.where + seen.start).to(device) for number, item in mine.items()}
    parts: dict[int, list[Tensor]] = {number: [] for number in mine}
    received = torch.zeros(len(text), device=device)
    viewers = torch.zeros(len(text), device=device)
    for weights, visible in seen.rows(row, text):  # [c, S]
        received += weights.index_select(1, columns).sum(0)
        viewers += visible.index_select(1, columns).expand(len(weights), -1).sum(0)
        for number, where in places.items() if "attn_text" in needs else ():
            parts[number].append(weights.index_select(1, where))
    shared = {"text_attn": received / viewers.clamp_min(1)} if "text_attn" in needs else {}
    return {
        number: {**shared, "attn_text": torch.cat(rows).T} if rows else dict(shared)
        for number, rows in parts.items()
    }


def last_products(sequences: Sequences, seen: LayerAttention, item: MediaItem) -> Tensor:
    """Products `[n]` float32 of the last query of an item's row with its keys, sum over heads."""
    place = -1 if _in_front(sequences) else int(sequences.real(item.row)[-1])
    key = seen.key[item.row].index_select(1, (item.where + seen.start).to(seen.key.device))
    query = seen.query[item.row, :, place].float().unflatten(0, (len(key), -1)).sum(1)  # [Hkv, d]
    with torch.autocast(key.device.type, enabled=False):  # float32 also under a caller's bf16
        products: Tensor = (key.float() @ query[..., None]).sum((0, 2))
    return products


def _in_front(sequences: Sequences) -> bool:
    """Return True where the last query of every row is the last of all."""
    return not sequences.drafts and (sequences.ok is None or bool(sequences.ok[:, -1].all()))


def _last_rows(sequences: Sequences, seen: LayerAttention) -> Tensor:
    if _in_front(sequences):
        return last_query_scores(seen.query, seen.key, seen.mask, seen.scaling)
    rows = []
    for row in range(len(seen.query)):  # padded on the right, or with drafts behind the prompt
        ((weights, _),) = seen.rows(row, sequences.real(row)[-1:])
        rows.append(weights[0])
    return torch.stack(rows)
