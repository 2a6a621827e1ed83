"""Plausible bugs planted into cache policies, each of which the oracles have to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_checks import disagreement
from cache_factory import make

from mmfast import Reduction
from mmfast.caches import keyformer, quantised
from mmfast.caches.frames import streammem
from mmfast.ops import eviction, ranking, similarity
from mmfast.ops import ranking as grouped_topk
from mmfast.ops import ranking as share_out

_WEIGHTS, _POOLED_VOTES = streammem._weights, eviction.pooled_votes
_GUMBEL, _HOLDING, _WINDOW_VOTES = keyformer._gumbel, quantised._holding, eviction.window_votes

# (policy, where the name is looked up, replacement)
Fault = tuple[str, str, Callable[..., object]]


def _least(score: torch.Tensor | ranking.RoughScores, count: int) -> torch.Tensor:
    score = score.all() if isinstance(score, ranking.RoughScores) else score
    return ranking.stable_topk(-score, count).sort(-1).values


def _unpooled(score: torch.Tensor, kernel: int, pool: str = "mean") -> torch.Tensor:
    return score.double()


def _unpadded(score: torch.Tensor, kernel: int, pool: str = "mean") -> torch.Tensor:
    return _POOLED_VOTES(score, kernel, pool, padded=False)


def _no_window(attn: torch.Tensor, budget: int, **knobs: Any) -> torch.Tensor:
    votes = _WINDOW_VOTES(attn, budget, **knobs)
    return votes.masked_fill(votes.isinf(), 0.0)


def _equal_parts(weights: torch.Tensor, budget: int, caps: torch.Tensor) -> torch.Tensor:
    return share_out.share_out((caps > 0).double(), budget, caps)


def _ungrouped(score: torch.Tensor, group: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    zero, total = torch.zeros_like(group), counts.sum(-1, keepdim=True)
    return grouped_topk.grouped_topk(score, zero, total)


def _highest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1, keepdim=True)


def _one_less(index: torch.Tensor, n: int) -> torch.Tensor:
    return ranking.complement(index, n)[..., :-1]


def _farthest(cosine: torch.Tensor) -> torch.Tensor:
    return similarity.nearest(-cosine)


def _plain(keep: torch.Tensor, keys: torch.Tensor, joins: torch.Tensor, fold: str) -> Reduction:
    return eviction.fold_evicted(keep, keys, torch.ones_like(joins), fold)


def _averaged(keep: torch.Tensor, keys: torch.Tensor, joins: torch.Tensor, fold: str) -> Reduction:
    return eviction.fold_evicted(keep, keys, joins, "averaged")


def _dropped(keep: torch.Tensor, keys: torch.Tensor, joins: torch.Tensor, fold: str) -> Reduction:
    return eviction.fold_evicted(keep, keys, joins, "none")


def _same_noise(shape: torch.Size, seed: int, layer: int) -> torch.Tensor:
    return _GUMBEL(torch.Size((1, shape[1])), seed, 0).expand(shape)


def _one_more(received: torch.Tensor, mass: float) -> int:
    return min(_HOLDING(received, mass) + 1, received.shape[-1])


def _worst(score: torch.Tensor, among: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return ranking.best_of(-score, among, count)


def _crowded(
    score: torch.Tensor, among: torch.Tensor, room: torch.Tensor, *_: object
) -> torch.Tensor:
    return ranking.best_of(score, among, room)


def _nothing_alike(keys: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.zeros(keys.shape[:-1])


def _no_part(votes: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(votes)


def _equal_shares(score: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return _WEIGHTS(torch.ones_like(score), target)


def _mixed_windows(text: torch.Tensor, budget: int, first: int, last: int) -> torch.Tensor:
    place = torch.arange(text.shape[-1])
    return (place < first) | (place >= text.shape[-1] - (budget - first))


def _shifted(keep: torch.Tensor, n: int, ordered: bool = False) -> Reduction:
    return _prune((keep + 1) % n, n)


def _unsorted(keep: torch.Tensor, n: int, ordered: bool = False) -> Reduction:
    good = _prune(keep, n)
    return replace(good, keep=good.keep.flip(-1))


def _short(keep: torch.Tensor, n: int, ordered: bool = False) -> Reduction:
    return _prune(keep[..., :-1], n)


_prune = Reduction.prune
FAULTS: list[Fault] = [
    ("snapkv", "ops.eviction.best_places", _least),
    ("snapkv", "ops.eviction.pooled_votes", _unpooled),
    ("snapkv", "caches.snapkv.window_votes", _no_window),
    ("fastkv", "ops.eviction.pooled_votes", _unpooled),
    ("fastkv", "ops.eviction.pooled_votes", _unpadded),
    ("keynorm", "caches.keynorm.grouped_topk", _ungrouped),
    ("keynorm", "caches.keynorm.share_out", _equal_parts),
    ("keyformer", "caches.keyformer.stable_topk", _least),
    ("keyformer", "caches.keyformer._gumbel", _same_noise),
    ("random", "ops.eviction.best_places", _least),
    ("tova", "ops.eviction.best_places", _least),
    ("keydiff", "ops.eviction.best_places", _least),
    ("curdkv", "ops.eviction.best_places", _least),
    ("criticalkv", "caches.attention.criticalkv.stable_topk", _least),
    ("expected_attention", "ops.eviction.best_places", _least),
    ("mixkv", "ops.eviction.best_places", _least),
    ("mixkv", "caches.attention.mixkv._level_with", _no_part),
    ("infinipot_v", "caches.frames.infinipot_v.best_of", _worst),
    ("infinipot_v", "caches.frames.infinipot_v._redundancy", _nothing_alike),
    ("streammem", "caches.frames.streammem.best_of", _worst),
    ("streammem", "caches.frames.streammem._weights", _equal_shares),
    ("livevlm", "caches.frames.livevlm.best_of", _worst),
    ("livevlm", "caches.frames.livevlm.grouped_topk", _ungrouped),
    ("livevlm", "caches.frames.livevlm._bucketed", _crowded),
    ("pyramidkv", "caches.layers.pyramidkv.best_places", _least),
    ("simlayerkv", "caches.layers.simlayerkv.stable_topk", _least),
    ("knorm", "ops.eviction.best_places", _least),
    ("h2o", "ops.eviction.best_places", _least),
    ("kvcompose", "caches.layers.kvcompose.best_places", _least),
    ("capkv", "ops.eviction.best_places", _least),
    ("entropy_chunkkv", "caches.entropy_chunkkv.stable_topk", _least),
    ("entropy_chunkkv", "caches.entropy_chunkkv._median", _highest),
    ("cam", "caches.attention.cam.best_places", _least),
    ("cam", "caches.attention.cam.complement", _one_less),
    ("vatp", "ops.eviction.best_places", _least),
    ("leverage", "ops.eviction.best_places", _least),
    ("lagkv", "caches.lagkv.grouped_topk", _ungrouped),
    ("chunkkv", "caches.chunkkv.stable_topk", _least),
    ("lookm", "caches.lookm.stable_topk", _least),
    ("lookm", "caches.lookm.fold_evicted", _plain),
    ("lookm", "caches.lookm.fold_evicted", _averaged),
    ("lookm", "caches.lookm.fold_evicted", _dropped),
    ("lookm", "ops.eviction.nearest", _farthest),
    ("zipcache", "caches.quantised.stable_topk", _least),
    ("zipvl", "caches.quantised.stable_topk", _least),
    ("zipvl", "caches.quantised._holding", _one_more),
    ("streamingvlm", "caches.position._windows", _mixed_windows),
]


def _found(name: str) -> bool:
    """Whether anything differs from the oracle on a few conversations."""
    budgets: list[int | None] = [3, 12, 30, 45]
    knobs = {
        "keynorm": {"group": 7},
        "snapkv": {"window": 4},
        "simlayerkv": {"threshold": 0.2},
    }.get(name, {})
    if name == "zipvl":
        budgets.append(None)
    cases = [make("random", 3, 61, seed=seed) for seed in range(3)]
    return any(disagreement(t, name, b, **knobs) for t in cases for b in budgets)


@pytest.mark.parametrize(
    ("name", "where", "bug"), FAULTS, ids=[f"{f[0]}-{f[2].__name__[1:]}" for f in FAULTS]
)
def test_oracle_sees_planted_faults(
    monkeypatch: pytest.MonkeyPatch, name: str, where: str, bug: Callable[..., object]
) -> None:
    assert not _found(name)
    monkeypatch.setattr(f"mmfast.{where}", bug)
    assert _found(name)


@pytest.mark.parametrize("bug", [_shifted, _unsorted, _short])
@pytest.mark.parametrize("name", ["sink", "window", "snapkv", "keynorm"])
def test_oracle_sees_a_broken_reduction(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable[..., Reduction]
) -> None:
    monkeypatch.setattr(Reduction, "prune", staticmethod(bug))
    assert _found(name)
