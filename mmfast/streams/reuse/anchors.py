"""Offsets of keys and values between beginnings of prompts (KVCOMM, Ye et al., 2510.12872).

What stands before a picture changes its keys and values, and it changes those of another picture in
much the same way. An anchor is a picture that was read in full behind two beginnings, with the
difference. A picture that was seen behind the first of them gets, behind the second, the mean
difference of the anchors, in which the near ones count most, and is not read again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.kv import KVBlock
from mmfast.streams.archive.files import value
from mmfast.streams.reuse.plan import ReusePlan
from mmfast.streams.reuse.store import ReuseStore, digest, key_of

SAME = 1e-5  # relative distance up to which pictures and beginnings are the same
NEAR = 0.3  # relative distance up to which beginnings are those of one agent
TEMPERATURE = 0.2  # of the softmax over relative distances
WINDOW = 5  # anchors, the oldest, of which the least used makes room


@value
@dataclass(frozen=True, eq=False)
class SegmentContext:
    """Embeddings `content` `[n, D]` of a picture's tokens, and means `[D]` of what stood before.

    `base` stood before it where its keys and values come from, `before` stands there now.
    """

    content: Tensor
    base: Tensor
    before: Tensor


def mean_of(hidden: Tensor, start: int) -> Tensor:
    """Mean `[D]` of the embeddings that stand before a place; zeros where nothing does."""
    given = hidden.detach()[:start].float()
    return given.mean(0) if start else given.new_zeros(hidden.shape[1])


def anchor_weights(
    context: SegmentContext, anchors: Sequence[SegmentContext], plan: ReusePlan
) -> Tensor | None:
    """Weights `[anchors]` of the offsets that a picture takes; None if anchors do not tell.

    Only those whose beginnings are near have any, and the same picture behind the same beginnings
    has all. They do not tell where fewer than `plan.least` are near, or where the entropy of the
    weights is above `plan.share` of its largest value: a new anchor tells more then.
    """
    apart = [_beginnings_apart(context, each) for each in anchors]
    near = [i for i, much in enumerate(apart) if much <= NEAR]
    weights = torch.zeros(len(anchors), dtype=torch.float64)
    gaps = [apart[i] + _apart(context.content, anchors[i].content) for i in near]
    if gaps and min(gaps) < SAME:
        weights[near[gaps.index(min(gaps))]] = 1
        return weights
    shares = (-torch.tensor(gaps, dtype=torch.float64) / TEMPERATURE).softmax(0)
    spread = float(torch.special.entr(shares).sum())
    if len(near) < plan.least or spread > plan.share * math.log(len(near)) + 1e-9:
        return None
    weights[near] = shares
    return weights


def _beginnings_apart(a: SegmentContext, b: SegmentContext) -> float:
    return max(_apart(a.base, b.base), _apart(a.before, b.before))


def _apart(a: Tensor, b: Tensor) -> float:
    """Relative distance of two tensors: 0 where they are equal, 2 at most."""
    size = max(float(a.float().norm()), float(b.float().norm()))
    return float((a.float() - b.float()).norm()) / size if size else 0.0


def shifted(block: KVBlock, offsets: Sequence[tuple[float, KVBlock]]) -> KVBlock:
    """Keys and values with a weighted sum of offsets, the sums in float32."""

    def added(own: Tensor, others: Sequence[Tensor]) -> Tensor:
        total = own.float()
        for (weight, _), other in zip(offsets, others, strict=True):
            total = total + weight * other.to(own.device, torch.float32)
        return total.to(own.dtype)

    keys, values = (
        tuple(added(own, [getattr(b, name)[i] for _, b in offsets]) for i, own in enumerate(each))
        for name, each in (("keys", block.keys), ("values", block.values))
    )
    return replace(block, keys=keys, values=values)


class AnchorPool:
    """Anchors of one model and owner whose pictures have one layout of tokens, in a store.

    Of more than the plan's number of anchors between near beginnings, the least used of the oldest
    `WINDOW` leaves.
    """

    def __init__(self, store: ReuseStore, head: str, relative: Tensor, plan: ReusePlan) -> None:
        self.store, self.plan = store, plan
        self._name = key_of("anchors", head, digest(relative))

    def moved(self, block: KVBlock, context: SegmentContext) -> KVBlock | None:
        """Keys and values as they are expected behind `before`; None if anchors do not tell."""
        known = self._known()
        weights = anchor_weights(context, [held for _, held in known], self.plan)
        if weights is None:
            return None
        used = [(float(w), each) for w, (each, _) in zip(weights, known, strict=True) if w > 1e-3]
        offsets = [(w, self.store.get(_offset(each[0]))) for w, each in used]
        if any(offset is None for _, offset in offsets):  # pushed out
            return None
        for _, each in used:
            each[1] += 1
        self.store.put(self._name, [each for each, _ in known], anew=True)
        total = sum(w for w, _ in offsets)
        return shifted(block, [(w / total, offset) for w, offset in offsets])

    def learn(self, base: KVBlock, now: KVBlock, context: SegmentContext) -> None:
        """Keep a picture that was read behind both beginnings as an anchor."""
        name = key_of("anchor", self._name, *(digest(each) for each in vars(context).values()))
        known = self._known()
        if any(each[0] == name for each, _ in known):
            return
        near = [each for each, held in known if _beginnings_apart(context, held) <= NEAR]
        listed = [each for each, _ in known]
        if len(near) >= self.plan.anchors:
            listed.remove(min(near[:WINDOW], key=lambda each: each[1]))
        self.store.put(_offset(name), shifted(now, [(-1.0, base)]))
        self.store.put(name, context)
        self.store.put(self._name, [*listed, [name, 0]], anew=True)

    def _known(self) -> list[tuple[Any, SegmentContext]]:
        """Names of anchors with how many times each was used, and contexts, the oldest first.

        What the store has pushed out is left out.
        """
        listed = self.store.get(self._name) or []
        found = [(each, self.store.get(each[0])) for each in listed]
        return [(each, held) for each, held in found if held is not None]


def _offset(name: str) -> str:
    return key_of("offset", name)
