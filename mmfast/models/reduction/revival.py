"""Tokens that cuts dropped and a later step may call back (LazyLLM).

A dropped token leaves its hidden state behind, on the cache layer of the cut. The layer before the
cut has the keys of all tokens that came so far, so each decode step ranks them again; what ranks
within the budget and is not there yet runs through the layers behind beside the new token, at its
own position, and sees only what stands before it. At the next cut it is ranked once more, and goes
on or leaves its state there.

Rows of a batch call back different numbers of tokens: padding stands in front, hidden from all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from mmfast.core.errors import ModelError
from mmfast.core.trace import Trace
from mmfast.models.cache_name import cache_of
from mmfast.models.patching import CANDIDATES, override
from mmfast.models.reduction.cache_layers import held
from mmfast.models.reduction.probe import last_query_scores, probing
from mmfast.models.reduction.sequence import MediaItem
from mmfast.models.wrappers import attention_at
from mmfast.ops.ranking import stable_topk

NOBODY = -1  # time of padding


@dataclass(frozen=True)
class DroppedTokens:
    """Tokens of one row that left at a cut; times are places among the keys before the first cut.

    Of each token there are its time in `times` `[n]`, its input `hidden` `[n, D]` to the layer of
    the cut and its position `embeddings` `[n, d]`. `items` has per image, video or prompt the times
    of all its tokens `[N]`, and how many may be there; `present` `[P]` the times of the entries of
    the cache layer, in the order they were stored.
    """

    times: Tensor
    hidden: Tensor
    embeddings: tuple[Tensor, ...]
    items: list[tuple[Tensor, int]]
    present: Tensor

    def join(self, other: DroppedTokens) -> DroppedTokens:
        """Join with the tokens that a later turn dropped; `present` is that of the later turn."""
        more = self.add(other.times, other.hidden, other.embeddings)
        return replace(more, items=self.items + other.items, present=other.present)

    def add(self, times: Tensor, hidden: Tensor, embeddings: Sequence[Tensor]) -> DroppedTokens:
        """Store further tokens."""
        pairs = zip(self.embeddings, embeddings, strict=True)
        return replace(
            self,
            times=torch.cat([self.times, times]),
            hidden=torch.cat([self.hidden, hidden]),
            embeddings=tuple(torch.cat(pair) for pair in pairs),
        )

    def arrive(self, times: Tensor) -> DroppedTokens:
        """Note what has come into the cache layer."""
        return replace(self, present=torch.cat([self.present, times.to(self.present.device)]))

    def fit(self, length: int, before: int) -> DroppedTokens:
        """Follow a cache that was cropped to `length` entries at the cut, `before` in front of it.

        ModelError where the cache holds tokens that this store has not seen.
        """
        if len(self.present) == length:
            return self
        present = self.present[:length]
        if len(present) < length or bool((present >= before).any()):
            raise ModelError(
                "this cache was changed in a way that lazyllm cannot follow; continue it inside "
                "the same attach(), and crop no further back than the last token"
            )
        return replace(self, present=present)

    def wanted(self, scores: Tensor) -> Tensor:
        """Stored tokens that rank within the budget and are absent, by `scores` `[T]` of times.

        A score of -inf is that of a token which has not come so far.
        """
        best = [times[stable_topk(scores[times], count)] for times, count in self.items]
        missing = torch.isin(self.times, torch.cat(best)) & ~torch.isin(self.times, self.present)
        return (missing & scores[self.times].isfinite()).nonzero()[:, 0]


class Leaving:
    """The tokens `[B, n]` at a cut before it is made; `times` is `NOBODY` at padding.

    `all_times` are those of every item before the first cut. ModelError for part of a prompt.
    """

    def __init__(
        self,
        items: Sequence[MediaItem],
        hidden: Tensor,
        embeddings: Sequence[Tensor],
        times: Tensor,
        all_times: Sequence[Tensor],
    ) -> None:
        if any(item.part is not None for item in items):
            raise ModelError(
                "lazyllm ranks a prompt in one piece; leave out prefill_chunk_size, or use fastv"
            )
        self._items, self._where = items, [item.where for item in items]
        self._hidden, self._times, self._all = hidden, times, all_times
        self._embeddings = [each.expand(len(hidden), -1, -1) for each in embeddings]

    def store(self, times: Tensor) -> list[DroppedTokens]:
        """Store, row by row, all tokens but those left, of which `times` `[B, m]` are known."""
        found = []
        for b, left in enumerate(times):
            mine = [i for i, item in enumerate(self._items) if item.row == b]
            places = torch.cat([self._where[i] for i in mine] or [left[:0]])
            gone = places[~torch.isin(self._times[b, places], left)]
            items = [(self._all[i], self._items[i].n) for i in mine]
            states = tuple(each[b, gone] for each in self._embeddings)
            own = DroppedTokens(self._times[b, gone], self._hidden[b, gone], states, items, left)
            found.append(own)
        return found


def keep_store(
    cache: Any, layer: int, left: Leaving | None, times: Tensor, before: int, length: int
) -> None:
    """Update the store on the cache layer of a cut for several new tokens.

    The layers before the first cut hold these `length` tokens already, and `before` earlier ones;
    `left` is None where the cut was not made, `times` `[B, m]` are those of the tokens that stay.
    ModelError for a cache layer that cannot grow out of order.
    """
    mine = cache.layers[layer]
    old: list[DroppedTokens] | None = getattr(mine, "store", None)
    if left is None and old is None:
        return
    if not isinstance(mine, DynamicLayer) or mine.is_sliding:
        raise ModelError(
            f"lazyllm puts tokens back into the cache, and layer {layer} is a "
            f"{type(mine).__name__}; use the default DynamicCache, or fastv"
        )
    stored = held(mine)
    if old is None and stored != before:
        raise ModelError("this cache was reduced before; lazyllm needs one that it began itself")
    if old is not None and (len(old) > 1 or len(times) > 1):
        raise ModelError(
            "lazyllm goes on with one row at a time; start each conversation of a batch anew, or "
            "use fastv"
        )
    old = old and [row.fit(stored, before) for row in old]
    if left is None:
        assert old is not None
        mine.store = [row.arrive(times[0]) for row in old]
        return
    new = left.store(times)
    if old is None:
        past = torch.arange(stored, device=times.device)
        mine.store = [replace(row, present=torch.cat([past, row.present])) for row in new]
    else:
        mine.store = [
            replace(a.join(b), present=a.arrive(b.present).present)
            for a, b in zip(old, new, strict=True)
        ]


@dataclass
class _Back:
    """Tokens that come back in this step beside the new one, `times` `[B, R]`."""

    times: Tensor
    embeddings: tuple[Tensor, ...]
    mask: Tensor | None

    @property
    def count(self) -> int:
        return int(self.times.shape[1])


@contextmanager
def told_of_drafts(model: Any, trace: Trace) -> Iterator[None]:
    """Warn once where `generate` verifies drafts of stock transformers on a model that revives."""
    note = (
        "lazyllm brings tokens back in calls of one token, and drafts are verified several at "
        "once: the answer may differ from that of greedy decoding; leave out the draft "
        "(assistant_model, prompt_lookup_num_tokens)"
    )

    def draft(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trace.warn(note)
        return stock(*args, **kwargs)

    if not hasattr(model, CANDIDATES):
        yield
        return
    with override(model, CANDIDATES, draft):
        yield


class _RevivalState(threading.local):
    stack: ExitStack | None = None
    scores: Tensor | None = None
    back: _Back | None = None


class Reviver:
    """Decode steps of a model with reviving cuts; those that revive get a row in the trace."""

    def __init__(self, layers: Collection[int], text: Any, trace: Trace) -> None:
        self._cuts, self._text, self._trace = sorted(layers), text, trace
        self._additive = text.config._attn_implementation == "eager"
        self._local = _RevivalState()

    def before(self, index: int, module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return the input of a layer with the tokens that come back, `[B, R + 1, D]`, or None."""
        cache: Any = cache_of(kwargs)
        first = self._cuts[0]
        if index < first - 1 or cache is None or len(cache.layers) <= first:
            return None
        if getattr(cache.layers[first], "store", None) is None:
            return None
        if index == first - 1:
            before = held(cache.layers[index])
            for layer in (cache.layers[cut] for cut in self._cuts):
                layer.store = [row.fit(held(layer), before) for row in layer.store]
        elif index in self._cuts:
            hidden = self._choose(index, cache, hidden, kwargs["position_embeddings"])
        if index + 1 in self._cuts:
            self._watch(index)
        back = self._local.back
        if back is None:
            return None
        cache.layers[index].dropped -= back.count
        kwargs["position_embeddings"], kwargs["attention_mask"] = back.embeddings, back.mask
        kwargs["position_ids"] = None
        return hidden

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the last decoder layer: only the new token goes on."""
        if self._local.back is None:
            return None
        self._local.back = None
        if isinstance(output, tuple):
            return (output[0][:, -1:], *output[1:])
        return output[:, -1:]

    def close(self) -> None:
        """The step has ended, perhaps with an exception."""
        self._unwatch()
        self._local.back = None

    def _unwatch(self) -> None:
        local = self._local
        if local.stack is not None:
            local.stack.close()
        local.stack, local.scores = None, None

    def _watch(self, index: int) -> None:
        self._unwatch()

        def look(owner: Reviver, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            if owner._local.stack is not None:  # else another thread's step
                owner._local.scores = last_query_scores(q, k, rest[0], rest[1])

        self._local.stack = ExitStack()
        self._local.stack.enter_context(
            probing({attention_at(self._text, index): partial(look, self)})
        )

    def _scores(self, cut: int, cache: Any, now: int) -> Tensor:
        """Attention `[B, T]` of the new token by time, -inf for what has not come to this cut."""
        seen = self._local.scores
        assert seen is not None
        if cut == self._cuts[0]:
            return seen
        before = self._cuts[self._cuts.index(cut) - 1]
        scores = seen.new_full((len(seen), now + 1), -torch.inf)
        for row, store, own in zip(scores, cache.layers[before].store, seen, strict=True):
            real = store.present != NOBODY
            row[store.present[real]] = own[real]
        return scores

    def _choose(self, cut: int, cache: Any, hidden: Tensor, embeddings: Any) -> Tensor:
        """Rank the tokens at a cut; returns the input of its layer, and sets `back`."""
        start, now = time.perf_counter(), held(cache.layers[self._cuts[0] - 1]) - 1
        layer, back = cache.layers[cut], self._local.back
        scores = self._scores(cut, cache, now)
        self._unwatch()
        rows, chosen = list(layer.store), []
        for b, row in enumerate(rows):
            if back is not None:  # what came back to the layers before
                live = back.times[b] != NOBODY
                states = tuple(each[b, :-1][live] for each in back.embeddings)
                rows[b] = row = row.add(back.times[b][live], hidden[b, :-1][live], states)
            chosen.append(row.wanted(scores[b]))
        most, total = max(map(len, chosen)), sum(map(len, chosen))
        new = torch.tensor([now], device=hidden.device)
        times = torch.stack(
            [
                F.pad(r.times[c], (most - len(c), 0), value=NOBODY)
                for r, c in zip(rows, chosen, strict=True)
            ]
        )
        layer.store = [
            row.arrive(torch.cat([mine, new])) for row, mine in zip(rows, times, strict=True)
        ]
        present = torch.stack([row.present for row in layer.store])
        one = [each.expand(len(hidden), -1, -1)[:, -1:] for each in embeddings]
        joined = [
            _beside([r.embeddings[i][c] for r, c in zip(rows, chosen, strict=True)], most, each)
            for i, each in enumerate(one)
        ]
        back_again = [r.hidden[c] for r, c in zip(rows, chosen, strict=True)]
        self._local.back = _Back(times, tuple(joined), self._mask(times, present, now, hidden))
        if total:
            ms = (time.perf_counter() - start) * 1e3
            self._trace.add("revive", sum(len(row.times) for row in rows), total, ms)
        return _beside(back_again, most, hidden[:, -1:])

    def _mask(self, times: Tensor, present: Tensor, now: int, hidden: Tensor) -> Tensor | None:
        """Mask `[B, 1, R + 1, P]`: a token sees what stands before it; None if that is all."""
        real = present != NOBODY
        if not times.shape[1] and bool(real.all()):
            return None
        at = F.pad(times.masked_fill(times == NOBODY, now), (0, 1), value=now)
        mask = ((present[:, None] <= at[:, :, None]) & real[:, None])[:, None]
        if not self._additive:
            return mask
        zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
        return zeros.masked_fill(~mask, torch.finfo(hidden.dtype).min)


def _beside(rows: Sequence[Tensor], most: int, new: Tensor) -> Tensor:
    """Rows `[r, D]` with padding up to `most` in front, and `new` `[B, 1, D]` behind."""
    padded = [F.pad(row, (0, 0, most - len(row), 0)) for row in rows]
    return torch.cat([torch.stack(padded), new], 1)
