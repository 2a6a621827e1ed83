"""What is particular to the reducers of `oracles_encoder`, beside the common promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import oracles_encoder as oracles
import pytest
import torch
from reducer_checks import disagreement, matrix, reduce
from token_factory import item, make, stacked

import mmfast
from mmfast import SpecError, Tokens
from mmfast.ops.dpp import _Search, stepwise
from mmfast.reducers.video.stc_pruner import prune_chunk


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("hiprune", {"alpha": 0.0}),
        ("hiprune", {"alpha": 0.6}),
        ("hiprune", {"alpha": 1.0}),
        ("hired", {"alpha": 0.0}),
        ("hired", {"alpha": 0.3}),
        ("hired", {"alpha": 1.0}),
        ("dycoke", {"ratio": 0.0}),
        ("dycoke", {"ratio": 0.45}),
        ("dycoke", {"ratio": 1.0}),
        ("prumerge_plus", {"spatial": 0.0}),
        ("prumerge_plus", {"spatial": 0.4}),
        ("prumerge_plus", {"spatial": 1.0}),
        ("prumerge", {"neighbours": 0}),
        ("prumerge", {"neighbours": 5}),
        ("cdpruner", {"opposite": True}),
        ("pixelprune", {"metric": "mae"}),
        ("pixelprune", {"metric": "rmse"}),
    ],
    ids=str,
)
def test_oracle_with_knobs(name: str, knobs: dict[str, object]) -> None:
    for kind in ("video", "frozen"):
        tokens = make(kind, (6, 3, 4), seed=2)
        for budget in (4, 9, 30, 60, 71):
            assert not disagreement(tokens, name, budget, **knobs), (kind, budget)


@pytest.mark.parametrize("grid", [(1, 3, 4), (3, 2, 4), (6, 3, 4), (9, 2, 3), (10, 2, 3)], ids=str)
def test_counts_of_the_paper_without_a_budget(grid: tuple[int, int, int]) -> None:
    for kind in ("random", "video", "frozen"):
        tokens = make(kind, grid, seed=sum(grid))
        for spec, answer in (
            ("dycoke", oracles.dycoke(item(tokens), None)),
            ("dycoke?ratio=0.45", oracles.dycoke(item(tokens), None, 0.45)),
            ("vidcom2", oracles.vidcom2(item(tokens), None)),
            ("vidcom2?ratio=0.6", oracles.vidcom2(item(tokens), None, 0.6)),
        ):
            assert reduce(tokens, spec).keep.tolist() == answer.keep, (kind, spec)


@pytest.mark.parametrize("name", ["prumerge", "prumerge_plus"])
def test_outliers_of_attention_without_a_budget(name: str) -> None:
    tokens = make("random", (1, 9, 9), seed=4)
    for loud in (0, 1, 5, 12):
        attn = tokens.attn.clone()
        attn[torch.arange(loud) * 6] += 3
        here = replace(tokens, attn=attn)
        answer = oracles.ORACLES[name](item(here), None)
        found = reduce(here, name)
        assert found.keep.tolist() == answer.keep and found.m > loud
        assert np.allclose(matrix(found), answer.matrix, atol=1e-6)


def flat_page(seed: int) -> torch.Tensor:
    """A page of three shades, with a slow gradient at the bottom, `[1 * 9 * 11, 6]`."""
    g = torch.Generator().manual_seed(seed)
    page = torch.zeros(9, 11, 6)
    for _ in range(4):
        y, x = (int(torch.randint(0, side, (1,), generator=g)) for side in (7, 8))
        page[y : y + 4, x : x + 5] = torch.randint(1, 4, (1,), generator=g) / 4
    page[7:] += torch.arange(11)[None, :, None] * 0.02
    return page.reshape(-1, 6)


@pytest.mark.parametrize("metric", ["exact", "max", "mae", "rmse"])
@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("anchored", [True, False])
def test_pixelprune_without_a_budget(metric: str, threshold: float, anchored: bool) -> None:
    for seed in range(3):
        pixels = flat_page(seed)
        tokens = Tokens(pixels, grid=(1, 9, 11), signals={"pixels": pixels})
        knobs = {"threshold": threshold, "metric": metric, "anchored": anchored}
        spec = "pixelprune?" + "&".join(f"{k}={v}" for k, v in knobs.items())
        limit = 0.0 if metric == "exact" else threshold
        answer = oracles.pixelprune(item(tokens), None, limit, metric, anchored and limit > 0)
        assert reduce(tokens, spec).keep.tolist() == answer.keep and len(answer.keep) < 90


def test_pixelprune_errors_do_not_add_up_when_anchored() -> None:
    ramp = (torch.arange(40) * 0.04)[:, None].expand(40, 3).contiguous()
    tokens = Tokens(ramp, grid=(1, 1, 40), signals={"pixels": ramp})
    kept = reduce(tokens, "pixelprune?threshold=0.1").keep
    assert kept.tolist() == list(range(0, 40, 3))  # every third step is above the threshold
    assert reduce(tokens, "pixelprune?threshold=0.1&anchored=false").m == 1


def test_pixelprune_takes_frames_one_by_one() -> None:
    page = flat_page(0)
    video = torch.cat([page, page])
    once = reduce(Tokens(page, grid=(1, 9, 11), signals={"pixels": page}), "pixelprune").keep
    twice = reduce(Tokens(video, grid=(2, 9, 11), signals={"pixels": video}), "pixelprune").keep
    assert twice.equal(torch.cat([once, once + 99]))


def peaked(n: int, *spots: int) -> torch.Tensor:
    score = torch.linspace(0.2, 0.1, n)
    score[list(spots)] = 1.0
    return score


def test_hiprune_neighbours_stop_at_the_edges() -> None:
    """Anchors at the end of a row, in the corner, and at the seam of two frames."""
    n = 2 * 5 * 6
    deep = torch.linspace(0, 0.1, n)
    tokens = Tokens(
        torch.randn(n, 4),
        grid=(2, 5, 6),
        signals={"attn_middle": peaked(n, 11, 0, 29, 30), "attn_visual": deep},
    )
    keep = set(reduce(tokens, "hiprune:20?alpha=1.0").keep.tolist())
    near = {11, 5, 10, 17, 0, 1, 6, 29, 28, 23, 30, 31, 36}
    assert keep == near | {59, 58, 57, 56, 55, 54, 53}
    wrapped = set(reduce(tokens, "hiprune:20?alpha=1.0&parity=true").keep.tolist())
    assert 12 in wrapped and 35 in wrapped  # over the row end, and into the other frame


def tiled(salient: torch.Tensor, side: int = 4) -> Tokens:
    """An overview of `side` x `side` and 2 x 2 tiles of the same size, in a mosaic."""
    n = side * side
    square = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side))
    wide = torch.cartesian_prod(torch.arange(1), torch.arange(2 * side), torch.arange(2 * side))
    tile = 1 + wide[:, 1] // side * 2 + wide[:, 2] // side
    first = torch.cat([salient, torch.rand(4 * n)])
    signals = {
        "attn_first": first,
        "tile": torch.cat([torch.zeros(n, dtype=torch.int64), tile]),
        "place": torch.cat([square, wide]),
    }
    return Tokens(torch.randn(5 * n, 4), attn=torch.rand(5 * n), signals=signals)


def test_hired_follows_the_area_of_a_tile() -> None:
    corner = torch.zeros(4, 4)
    corner[:2, :2] = 1.0
    tokens = tiled(corner.flatten() + torch.rand(16) * 0.1)
    tile = tokens.signals["tile"]
    # A quarter of the overview counts, all of it in the corner that the first tile shows.
    kept = tile[reduce(tokens, "hired:16?alpha=0.75").keep].bincount(minlength=5)
    assert kept.tolist() == [12, 4, 0, 0, 0]
    corner_right = corner.flip(1)
    kept = tile[reduce(tiled(corner_right.flatten()), "hired:16?alpha=0.75").keep].bincount()
    assert kept.tolist() == [12, 0, 4]
    # Without places only strips are left: the two upper ones, as in the reference.
    strips = replace(tokens, signals={k: v for k, v in tokens.signals.items() if k != "place"})
    kept = tile[reduce(strips, "hired:16?alpha=0.75").keep].bincount(minlength=5)
    assert kept.tolist() == [12, 2, 2, 0, 0]
    assert not disagreement(tokens, "hired", 16) and not disagreement(strips, "hired", 16)


def test_hired_hands_on_what_a_tile_cannot_take() -> None:
    corner = torch.zeros(4, 4)
    corner[:2, :2] = 1.0
    tokens = tiled(corner.flatten())
    for budget in range(1, 80):
        assert not disagreement(tokens, "hired", budget), budget
    kept = tokens.signals["tile"][reduce(tokens, "hired:64?alpha=0.75").keep].bincount()
    assert kept.tolist() == [16, 16, 11, 11, 10]
    assert reduce(tokens, "hired:64?alpha=0.75&parity=true").m < 64  # the reference loses them


def test_hired_without_overview_or_tiles() -> None:
    tokens = tiled(torch.rand(16))
    crops = Tokens(
        tokens.x[16:],
        attn=tokens.attn[16:],
        signals={name: value[16:] for name, value in tokens.signals.items()},
    )
    for budget in (1, 9, 33, 63):
        assert not disagreement(crops, "hired", budget)
    plain = Tokens(tokens.x, attn=tokens.attn, signals={"attn_first": tokens.attn})
    assert reduce(plain, "hired:30").keep.equal(tokens.attn.topk(30).indices.sort().values)
    assert reduce(plain, "hired:30?parity=true").m == 15  # the reference keeps alpha of it


def test_prumerge_says_what_went_where() -> None:
    tokens = make("random", (1, 7, 8), seed=3)
    found = reduce(tokens, "prumerge:9")
    top = tokens.attn.argsort(descending=True)
    assert set(found.keep.tolist()) == set(top[:9].tolist())  # eight, and the heaviest of the rest
    summary = int((found.keep == top[8]).nonzero())
    assert found.sizes()[summary] == 56 - 8 and int((found.owner == summary).sum()) == 48
    assert found.mix is not None and not found.pure
    emitted = reduce(tokens, "prumerge:9?parity=true")
    assert emitted.order is not None and emitted.keep[emitted.order].equal(top[:9])


def test_prumerge_without_any_attention_takes_the_mean() -> None:
    tokens = replace(make("random", (1, 3, 4)), attn=torch.zeros(12))
    found = matrix(reduce(tokens, "prumerge:1"))
    assert np.allclose(found, 1 / 12)


def test_dycoke_counts() -> None:
    tokens = make("video", (9, 4, 5))

    def per_frame(spec: str) -> list[int]:
        return (reduce(tokens, spec).keep // 20).bincount(minlength=9).tolist()

    assert per_frame("dycoke") == [20, 6, 6, 6, 20, 6, 6, 6, 20]
    assert per_frame("dycoke:96") == [20, 6, 6, 6, 20, 6, 6, 6, 20]
    assert per_frame("dycoke?parity=true") == [20, 6, 6, 6, 20, 6, 6, 6, 0]
    assert per_frame("dycoke:48") == [10, 3, 3, 3, 10, 3, 3, 3, 10]
    assert per_frame("dycoke:132") == [20, 12, 12, 12, 20, 12, 12, 12, 20]


def test_stc_pruner_carries_a_memory_of_fixed_size() -> None:
    video = make("video", (6, 3, 4), seed=1).x
    chunks = [Tokens(part, grid=(2, 3, 4)) for part in video.split(24)]
    memory, kept = None, []
    for chunk in chunks:
        pruned, memory = prune_chunk(chunk, 10, memory)
        kept.append(pruned.keep)
        assert pruned.m == 10 and memory.total.shape == (6,)
    assert memory is not None and memory.chunks == 3
    assert kept[0].equal(reduce(chunks[0], "stc_pruner:10").keep)
    fresh = [reduce(chunk, "stc_pruner:10").keep for chunk in chunks]
    assert any(not a.equal(b) for a, b in zip(kept, fresh, strict=True))  # the past matters


def test_cdpruner_spends_what_the_span_leaves_on_relevance() -> None:
    g = torch.Generator().manual_seed(0)
    basis = torch.randn(3, 12, generator=g)
    x = torch.randn(30, 3, generator=g) @ basis  # rank 3
    tokens = Tokens(x, query=torch.randn(2, 12, generator=g))
    for budget in (2, 3, 4, 17, 29):
        assert not disagreement(tokens, "cdpruner", budget)
    joint = Tokens(x, query=torch.randn(2, 5), signals={"joint": torch.randn(30, 5)})
    assert reduce(joint, "cdpruner:7").m == 7


@pytest.mark.parametrize("kind", ["random", "video", "frozen", "equal", "zero", "holes"])
def test_greedy_dpp_updates_some_rows_or_all(kind: str) -> None:
    """Rows kept up to date on a CPU, all rows on other devices: the same picks."""
    rows = torch.stack([make(kind, (5, 9, 8), width=24, seed=seed).x for seed in (0, 1)]).double()
    rows = rows * torch.rand(2, 360, 1, generator=torch.Generator().manual_seed(0)).sqrt()
    for count in (1, 7, 24):
        picks = stepwise(rows, count)
        lazy = torch.stack([_Search(item.numpy(), count).run() for item in rows])
        assert lazy.equal(picks)


def test_parity_of_cdpruner_couples_a_batch() -> None:
    """Min and max over all items, as the reference has it; the default takes each by itself."""
    batch = stacked([make("random", (1, 5, 6), seed=seed) for seed in (0, 1)])
    alone = mmfast.reduce(batch.select(1), "cdpruner:6")
    assert mmfast.reduce(batch, "cdpruner:6").select(1).keep.equal(alone.keep)
    scaled = replace(batch, query=batch.query * torch.tensor([1.0, -1.0])[:, None, None])
    assert mmfast.reduce(scaled, "cdpruner:6?parity=true").m == 6


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hiprune:4?alpha=-0.1", "alpha=-0.1"),
        ("hired:4?alpha=1.5", "alpha=1.5"),
        ("dycoke:4?ratio=1.5", "ratio=1.5"),
        ("dycoke:4?parity=true", "no budget"),
        ("dycoke?parity=true", "more than 4 frames"),
        ("prumerge:4?ratio=0.5", "parity=true"),
        ("prumerge?ratio=0.5", "parity=true"),
        ("prumerge_plus:4?parity=true", "without a budget"),
        ("prumerge_plus?ratio=0.5", "parity=True|parity=true"),
        ("prumerge_plus:4?spatial=2.0", "spatial=2.0"),
        ("prumerge_plus:4?neighbours=-1", "neighbours=-1"),
        ("prumerge:4?neighbours=-1", "neighbours=-1"),
        ("prumerge_plus?parity=true", "no stride"),
        ("pixelprune:4?metric=rms", "did you mean 'rmse'"),
        ("pixelprune?threshold=-1.0", "threshold=-1.0"),
    ],
)
def test_wrong_knobs_are_named(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as error:
        reduce(make("random", (1, 3, 4)), spec)
    assert "\n" not in str(error.value)


def test_merged_tokens_can_be_reduced_further() -> None:
    tokens = make("video", (4, 3, 4), seed=1)
    both = mmfast.reduce(tokens, "prumerge_plus:20+dycoke:9")
    first = mmfast.reduce(tokens, "prumerge_plus:20")
    assert both.m == 9 and set(both.keep.tolist()) <= set(first.keep.tolist())
    slots = torch.isin(first.keep, both.keep)
    torch.testing.assert_close(both.apply(tokens.x), first.apply(tokens.x)[slots])
