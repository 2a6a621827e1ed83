"""Methods made of shared parts: knobs, thresholds without a budget, special signals, faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from reducer_checks import disagreement, matrix, reduce
from token_factory import item, make

from mmfast import Reduction, SpecError, Tokens
from mmfast.core.registry import get

KNOBS = [
    ("audio_prune", {"coverage": 0.0}),
    ("audio_prune", {"coverage": 1.0}),
    ("catp", {"balance": 0.2, "surplus": 1.0}),
    ("catp", {"balance": 0.9, "surplus": 5.0}),
    ("catp_inner", {"relevance": 0.0}),
    ("catp_inner", {"relevance": 5.0}),
    ("fastvid", {"segments": 1, "tau": 0.0, "every": 2, "beta": 0.1}),
    ("fastvid", {"segments": 6, "tau": 1.0, "context": 1.0}),
    ("fastvid", {"context": 0.0, "neighbours": 2}),
    ("greedyprune", {"balance": 0.0}),
    ("greedyprune", {"balance": 1.0}),
    ("info_rank", {"rank": 0.5}),
    ("key_clip", {"clips": 0.2, "tau": 0.5}),
    ("key_clip", {"clips": 1.0}),
    ("litevggt", {"salient": 0.0}),
    ("litevggt", {"salient": 0.95}),
    ("ptp", {"balance": 0.1}),
    ("saint", {"full": 4}),
    ("saint", {"full": 16}),
    ("saint", {"tau": 0.2}),
    ("saint", {"tau": 0.9, "gamma": 0.0}),
    ("script", {"tau": 0.3, "floor": 0.0}),
    ("script", {"tau": 0.99, "floor": 1.0}),
]


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
def test_oracle_with_knobs(name: str, knobs: dict[str, float]) -> None:
    for seed in range(2):
        tokens = make("video", (6, 3, 4), seed=seed)
        for budget in (2, 9, 30, 71):
            assert not disagreement(tokens, name, budget, **knobs), (seed, budget)


@pytest.mark.parametrize(
    ("name", "knob", "values"),
    [
        ("dtd", "threshold", (0.02, 0.1, 0.6)),
        ("a_tome", "threshold", (0.3, 0.85, 0.95)),
        ("saint", "tau", (0.5, 0.75, 0.95)),
        ("saint", "neighbours", (1, 3, 50)),
    ],
)
def test_oracle_without_a_budget(name: str, knob: str, values: tuple[float, ...]) -> None:
    kept = set()
    for kind in ("video", "frozen", "random", "zero"):
        tokens = make(kind, (6, 3, 4), seed=3)
        for value in values:
            found = reduce(tokens, f"{name}?{knob}={value}")
            answer = oracles.ORACLES[name](item(tokens), None, **{knob: value})
            assert found.keep.tolist() == answer.keep, (kind, value)
            assert np.allclose(matrix(found), answer.matrix, atol=1e-6)
            kept.add(found.m)
    assert len(kept) > 2  # the number of tokens follows from what is seen


def test_a_slow_change_adds_up_for_dtd_and_passes_evs() -> None:
    """A token that turns by a few degrees a frame."""
    angle = torch.linspace(0, 1.5, 16)
    tokens = Tokens(torch.stack([angle.cos(), angle.sin()], -1), grid=(16, 1, 1))
    assert reduce(tokens, "evs?threshold=0.1").keep.tolist() == [0]
    kept = reduce(tokens, "dtd?threshold=0.1").keep
    assert len(kept) == 4  # every half radian or so
    assert reduce(tokens, "dtd:4").keep.tolist()[0] == 0 and kept[0] == 0


def test_dtd_of_a_prefix_is_a_prefix() -> None:
    """What is kept depends on the past alone, so a stream may be cut anywhere."""
    tokens = make("video", (7, 3, 4), seed=5)
    whole = reduce(tokens, "dtd?threshold=0.2").keep
    for frames in range(1, 7):
        part = Tokens(tokens.x[: 12 * frames], grid=(frames, 3, 4))
        assert reduce(part, "dtd?threshold=0.2").keep.equal(whole[whole < 12 * frames])


def test_temporal_pool_never_mixes_places_and_spatial_pool_never_mixes_frames() -> None:
    tokens = make("random", (8, 3, 4))
    for budget in (12, 13, 40, 95):
        mixed = matrix(reduce(tokens, f"temporal_pool:{budget}")).reshape(budget, 8, 12) > 0
        assert (mixed.any(1).sum(-1) == 1).all()
    for budget in (8, 9, 40, 95):
        mixed = matrix(reduce(tokens, f"spatial_pool:{budget}")).reshape(budget, 8, 12) > 0
        assert (mixed.any(2).sum(-1) == 1).all()


def test_token_sampling_reads_fewer_frames() -> None:
    tokens = make("random", (8, 3, 4))
    assert reduce(tokens, "token_sampling:24").keep.tolist() == [*range(24, 36), *range(72, 84)]
    assert (reduce(tokens, "token_sampling:14").keep // 12).bincount().tolist() == [
        0,
        0,
        7,
        0,
        0,
        0,
        7,
    ]


def test_saint_in_a_tower_leaves_no_patch_without_a_value() -> None:
    tokens = make("video", (4, 3, 4), seed=2, sizes=True)
    found = reduce(tokens, "saint@vit:0.4")
    plain = reduce(replace(tokens, signals={"keys": tokens.signals["keys"]}), "saint:0.4")
    assert found.keep.equal(plain.keep) and bool((found.owner >= 0).all()) and not found.pure
    assert found.apply(tokens.x).equal(tokens.x[found.keep])  # dropped, not averaged
    keys = tokens.signals["keys"].double().numpy()
    for token, owner in enumerate(found.owner.tolist()):
        near = [oracles.oracles_compose.alike(keys[token], keys[k]) for k in found.keep.tolist()]
        assert token == int(found.keep[owner]) or owner == int(np.argmax(near))


def test_ptp_takes_frames_where_there_are_no_tiles() -> None:
    tokens = make("video", (6, 3, 4), seed=4)
    tokens = replace(tokens, signals={})
    for budget in (5, 23, 60):
        assert not disagreement(tokens, "ptp", budget)
    sharp = replace(tokens, attn=torch.zeros(72).index_fill(0, torch.arange(24, 27), 1.0))
    kept = reduce(sharp, "ptp:10?balance=1.0").keep
    assert bool(((kept >= 24) & (kept < 36)).all())  # all of it goes to the frame that is looked at


def test_catp_keeps_different_numbers_of_images_and_forgets_none() -> None:
    g = torch.Generator().manual_seed(0)
    plain, rich = torch.randn(1, 8, generator=g).expand(20, 8), torch.randn(20, 8, generator=g)
    image = torch.arange(3).repeat_interleave(20)
    tokens = Tokens(
        torch.cat([plain, rich, plain]),
        query=torch.randn(2, 8, generator=g),
        signals={"image": image},
    )
    count = image[reduce(tokens, "catp:12?balance=0.2&surplus=3.0").keep].bincount(minlength=3)
    assert count.min() == 1 and count[1] == 10
    assert reduce(tokens, "catp:2").m == 2  # fewer than images: the best ones


def test_catp_inner_ranks_the_examples_together() -> None:
    """Three images of ten tokens; the question turns to the second and is about the first."""
    g = torch.Generator().manual_seed(1)
    image, topic = torch.arange(30) // 10, torch.randn(3, 16, generator=g)
    x = topic[image] + torch.randn(30, 16, generator=g) * 0.1
    grown = torch.zeros(30)
    grown[10:20] = 0.5
    signals = {"image": image, "attn_before": torch.full((30,), 0.1)}
    tokens = Tokens(x, attn=0.1 + grown, query=topic[:1].expand(90, -1), signals=signals)
    kept = image[reduce(tokens, "catp_inner@llm2:15?relevance=0").keep]
    assert kept.bincount(minlength=3).tolist() == [0, 10, 5]  # the last image keeps its share
    kept = image[reduce(tokens, "catp_inner@llm2:15?relevance=9").keep]
    assert kept.bincount(minlength=3).tolist() == [10, 0, 5]
    falling = replace(tokens, attn=torch.zeros(30))  # less attention than before says nothing
    assert torch.equal(
        reduce(falling, "catp_inner@llm2:15").keep,
        reduce(replace(tokens, attn=signals["attn_before"]), "catp_inner@llm2:15").keep,
    )
    alone = replace(tokens, signals={**signals, "image": torch.zeros(30)})
    assert not disagreement(alone, "catp_inner", 12)


def test_key_clip_spends_the_budget_where_the_question_is_about() -> None:
    g = torch.Generator().manual_seed(0)
    scenes = (
        torch.randn(4, 1, 12, 16, generator=g).expand(4, 4, 12, 16)
        + torch.randn(4, 4, 12, 16, generator=g) * 0.05
    )
    query = scenes[2].mean((0, 1))[None]
    tokens = Tokens(scenes.reshape(-1, 16), query=query, grid=(16, 3, 4))
    kept = reduce(tokens, "key_clip:20?clips=0.25").keep
    assert bool(((kept >= 96) & (kept < 144)).all())


def _square_on_a_wall(frames: int) -> Tokens:
    """A square of 4 x 4 tokens on a wall of 10 x 10, with a little noise of each its own."""
    g = torch.Generator().manual_seed(2)
    wall, square = torch.randn(2, 16, generator=g)
    x = wall.expand(frames, 10, 10, 16).clone()
    x[:, 3:7, 3:7] = square
    x += torch.randn(x.shape, generator=g) * 0.01
    return Tokens(x.reshape(-1, 16), grid=(frames, 10, 10))


def test_litevggt_keeps_the_edges_of_a_square() -> None:
    found = reduce(_square_on_a_wall(2), "litevggt:60?salient=0.8")
    alone = found.keep[found.sizes() == 1] % 100
    inside = {10 * y + x for y in range(2, 8) for x in range(2, 8)}  # the edge's two sides
    middle = {44, 45, 54, 55}
    edge = inside - middle
    assert len(edge & set(alone.tolist())) >= 20  # of 24 tokens in every frame
    assert not middle & set(alone.tolist())


def test_litevggt_merges_over_frames_into_the_first() -> None:
    tokens = _square_on_a_wall(3)
    found = reduce(tokens, "litevggt:110?first=true&salient=0.05")
    assert found.keep[:100].tolist() == list(range(100))
    assert int((found.owner[100:] < 100).sum()) > 100  # tokens of later frames joined it
    with pytest.raises(SpecError, match=r"first=true keeps the 100 tokens .* do not fit 90 of 300"):
        reduce(tokens, "litevggt:90?first=true")
    for seed in range(3):
        clip = make("video", (4, 3, 5), seed=seed)
        for budget in (22, 30, 51):
            assert not disagreement(clip, "litevggt", budget, first=True), (seed, budget)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_litevggt_is_the_same_upside_down(seed: int) -> None:
    """The map of a picture in a mirror is the map in that mirror, whatever the length of rows."""
    from mmfast.reducers.merging.litevggt import geometry

    rows = torch.randn(2, 5, 7, 6, generator=torch.Generator().manual_seed(seed))
    score = geometry(rows.reshape(-1, 6), (2, 5, 7)).view(2, 5, 7)
    for axes in ((1,), (2,), (1, 2)):
        mirrored = geometry(rows.flip(axes).reshape(-1, 6), (2, 5, 7)).view(2, 5, 7)
        torch.testing.assert_close(mirrored, score.flip(axes))
    turned = geometry(rows.transpose(1, 2).reshape(-1, 6), (2, 7, 5)).view(2, 7, 5)
    torch.testing.assert_close(turned, score.transpose(1, 2))
    assert score.amin() >= 0 and score.amax() <= 1
    assert not geometry(torch.ones(70, 6), (2, 5, 7)).any()


def test_audio_prune_leaves_no_long_gap() -> None:
    tokens = Tokens(torch.randn(100, 4), attn=torch.linspace(0, 1, 100))
    kept = reduce(tokens, "audio_prune:20?coverage=0.5").keep
    assert int(kept.diff().max()) <= 20 and int(kept[0]) < 10
    assert reduce(tokens, "audio_prune:20?coverage=0.0").keep.tolist() == list(range(80, 100))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("visiondrop:5?contextual=9", "contextual=9"),
        ("audio_prune:5?coverage=2.0", "coverage=2.0"),
        ("catp:5?surplus=0.5", "surplus=0.5"),
        ("info_rank:5?rank=0.0", "rank=0.0"),
        ("saint:5?full=-1", "full=-1 of 'saint' is negative"),
        ("saint?full=16", "full=16.*has no budget.*such as 'saint:0.5"),
        ("litevggt:5?salient=1.0", "salient=1.0.*choose 0 to below 1"),
        ("litevggt:5?first=true", "20 tokens of the first of 1 frames.*choose more tokens"),
    ],
)
def test_knobs_out_of_range_are_named(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        reduce(make("random", (1, 4, 5)), spec)


def _faults() -> list[tuple[str, str, Callable[..., object]]]:
    """Plausible bugs: (method, what is replaced, by what)."""
    from mmfast.ops.max_min import greedy_diverse
    from mmfast.ops.ranking import share_out, stable_topk
    from mmfast.ops.video import shots

    merge = Reduction.merge

    def least(score: torch.Tensor, count: int) -> torch.Tensor:
        return stable_topk(-score, count)

    def equal(weights: torch.Tensor, budget: int, caps: torch.Tensor) -> torch.Tensor:
        return share_out(torch.ones_like(weights), budget, caps)

    def greedy(score: torch.Tensor, x: torch.Tensor, count: int, *rest: object) -> torch.Tensor:
        return greedy_diverse(-score, x, count, *rest)

    def uncut(video: torch.Tensor, least: int, tau: float) -> list[tuple[int, int]]:
        return shots(video, 1, -1.0)

    def shifted(keep: torch.Tensor, target: torch.Tensor, weight: object = None) -> Reduction:
        return merge(keep, target.roll(1), weight)

    return [
        ("visiondrop", "reducers.visiondrop.stable_topk", least),
        ("visiondrop", "ops.merging._assign", lambda m, r, t: torch.zeros_like(r)),
        ("greedyprune", "reducers.greedyprune.greedy_diverse", greedy),
        ("greedyprune", "reducers.greedyprune.rescale", lambda score: score.double() * 0),
        ("script", "reducers.script.relevance", lambda x, q: x.double().sum(-1)),
        ("script", "reducers.script.stable_topk", least),
        ("saint", "reducers.saint.stable_topk", least),
        ("ptp", "reducers.ptp.share_out", equal),
        ("ptp", "reducers.ptp.relevance", lambda x, q: x.double().sum(-1)),
        ("catp", "reducers.catp.greedy_diverse", greedy),
        ("catp", "reducers.catp.relevance", lambda x, q: x.double().sum(-1)),
        ("catp_inner", "reducers.catp_inner.share_out", equal),
        ("catp_inner", "reducers.catp_inner._likeness", lambda x, to: x.sum(-1)),
        ("catp_inner", "reducers.catp_inner.snap", lambda score: -score),
        ("info_rank", "reducers.info_rank.information", lambda x, rank: x.double().norm(dim=-1)),
        ("key_clip", "reducers.key_clip.shots", uncut),
        ("key_clip", "reducers.key_clip.relevance", lambda x, q: x.double().sum(-1)),
        ("fastvid", "reducers.fastvid.shots", uncut),
        (
            "fastvid",
            "reducers.fastvid._weights",
            lambda count, beta: (count * 0 + 1.0, count * 0.0),
        ),
        ("litevggt", "reducers.litevggt.rescale", lambda score: score.double() * 0),
        ("litevggt", "reducers.litevggt._shift", lambda x, axis, step: x.roll(step, axis)),
        ("litevggt", "reducers.litevggt.nearest_rows", lambda a, b: torch.zeros(len(a)).long()),
        ("dtd", "reducers.dtd.stable_topk", least),
        ("dtd", "ops.video.SinceKept.tuned", lambda self, count: -1.0),
        ("a_tome", "ops.merging._runs", lambda s, n, d: Reduction.identity(n)),
        ("a_tome", "ops.merging.paired_cosine", lambda a, b: -(a * b).sum(-1)),
        ("audio_prune", "reducers.audio_prune.stable_topk", least),
        ("temporal_pool", "core.reduction.Reduction.merge", shifted),
        ("spatial_pool", "core.reduction.Reduction.merge", shifted),
    ]


@pytest.mark.parametrize(("name", "what", "bug"), _faults())
def test_oracle_sees_planted_faults(
    name: str, what: str, bug: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [make("video", (8, 2, 4), seed=seed) for seed in (5, 6, 7)]
    assert not disagreement(tokens[0], name, 20)
    wrapped = staticmethod(bug) if what.endswith("Reduction.merge") else bug
    part, _, attribute = what.partition(".")
    home = get(name).fn.__module__ if part == "reducers" else f"mmfast.{part}"
    attribute = attribute.split(".")[-1] if part == "reducers" else attribute
    monkeypatch.setattr(f"{home}.{attribute}", wrapped)
    assert any(disagreement(t, name, budget) for t in tokens for budget in (20, 6, 40))
