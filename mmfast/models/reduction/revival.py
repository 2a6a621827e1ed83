"""Tokens that a cut dropped and a later step may call back (LazyLLM).

A dropped token leaves its hidden state behind, on the cache layer of the cut. The layer before the
cut has the keys of every token, so each decode step ranks all of them again; what ranks within the
budget and is not there yet runs through the deeper layers beside the new token, at its own
position, and sees only what stands before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from mmfast.core.errors import ModelError
from mmfast.core.trace import Trace
from mmfast.models.reduction.cache_layers import held
from mmfast.models.reduction.probe import last_query_scores, probing
from mmfast.models.reduction.sequence import MediaItem
from mmfast.ops.ranking import stable_topk


@dataclass
class DroppedTokens:
    """Tokens that left at a cut of one cache; times are places among the keys of the layer before.

    Of each token there are its time in `times` `[n]`, its input `hidden` `[n, D]` to the layer of
    the cut and its position `embeddings` `[n, d]`. `items` has per image or video the times of all
    its tokens `[N]`, and how many may be there; `present` `[P]` the times of the tokens in the
    cache layer, in the order they were stored.
    """

    times: Tensor
    hidden: Tensor
    embeddings: tuple[Tensor, ...]
    items: list[tuple[Tensor, int]]
    present: Tensor

    def join(self, other: DroppedTokens) -> DroppedTokens:
        """Join with the tokens that a later turn dropped; `present` is that of the later turn."""
        return DroppedTokens(
            torch.cat([self.times, other.times]),
            torch.cat([self.hidden, other.hidden]),
            tuple(torch.cat(pair) for pair in zip(self.embeddings, other.embeddings, strict=True)),
            self.items + other.items,
            other.present,
        )

    def fit(self, length: int, before: int) -> None:
        """Follow a cache that was cropped to `length` tokens at the cut, `before` in front of it.

        ModelError where the cache holds tokens that this store has not seen.
        """
        if len(self.present) == length:
            return
        self.present = self.present[:length]
        if len(self.present) < length or bool((self.present >= before).any()):
            raise ModelError(
                "this cache was changed in a way that lazyllm cannot follow; continue it inside "
                "the same attach(), and crop no further back than the last token"
            )

    def wanted(self, scores: Tensor) -> Tensor:
        """Dropped tokens that rank within the budget and are absent, by `scores` `[S]`."""
        best = [times[stable_topk(scores[times], count)] for times, count in self.items]
        missing = torch.isin(self.times, torch.cat(best)) & ~torch.isin(self.times, self.present)
        return missing.nonzero()[:, 0]


class Leaving:
    """The tokens at a cut before it is made.

    ModelError for several rows, padding, or part of a prompt.
    """

    def __init__(
        self,
        items: Sequence[MediaItem],
        hidden: Tensor,
        embeddings: Sequence[Tensor],
        *padding: Any,
    ) -> None:
        padded = any(each is not None for each in padding)
        if len(hidden) > 1 or padded or any(item.part is not None for item in items):
            raise ModelError(
                "lazyllm serves one row without padding, prefilled in one piece; call it with a "
                "batch of one, without beams and prefill_chunk_size, or use fastv"
            )
        self._items, self._where = items, [item.where for item in items]
        self._hidden, self._embeddings = hidden[0], [each[0] for each in embeddings]

    def store(self, order: Tensor, start: int) -> DroppedTokens:
        """Store all tokens but those left, `order` `[m]`; the call's first one has time `start`."""
        places = torch.cat(self._where)
        gone = places[~torch.isin(places, order)]
        now = zip(self._where, self._items, strict=True)
        return DroppedTokens(
            gone + start,
            self._hidden[gone],
            tuple(each[gone] for each in self._embeddings),
            [(mine + start, item.n) for mine, item in now],
            order + start,
        )


def keep_store(
    cache: Any, layer: int, left: Leaving | None, order: Tensor | None, length: int
) -> None:
    """Update the store on the cache layer of a cut for several new tokens.

    The layer before the cut holds these `length` tokens already; `left` is None where the cut was
    not made, and `order` `[1, m]` has the previous places of the tokens that stay, if any has left.
    ModelError for a cache layer that cannot grow out of order.
    """
    mine = cache.layers[layer]
    old: DroppedTokens | None = getattr(mine, "store", None)
    if left is None and old is None:
        return
    if not isinstance(mine, DynamicLayer) or mine.is_sliding:
        raise ModelError(
            f"lazyllm puts tokens back into the cache, and layer {layer} is a "
            f"{type(mine).__name__}; use the default DynamicCache, or fastv"
        )
    start, stored = held(cache.layers[layer - 1]) - length, held(mine)
    if old is None and stored != start:
        raise ModelError("this cache was reduced before; lazyllm needs one that it began itself")
    if old is not None:
        old.fit(stored, start)
    if left is None or order is None:
        assert old is not None
        arrived = torch.arange(start, start + length, device=old.present.device)
        old.present = torch.cat([old.present, arrived])
        return
    new = left.store(order[0], start)
    past = torch.arange(stored, device=new.present.device) if old is None else old.present
    new.present = torch.cat([past, new.present])
    mine.store = new if old is None else old.join(new)


@dataclass
class _Back:
    """Tokens that come back in this step, beside the new one."""

    count: int
    embeddings: tuple[Tensor, ...]
    mask: Tensor


class _RevivalState(threading.local):
    stack: ExitStack | None = None
    scores: Tensor | None = None
    back: _Back | None = None


class Reviver:
    """Decode steps of a model with a reviving cut; those that revive get a row in the trace."""

    def __init__(self, layer: int, text: Any, trace: Trace) -> None:
        self._layer, self._text, self._trace = layer, text, trace
        self._additive = text.config._attn_implementation == "eager"
        self._local = _RevivalState()

    def before(self, index: int, module: Any, hidden: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return the input of a layer with the tokens that come back, `[1, R + 1, D]`, or None."""
        cache: Any = kwargs.get("past_key_values")
        if index < self._layer - 1 or cache is None or len(cache.layers) <= self._layer:
            return None
        store: DroppedTokens | None = getattr(cache.layers[self._layer], "store", None)
        if store is None:
            return None
        if index == self._layer - 1:
            store.fit(held(cache.layers[self._layer]), held(cache.layers[index]))
            self._watch(module)
            return None
        if index == self._layer:
            hidden = self._choose(store, cache, hidden, kwargs["position_embeddings"])
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
        local = self._local
        if local.stack is not None:
            local.stack.close()
        local.stack, local.scores, local.back = None, None, None

    def _watch(self, module: Any) -> None:
        self.close()

        def look(owner: Reviver, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
            if owner._local.stack is not None:  # else another thread's step
                owner._local.scores = last_query_scores(q, k, rest[0], rest[1])[0]

        self._local.stack = ExitStack()
        self._local.stack.enter_context(probing({module.self_attn: partial(look, self)}))

    def _choose(self, store: DroppedTokens, cache: Any, hidden: Tensor, embeddings: Any) -> Tensor:
        scores = self._local.scores
        self.close()
        assert scores is not None
        chosen = store.wanted(scores)
        now = torch.tensor([held(cache.layers[self._layer - 1]) - 1], device=hidden.device)
        arrived = torch.cat([store.times[chosen], now])
        store.present = torch.cat([store.present, arrived])
        count = len(chosen)
        if not count:
            return hidden
        with self._trace.stage("revive", len(store.times), count):
            rows = zip(store.embeddings, embeddings, strict=True)
            joined = tuple(torch.cat([old[chosen][None], new], 1) for old, new in rows)
            mask = (store.present <= arrived[:, None])[None, None]  # [1, 1, R + 1, P + R + 1]
            if self._additive:
                low = torch.finfo(hidden.dtype).min
                zeros = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
                mask = zeros.masked_fill(~mask, low)
            self._local.back = _Back(count, joined, mask)
            return torch.cat([store.hidden[chosen][None], hidden], 1)
