"""Signals of a decoder layer: attention and keys of its tokens, for the site before the next one.

Only the attention rows that a signal asks for are recomputed, a chunk at a time, in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.models.reduction.probe import head_mass, last_query_scores, rows_of
from mmfast.models.reduction.sequence import MediaItem, Sequences

# Signals of a decoder layer about the visual tokens that it saw.
_OF_TEXT = {"attn_text", "attn_peak", "attn_mutual"}
_OF_KEYS = {"key_norm", "text_key_norm", "key_mean", "values", "text_values"}
# Rotary angles at the cut itself: mean cosine and mean sine of each token, see `angles`.
ROPE = "rope"
INNER = frozenset({"attn", "attn_window", "attn_visual", *_OF_TEXT, ROPE, *_OF_KEYS})
# Change of a token's hidden state in the layer before the cut, see `drift`.
DRIFT = "drift"
# Attention as `attn`, of the layer with attention before that one.
BEFORE = "attn_before"
# Signal of a look ahead, a pass over the first layers before layer 0.
AHEAD = "attn_ahead"
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

    def rows(self, row: int, places: Tensor) -> Iterator[Tensor]:
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
        own tokens, `attn_text` `[n, T]` from each text token (0 where it stands before the item).
        These are means over heads, softmax over the full row. `attn_peak` `[n]` is the most that
        any head of a text token pays; `attn_mutual` `[n]` adds up over heads what the text behind
        the item pays, each token of it weighted by what it gives to that text and gets from it.
        `key_norm` `[n]` and `text_key_norm` `[T]` are the
        L1 norms of keys, `key_mean` `[n, d]` is the mean of keys over heads, `values` `[n, Hkv *
        d]` and `text_values` `[T, Hkv, d]` are the values that belong to them. Text signals are
        left out where there is no text.
    """
    items = sequences.items if items is None else items
    found: list[dict[str, Tensor]] = [{} for _ in items]
    last = _last_rows(sequences, seen) if "attn" in needs else None
    for item, signals in zip(items, found, strict=True):
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
        if len(text):
            signals |= {name: _FROM_TEXT[name](seen, item, text) for name in _OF_TEXT & set(needs)}
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


def _given(seen: LayerAttention, item: MediaItem, text: Tensor) -> Tensor:
    """Return what each text token gives an item, mean over heads, `[n, T]`."""
    where = (item.where + seen.start).to(seen.key.device)
    rows = [part.mean(0).index_select(1, where) for part in seen.rows(item.row, text)]
    return torch.cat(rows).T


def text_peak(seen: LayerAttention, item: MediaItem, text: Tensor) -> Tensor:
    """Return the most that any head of a text token gives an item's tokens, `[n]`."""
    where = (item.where + seen.start).to(seen.key.device)
    parts = [part.amax((0, 1)).index_select(0, where) for part in seen.rows(item.row, text)]
    return torch.stack(parts).amax(0)


def mutual(seen: LayerAttention, item: MediaItem, text: Tensor) -> Tensor:
    """Return what text behind an item gives it, each token weighted in each head, `[n]`.

    The weight of a token is the attention it gives to that text, and what it gets of the others.
    """
    text = text[text > item.where.max()] if item.n else text
    device = seen.key.device
    where, words = (item.where + seen.start).to(device), (text + seen.start).to(device)
    weight = torch.zeros(seen.query.shape[1], len(text), device=device)
    at = 0
    for part in seen.rows(item.row, text):
        square = part.index_select(2, words)  # [H, c, T]
        own = slice(at, at := at + square.shape[1])
        weight[:, own] += square.sum(2) - square[:, :, own].diagonal(dim1=1, dim2=2)
        weight += square.sum(1)
    found, at = torch.zeros(item.n, device=device), 0
    for part in seen.rows(item.row, text):
        own = slice(at, at := at + part.shape[1])
        found += (weight[:, own, None] * part.index_select(2, where)).sum((0, 1))
    return found


_FROM_TEXT = {"attn_text": _given, "attn_peak": text_peak, "attn_mutual": mutual}


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
    # Padded on the right, or with drafts behind the prompt; a row of padding alone, as in a chunk
    # before a short row begins, has no item that asks for its zeros.
    found = torch.zeros(len(seen.key), seen.key.shape[2], device=seen.key.device)
    for row in range(len(seen.query)):
        if len(last := sequences.real(row)[-1:]):
            (weights,) = seen.rows(row, last)
            found[row] = weights.mean(0)[0]
    return found
