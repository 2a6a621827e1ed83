"""Tokens that a cut dropped and a later step may call back (LazyLLM).

A dropped token leaves its hidden state behind, on the cache layer of the cut. The layer before the
cut has the keys of every token, so each decode step ranks all of them again; what ranks within the
budget and is not there yet runs through the deeper layers beside the new token, at its own
position, and sees only what stands before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from mmfast.core.errors import ModelError, SpecError
from mmfast.core.spec import Spec
from mmfast.models.lengths import held
from mmfast.models.sequence import Item
from mmfast.ops.ranking import stable_topk


@dataclass
class Store:
    """What left at a cut, for one cache; times are places among the keys of the layer before.

    Attributes:
        times: `[n]` of the tokens that were dropped.
        hidden: `[n, D]` their input to the layer of the cut.
        embeddings: `[n, d]` each: their position embeddings.
        items: Per image or video the times of all its tokens `[N]`, and how many may be there.
        present: `[P]` times of the tokens in the cache layer, in the order they were stored.
    """

    times: Tensor
    hidden: Tensor
    embeddings: tuple[Tensor, ...]
    items: list[tuple[Tensor, int]]
    present: Tensor

    def join(self, other: Store) -> Store:
        """The same with what a later turn dropped, which knows who is present by now."""
        return Store(
            torch.cat([self.times, other.times]),
            torch.cat([self.hidden, other.hidden]),
            tuple(torch.cat(pair) for pair in zip(self.embeddings, other.embeddings, strict=True)),
            self.items + other.items,
            other.present,
        )

    def fit(self, length: int, before: int) -> None:
        """Follow a cache that was cropped since.

        Args:
            length: Tokens that the layer of the cut holds.
            before: Tokens that the layer before it holds.

        Raises:
            ModelError: The cache holds tokens that this store has not seen.
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
        """Which dropped tokens rank within the budget and are not there, by `scores` `[S]`."""
        best = [times[stable_topk(scores[times], count)] for times, count in self.items]
        missing = torch.isin(self.times, torch.cat(best)) & ~torch.isin(self.times, self.present)
        return missing.nonzero()[:, 0]


class Leaving:
    """The tokens at a cut before it is made; see `Store`.

    Raises:
        ModelError: Several rows, padding, or a part of a prompt.
    """

    def __init__(
        self, items: Sequence[Item], hidden: Tensor, embeddings: Sequence[Tensor], *padding: Any
    ) -> None:
        padded = any(each is not None for each in padding)
        if len(hidden) > 1 or padded or any(item.part is not None for item in items):
            raise ModelError(
                "lazyllm serves one row without padding, prefilled in one piece; call it with a "
                "batch of one, without beams and prefill_chunk_size, or use fastv"
            )
        self._items, self._where = items, [item.where for item in items]
        self._hidden, self._embeddings = hidden[0], [each[0] for each in embeddings]

    def store(self, order: Tensor, start: int) -> Store:
        """What has left.

        Args:
            order: `[m]` previous places of all tokens left.
            start: Time of the first token of this call.
        """
        places = torch.cat(self._where)
        gone = places[~torch.isin(places, order)]
        now = zip(self._where, self._items, strict=True)
        return Store(
            gone + start,
            self._hidden[gone],
            tuple(each[gone] for each in self._embeddings),
            [(mine + start, item.n) for mine, item in now],
            order + start,
        )


def keep_store(
    cache: Any, layer: int, left: Leaving | None, order: Tensor | None, length: int
) -> None:
    """Note on the cache layer of a cut what several new tokens mean for its store.

    Args:
        cache: The cache; the layer before the cut holds the new tokens already.
        layer: Layer of the cut.
        left: What stood there; None where the cut was not made.
        order: `[1, m]` previous places of what is left, if something has left.
        length: New tokens in the layer before the cut.

    Raises:
        ModelError: The cache layer is of a kind that cannot grow out of order.
    """
    mine = cache.layers[layer]
    old: Store | None = getattr(mine, "store", None)
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


def check_last(specs: Sequence[Spec]) -> None:
    """A token that comes back runs through all deeper layers, so nothing else may cut there.

    Raises:
        SpecError: Something else does.
    """
    inside = [spec for spec in specs if spec.site == "llm"]
    for spec in inside:
        others = [o for o in inside if o is not spec and (o.layer or 0) >= (spec.layer or 0)]
        if spec.method.revives and others:
            raise SpecError(
                f"{str(others[0])!r} cuts at or behind {str(spec)!r}, whose tokens may come back; "
                f"put {spec.method.name!r} last"
            )
