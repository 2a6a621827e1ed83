"""Every registered reducer against its oracle, and the promises all of them make."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import oracles
import pytest
import reducer_checks as checks
import torch
from reducer_checks import disagreement, matrix, reduce, spec_of
from token_factory import KINDS, item, make

import mmfast
from mmfast import Reduction, SpecError, Tokens
from mmfast.core.registry import Method, get
from mmfast.core.spec import parse

METHODS = mmfast.methods("reducer")
by_name = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)


def test_every_method_has_an_oracle() -> None:
    assert {m.name for m in METHODS} == set(oracles.ORACLES)


@pytest.mark.rest_is_slow(3)
@by_name
@pytest.mark.parametrize("kind", KINDS)
def test_oracle(method: Method, kind: str) -> None:
    checks.check_oracle(method, kind)


@pytest.mark.rest_is_slow(3)
@by_name
@pytest.mark.parametrize("kind", ["random", "frozen", "video"])
def test_exact_budget_up_to_6272(method: Method, kind: str) -> None:
    checks.check_exact_budget_up_to_6272(method, kind)


@pytest.mark.rest_is_slow(3, 1)
@by_name
@pytest.mark.parametrize("kind", ["random", "video", "frozen", "equal"])
def test_batch_equals_one_by_one(method: Method, kind: str) -> None:
    checks.check_batch_equals_one_by_one(method, kind)


@by_name
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input(method: Method, dtype: torch.dtype) -> None:
    checks.check_half_precision_input(method, dtype)


@by_name
@pytest.mark.parametrize("promise", checks.PROMISES, ids=lambda check: check.__name__[6:])
def test_promise(method: Method, promise: Callable[[Method], None]) -> None:
    promise(method)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("random", {"seed": 7}),
        ("visionzip", {"contextual": 0.5}),
        ("visionzip", {"contextual": 3}),
        ("visionzip", {"contextual": 0.0}),
        ("holitom", {"tau": 0.9, "beta": 0.8, "neighbours": 2, "window": 3}),
        ("holitom", {"tau": 0.1}),
        ("dart", {"pivots": 1, "words": 0}),
        ("dart", {"pivots": 9, "words": 2}),
        ("vispruner", {"important": 0.0}),
        ("vispruner", {"important": 1.0}),
        ("sparsevlm", {"recycle": 0.0}),
        ("sparsevlm", {"recycle": 1.0, "group": 1}),
        ("framefusion", {"tau": 0.95}),
        ("framefusion", {"tau": -1.0}),
        ("prunevid", {"tau": 0.95, "scenes": 0.5}),
        ("prunevid", {"tau": -0.5}),
        ("v_cast", {"temperature": 0.05}),
        ("quicksilver", {"fuse": 0.9}),
        ("quicksilver", {"fuse": 0.0}),
    ],
)
def test_oracle_with_knobs(name: str, knobs: dict[str, float]) -> None:
    for seed in range(4):
        tokens = make("video", (6, 3, 4), seed=seed)
        for budget in (4, 9, 30, 60, 71):
            assert not disagreement(tokens, name, budget, **knobs), (seed, budget)


def test_oracle_tome_with_sizes() -> None:
    for seed in range(4):
        tokens = make("video", (1, 5, 7), seed=seed, sizes=True)
        for budget in (1, 2, 5, 17, 18, 30, 34):
            assert not disagreement(tokens, "tome", budget), (seed, budget)


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.6])
def test_oracle_evs_adaptive(threshold: float) -> None:
    tokens = make("video", (6, 3, 4), seed=3)
    found = reduce(tokens, f"evs?threshold={threshold}")
    assert found.keep.tolist() == oracles.evs(item(tokens), None, threshold).keep
    assert 12 < found.m < 72


def test_oracle_holitom_adaptive() -> None:
    tokens = make("video", (6, 3, 4), seed=3)
    for ratio in (1.0, 0.4, 0.1):
        found = reduce(tokens, f"holitom?ratio={ratio}")
        answer = oracles.holitom(item(tokens), None, ratio=ratio)
        assert found.keep.tolist() == answer.keep and found.m < 72
        assert np.allclose(matrix(found), answer.matrix, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("framefusion", {}),
        ("framefusion", {"tau": 0.97}),
        ("prunevid", {}),
        ("prunevid", {"tau": 0.95, "scenes": 0.4, "clusters": 0.3}),
        ("sparsevlm", {}),
        ("sparsevlm", {"rate": 0.9, "group": 3}),
        ("quicksilver", {}),
        ("quicksilver", {"drift": 0.6, "fuse": 0.7}),
        ("quicksilver", {"drift": 2.0, "fuse": 0.0}),
    ],
)
def test_oracle_adaptive(name: str, knobs: dict[str, float], seed: int) -> None:
    tokens = make("video", (9, 4, 5), seed=seed)
    text = "&".join(f"{k}={v}" for k, v in knobs.items())
    site = "@llm2" if get(name).sites[0] == "llm" else ""
    found = reduce(tokens, f"{name}{site}?{text}" if text else name + site)
    answer = oracles.ORACLES[name](item(tokens), None, **knobs)
    assert found.keep.tolist() == answer.keep and found.m < tokens.n
    assert np.allclose(matrix(found), answer.matrix, atol=1e-6)


def test_dart_takes_what_repeats_no_pivot() -> None:
    """Copies of a pivot go first."""
    x = torch.eye(6)[[0, 0, 0, 1, 1, 2, 3, 4]]
    norms = {"key_norm": torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1]), "text_key_norm": torch.ones(1)}
    tokens = Tokens(x, query=torch.eye(6)[[0]], signals=norms)
    assert reduce(tokens, "dart@llm2:4?pivots=1").keep.tolist() == [0, 3, 4, 5]
    assert reduce(tokens, "dart@llm2:3?pivots=1&words=0").keep.tolist() == [0, 3, 4]
    with pytest.raises(SpecError, match="pivots=0"):
        reduce(tokens, "dart@llm2:3?pivots=0")


def test_sparsevlm_listens_to_the_words_about_the_picture() -> None:
    x = torch.eye(8)[[0, 0, 1, 1]]
    given = torch.tensor([[0.9, 0.0], [0.8, 0.1], [0.0, 0.9], [0.1, 0.8]])
    tokens = Tokens(x, query=torch.eye(8)[[0, 5]], signals={"attn_text": given})
    assert reduce(tokens, "sparsevlm@llm2:2?recycle=0").keep.tolist() == [0, 1]
    recycled = reduce(tokens, "sparsevlm@llm2:2")
    assert recycled.keep.tolist() == [0, 1] and recycled.m == 2


def test_framefusion_merges_before_it_prunes() -> None:
    tokens = make("frozen", (6, 3, 4))
    still = reduce(tokens, "framefusion")
    assert still.m < 40 and float(still.sizes().sum()) == tokens.n
    fewer = reduce(tokens, f"framefusion:{still.m - 5}")
    assert set(fewer.keep.tolist()) < set(still.keep.tolist())
    more = reduce(tokens, f"framefusion:{still.m + 5}")
    assert float(more.sizes().sum()) == tokens.n, "above the merges nothing is lost"


def test_v_cast_spends_most_where_the_video_turns() -> None:
    out, back = torch.linspace(0, 1, 5), torch.linspace(1, 0, 5)[1:]
    path = torch.cat([out, back])[:, None, None] * torch.eye(1, 6) + torch.eye(6)[1]
    tokens = Tokens((path + 0.01 * torch.randn(9, 8, 6)).flatten(0, 1), grid=(9, 2, 4))
    counts = (reduce(tokens, "v_cast:36?temperature=0.3").keep // 8).bincount(minlength=9)
    assert int(counts[4]) == int(counts.max()) > int(counts[3]) and int(counts.min()) >= 1


def test_holitom_windows_are_optimal() -> None:
    """The dynamic program finds what trying every segmentation finds."""
    from mmfast.ops.video import static_windows

    rng = random.Random(0)
    for _ in range(30):
        alike = torch.tensor([[rng.random() < 0.7 for _ in range(5)] for _ in range(6)])
        best = 0
        for cuts in range(2**6):
            gain, start = 0, 0
            for end in range(7):
                if end == 6 or cuts >> end & 1:
                    gain += int(alike[start:end].all(0).sum()) * (end - start)
                    start = end + 1
            best = max(best, gain)
        assert static_windows(alike, 1024)[1] == best


def test_divprune_on_still_video_picks_every_place_once() -> None:
    tokens = make("frozen", (6, 4, 4))
    distinct = len(torch.unique(tokens.x, dim=0))
    found = reduce(tokens, f"divprune:{distinct}")
    assert len(torch.unique(tokens.x[found.keep], dim=0)) == distinct
    fewer = reduce(tokens, f"divprune:{distinct + 20}?parity=true")
    assert fewer.m == distinct  # the reference spends the rest on repeats


def test_divprune_in_float32_matches_the_textbook_loop() -> None:
    from mmfast.ops.max_min import max_min, max_min_reference

    for kind, grid in (("random", (1, 1, 1200)), ("video", (6, 14, 14))):
        x = make(kind, grid, width=96).x
        picks = max_min(x, 400)
        assert set(picks.tolist()) == set(max_min_reference(x, 400).tolist())


def test_evs_keeps_the_first_frame_once_it_fits() -> None:
    tokens = make("video", (5, 3, 4))
    assert reduce(tokens, "evs:12").keep.tolist() == list(range(12))
    below = reduce(tokens, "evs:11").keep
    assert int((below < 12).sum()) == 3  # a quarter of a smaller budget, the rest are changes
    assert reduce(tokens, "evs:3?parity=true").m == 12
    with pytest.raises(SpecError, match="parity"):
        reduce(tokens, "evs?q=0.5")
    with pytest.raises(SpecError, match=r"q=1\.5"):
        reduce(tokens, "evs?q=1.5&parity=true")


def test_evs_on_still_video_keeps_the_earliest() -> None:
    tokens = make("equal", (5, 3, 4))
    assert reduce(tokens, "evs:20").keep.tolist() == list(range(20))


@pytest.mark.parametrize("later", [0, 1, 2, 9])
def test_evs_where_later_frames_have_few_tokens(later: int) -> None:
    """A raster with holes: what later frames cannot take of a small budget, the first one does."""
    tokens = make("video", (3, 3, 4), seed=later)
    keep = torch.cat([torch.arange(12), 12 + 2 * torch.arange(later)])
    signals = {"place": tokens.signals["place"][keep]}
    holes = Tokens(tokens.x[keep], signals=signals)
    for budget in range(1, holes.n):
        assert not disagreement(holes, "evs", budget), budget


def test_holitom_takes_the_lower_threshold_up_to_an_eighth() -> None:
    angle = 0.77 * torch.arange(4.0)  # a cosine of 0.72 from frame to frame
    turn = torch.stack([angle.cos(), angle.sin()], -1)[:, None]
    x = torch.cat([turn.expand(4, 8, 2), torch.randn(8, 1).expand(4, 8, 1) * 0.1], -1)
    tokens = Tokens(x.flatten(0, 1), attn=torch.rand(32), grid=(4, 1, 8))

    def kept(spec: str) -> list[int]:
        return reduce(tokens, f"holitom{spec}").keep.tolist()

    for spec in (":4", "?ratio=0.125"):
        knob = "&" if "?" in spec else "?"
        assert kept(spec) == kept(f"{spec}{knob}tau=0.65") != kept(f"{spec}{knob}tau=0.8")
    for spec in (":5", "?ratio=0.126"):
        knob = "&" if "?" in spec else "?"
        assert kept(spec) == kept(f"{spec}{knob}tau=0.8") != kept(f"{spec}{knob}tau=0.65")


def test_tome_protects_special_tokens() -> None:
    tokens = make("equal", (1, 1, 21))
    for budget in range(3, 21):
        found = reduce(tokens, f"tome:{budget}?class_token=true&distill_token=true")
        assert found.keep[:2].tolist() == [0, 1] and found.sizes()[:2].tolist() == [1, 1]
    with pytest.raises(SpecError, match="choose at least 3"):
        reduce(tokens, "tome:2?class_token=true&distill_token=true")


def test_visionzip_refuses_more_contextual_tokens_than_budget() -> None:
    with pytest.raises(SpecError, match="contextual=9"):
        reduce(make("random", (1, 1, 20)), "visionzip:5?contextual=9")


def test_x_only_methods_run_inside_the_llm() -> None:
    tokens = Tokens(torch.randn(40, 8))
    for name in ("random", "uniform", "divprune"):
        assert reduce(tokens, f"{name}@llm3:10").m == 10


# Plausible bugs, each of which has to be seen: (method, module, name, replacement).
Fault = tuple[str, str, str, Callable[..., object]]


def _faults() -> list[Fault]:
    return [*_choosing_faults(), *_merging_faults(), *_mapping_faults()]


def _choosing_faults() -> list[Fault]:
    from mmfast.ops import ranking, video

    topk, cosine = ranking.stable_topk, video.temporal_cosine

    def least(score: torch.Tensor, count: int) -> torch.Tensor:
        return topk(-score, count)

    def late(x: torch.Tensor, frames: int) -> torch.Tensor:
        return cosine(x, frames).roll(1, -2)  # compares with the wrong frame

    return [
        ("fastv", "fastv", "stable_topk", least),
        ("visionzip", "visionzip", "stable_topk", least),
        ("holitom_inner", "holitom_inner", "stable_topk", least),
        ("evs", "evs", "temporal_cosine", late),
        ("evs", "evs", "stable_topk", least),
        ("divprune", "divprune", "max_min", lambda x, k: topk(x.norm(dim=-1), k)),
        ("divprune", "max_min", "most_isolated", lambda rows, twins: 0),
        ("holitom", "holitom", "temporal_cosine", late),
    ]


def _merging_faults() -> list[Fault]:
    from mmfast.ops import clustering, merging
    from mmfast.ops import video as quotas

    def wrong_partner(metric: torch.Tensor, count: int, **kw: bool) -> merging.Matching:
        found = merging.match(metric, count, **kw)
        return replace(found, target=(found.target + 1) % (metric.shape[-2] // 2))

    def most_similar(metric: torch.Tensor, count: int, **kw: bool) -> merging.Matching:
        found = merging.match(metric, metric.shape[-2] // 2, **kw)
        return replace(  # merges the least similar pairs
            found,
            unmerged=torch.cat([found.unmerged, found.source[..., :-count]], -1),
            source=found.source[..., -count:],
            target=found.target[..., -count:],
        )

    def all_dynamic(alike: torch.Tensor, longest: int) -> object:
        return [(f, f) for f in range(len(alike) + 1)], 0

    def ignored(places: list[int], dynamic: torch.Tensor, attn: torch.Tensor, r: float) -> object:
        return quotas.paper_quota(places, dynamic, -attn, r)

    def no_merge(x: torch.Tensor, count: int, neighbours: int) -> object:
        centres, member = clustering.dpc_knn(x, count, neighbours)
        return centres, (member + 1) % count

    def all_half(owner: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return torch.full(owner.shape, 0.5)

    return [
        ("visionzip", "merging", "_assign", lambda k, r, t: torch.zeros_like(r)),
        ("visionzip", "merging", "_weights", lambda m, t, half: torch.ones(t.shape)),
        ("holitom_inner", "holitom_inner", "_halvings", all_half),
        ("tome", "tome", "match", wrong_partner),
        ("tome", "tome", "match", most_similar),
        ("holitom", "holitom", "static_windows", all_dynamic),
        ("holitom", "holitom", "paper_quota", ignored),
        ("holitom", "holitom", "dpc_knn", no_merge),
        ("holitom", "holitom", "_weights", lambda c, m, beta: torch.ones(m.shape)),
        ("holitom", "holitom", "exact_quota", lambda quota, *rest: quota),
        ("pool", "pool", "split_box", lambda g, k: _slabs(g, k)),
    ]


def _mapping_faults() -> list[Fault]:
    prune, merge = Reduction.prune, Reduction.merge

    def shifted(keep: torch.Tensor, n: int) -> Reduction:
        return prune((keep + 1) % n, n)

    def summed(keep: torch.Tensor, target: torch.Tensor, weight: object = None) -> Reduction:
        return merge(keep, target, torch.ones(target.shape))

    def unsorted(keep: torch.Tensor, n: int) -> Reduction:
        good = prune(keep, n)
        return replace(good, keep=good.keep.flip(-1))

    def drifted(keep: torch.Tensor, n: int) -> Reduction:
        return prune(keep[..., :-1], n)

    faults: list[Fault] = [("pool", "", "merge", summed)]
    for name in ("random", "uniform", "fastv", "evs", "divprune"):
        faults += [(name, "", "prune", bug) for bug in (shifted, unsorted, drifted)]
    return faults


def _slabs(grid: tuple[int, int, int], count: int) -> list[tuple[int, ...]]:
    """Every token alone or nowhere: nothing is averaged."""
    places = [(t, y, x) for t in range(grid[0]) for y in range(grid[1]) for x in range(grid[2])]
    return [(t, t + 1, y, y + 1, x, x + 1) for t, y, x in places[:count]]


@pytest.mark.parametrize(
    ("name", "module", "attribute", "bug"),
    _faults(),
    ids=[f"{f[0]}-{f[2]}-{getattr(f[3], '__name__', '')}" for f in _faults()],
)
def test_oracle_sees_planted_faults(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
    attribute: str,
    bug: Callable,
) -> None:
    plan = importlib.import_module("mmfast.ops.merging")._plan
    request.addfinalizer(plan.cache_clear)  # plans made under a fault must not outlive it
    tokens = make("video", (6, 3, 4), seed=5)
    wide = (6, 2, 6)
    assert not disagreement(tokens, name, 20) and not disagreement(tokens, name, 5)
    if module:
        home = get(name).fn.__module__ if module == name else f"mmfast.ops.{module}"
        monkeypatch.setattr(f"{home}.{attribute}", bug)
    else:
        monkeypatch.setattr(Reduction, attribute, staticmethod(bug))
    others = [make("video", wide, seed=seed) for seed in (6, 7)]
    assert any(disagreement(t, name, budget) for t in (tokens, *others) for budget in (20, 5, 40))


def test_parse_lists_every_method() -> None:
    for method in METHODS:
        (spec,) = parse(spec_of(method, 0.5))
        assert spec.method is method
        with pytest.raises(SpecError, match="did you mean"):
            parse(method.name + "x:0.5")
