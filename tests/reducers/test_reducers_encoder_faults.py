"""Plausible bugs of the reducers of `oracles_encoder`, each of which has to be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from reducer_checks import disagreement
from token_factory import make

from mmfast import Reduction
from mmfast.core.registry import get
from mmfast.ops import image as raster_prediction
from mmfast.ops import merging, ranking
from mmfast.ops import ranking as grouped_topk


def least(score: torch.Tensor, count: int) -> torch.Tensor:
    return ranking.stable_topk(-score, count)


def worst(score: torch.Tensor, group: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return grouped_topk.grouped_topk(-score, group, counts)


def uneven(weights: torch.Tensor, budget: int, caps: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros_like(caps)
    for group in range(len(caps)):  # first come, first served
        counts[group] = min(int(caps[group]), budget - int(counts.sum()))
    return counts


def wrapping(centre: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    steps = torch.tensor([0, -1, 1, -columns, columns])
    return (centre[..., None] + steps).clamp_min(0) % (6 * rows * columns)


def plain(*given: torch.Tensor, **knobs: bool) -> Reduction:
    return replace(merging.neighbour_merge(*given, **knobs), mix=None)


def sums(*given: torch.Tensor, **knobs: bool) -> Reduction:
    return merging.neighbour_merge(*given, raw=True)


def narrow(x: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
    return (-(x - centre).square().sum(-1)).exp()


def left_only(image: torch.Tensor, metric: str) -> torch.Tensor:
    return raster_prediction.surprise(image.flatten(-3, -2)[..., None, :, :], metric).unflatten(
        -1, image.shape[-3:-1]
    )[..., 0, :, :]


FAULTS: list[tuple[str, str, Callable[..., object]]] = [
    ("hiprune", "stable_topk", least),
    ("hiprune", "_cross", wrapping),
    ("hired", "grouped_topk", worst),
    ("hired", "share_out", uneven),
    ("hired", "stable_topk", least),
    ("hired", "tile_cover", lambda tile, place: tile[tile == 0] + 1),
    ("prumerge", "stable_topk", least),
    ("prumerge", "neighbour_merge", plain),
    ("prumerge", "neighbour_merge", sums),
    ("prumerge_plus", "stable_topk", least),
    ("prumerge_plus", "even_spots", lambda k, n, device: torch.arange(k)),
    ("prumerge_plus", "neighbour_merge", sums),
    ("dycoke", "grouped_topk", worst),
    ("dycoke", "share_out", uneven),
    ("dycoke", "spatial_novelty", lambda frame, *_: frame.sum(-1).double()),
    ("stc_pruner", "grouped_topk", worst),
    ("stc_pruner", "share_out", uneven),
    ("vidcom2", "grouped_topk", worst),
    ("vidcom2", "closeness", narrow),
    ("vidcom2", "share_out", uneven),
    ("vidcom2", "_TEMPERATURE", 1e6),
    ("cdpruner", "greedy_dpp", lambda rows, quality, k: least(-quality, k)),
    ("cdpruner", "relevance", lambda x, *_, **__: torch.ones(x.shape[:-1])),
    ("pixelprune", "surprise", left_only),
    ("pixelprune", "stable_topk", least),
]


@pytest.mark.parametrize(
    ("name", "target", "bug"),
    FAULTS,
    ids=[f"{f[1]}-{getattr(f[2], '__name__', '')}" for f in FAULTS],
)
def test_oracle_sees_planted_faults(
    name: str, target: str, bug: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [make("video", grid, seed=seed) for seed, grid in ((5, (6, 3, 4)), (6, (6, 2, 6)))]
    budgets = (5, 20, 40)
    assert not any(disagreement(one, name, budget) for one in tokens for budget in budgets)
    monkeypatch.setattr(f"{get(name).fn.__module__}.{target}", bug)
    assert any(disagreement(one, name, budget) for one in tokens for budget in budgets)
