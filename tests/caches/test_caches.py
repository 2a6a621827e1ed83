"""Every registered cache policy against its oracle, and the promises all of them make."""

from __future__ import annotations

from collections.abc import Callable

import cache_checks as checks
import oracles_caches
import oracles_heads
import oracles_retrieve
import oracles_select
import pytest
import torch
from cache_checks import disagreement, evict, spec_of
from cache_factory import KINDS, layer_of, make, stacked
from hypothesis import given, settings
from hypothesis import strategies as st

import mmfast
from mmfast import MmfastError, Reduction, Tokens
from mmfast.caches.layers import kvcompose
from mmfast.caches.plan import ROLES, plan_cache
from mmfast.core import registry
from mmfast.core.registry import Method

METHODS = mmfast.methods("cache")
EVICTING = [m for m in METHODS if m.role in ("position", "score")]
OTHER_ORACLES = {
    "retrieve": oracles_retrieve,
    "select": oracles_select,
    "heads": oracles_heads,
}  # by role
by_name = pytest.mark.parametrize("method", EVICTING, ids=lambda m: m.name)


def lacking(methods: list[Method]) -> set[str]:
    """Policies without an oracle."""
    known = {*oracles_caches.ORACLES, *oracles_caches.STORES}
    return {m.name for m in methods if m.name not in known} - {
        m.name for m in methods if hasattr(OTHER_ORACLES.get(m.role), _own_name(m))
    }


def _own_name(method: Method) -> str:
    return "rekv" if method.name == "retrieve" else method.name  # the default, by another name


def test_every_policy_has_an_oracle_and_a_role() -> None:
    assert not lacking(METHODS)
    assert {m.role for m in METHODS} == set(ROLES)
    assert {m.moment for m in METHODS} <= {"prefill", "always"}
    assert all(m.sites == ("kv",) for m in METHODS)
    assert {*oracles_caches.ORACLES} == {m.name for m in EVICTING}


def test_a_policy_without_an_oracle_is_found() -> None:
    @mmfast.register("forgotten", kind="cache", sites=("kv",), role="score")
    def forgotten(tokens: Tokens, budget: int) -> Reduction:
        """Keep nothing in particular."""

    try:
        assert lacking(mmfast.methods("cache")) == {"forgotten"}
        with pytest.raises(KeyError, match="forgotten"):
            checks.check_contract(registry.get("forgotten", "cache"))
    finally:
        registry.unregister("forgotten", "cache")


@by_name
@pytest.mark.parametrize("kind", KINDS)
def test_oracle(method: Method, kind: str) -> None:
    checks.check_oracle(method, kind)


@by_name
@pytest.mark.parametrize("promise", checks.PROMISES, ids=lambda check: check.__name__[6:])
def test_promise(method: Method, promise: Callable[[Method], None]) -> None:
    promise(method)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("snapkv", {"window": 3, "kernel": 3}),
        ("snapkv", {"window": 5, "kernel": 1, "pool": "mean"}),
        ("snapkv", {"window": 4, "kernel": 9, "pool": "max"}),
        ("fastkv", {"window": 2, "kernel": 11}),
        ("finch", {"window": 3, "chunk": 0}),
        ("finch", {"window": 6, "chunk": 1}),
        ("finch", {"window": 2, "chunk": 7}),
        ("keynorm", {"group": 1}),
        ("keynorm", {"group": 5}),
        ("keyformer", {"noise": 0.0, "recent": 0.0}),
        ("keyformer", {"noise": 0.3, "recent": 0.6, "seed": 4}),
        ("random", {"seed": 7}),
        ("lagkv", {"sink": 2, "lag": 5}),
        ("lagkv", {"sink": 0, "lag": 1}),
        ("curdkv", {"sink": 0, "rank": 0}),
        ("curdkv", {"sink": 9, "rank": 3, "seed": 5}),
        ("chunkkv", {"window": 3, "chunk": 4}),
        ("chunkkv", {"window": 1, "chunk": 1}),
        ("chunkkv", {"window": 5, "chunk": 100}),
        ("h2o", {"recent": 0.0}),
        ("h2o", {"recent": 1.0}),
        ("capkv", {"tau": 0.0, "sink": 0}),
        ("capkv", {"tau": 20.0, "sink": 30}),
        ("entropy_chunkkv", {"window": 3, "chunk": 4, "few": 1}),
        ("entropy_chunkkv", {"window": 1, "chunk": 1}),
        ("entropy_chunkkv", {"window": 5, "chunk": 7, "few": 3}),
        ("cam", {"recent": 0.0, "merge": 1}),
        ("cam", {"recent": 1.0, "merge": 5}),
        ("vatp", {"sink": 0, "recent": 0.3}),
        ("vatp", {"sink": 3, "recent": 1.0}),
        ("leverage", {"sink": 0, "recent": 0, "rank": 0}),
        ("leverage", {"sink": 2, "recent": 9, "rank": 3, "seed": 4}),
        ("compactor", {"sink": 0, "recent": 0, "rank": 0}),
        ("compactor", {"sink": 3, "recent": 9, "rank": 3, "seed": 4, "blend": 0.1}),
        ("compactor", {"blend": 0.0}),
        ("kvzip", {"chunk": 1}),
        ("kvsquared", {"chunk": 1, "asks": 1.0}),
        ("fastkvzip", {"sink": 0, "recent": 0.0}),
        ("fastkvzip", {"sink": 9, "recent": 0.3}),
        ("criticalkv", {"window": 3, "first": 0.0, "kernel": 1}),
        ("criticalkv", {"window": 5, "first": 0.8, "epsilon": 0.1, "pool": "mean"}),
        ("expected_attention", {"sink": 0, "covariance": False}),
        ("expected_attention", {"sink": 30, "epsilon": 0.02}),
        ("mixkv", {"window": 3, "kernel": 1}),
        ("mixkv", {"window": 5, "kernel": 3, "pool": "mean"}),
        ("infinipot_v", {"tar": 0.0}),
        ("infinipot_v", {"tar": 1.0, "recent": 0.0}),
        ("infinipot_v", {"tar": 0.7, "recent": 0.6}),
        ("streammem", {"prototypes": False}),
        ("livevlm", {"recent": 0.0, "first": 0.0}),
        ("livevlm", {"recent": 0.7, "first": 1.0}),
        ("livevlm", {"recent": 0.1, "first": 0.29, "bucket": 3}),
        ("livevlm", {"recent": 0.0, "first": 0.2, "bucket": 9}),
        ("livevlm", {"recent": 0.0, "first": 0.1, "bucket": 100}),
        ("pyramidkv", {"beta": 1.0, "window": 3, "kernel": 3}),
        ("simlayerkv", {"threshold": 0.2, "window": 3}),
        ("simlayerkv", {"threshold": 0.7, "sink": 1}),
        ("simlayerkv", {"threshold": 0.0, "sink": 50}),
        ("lookm", {"merge": "averaged"}),
        ("lookm", {"merge": "weighted", "recent": 0.0}),
        ("lookm", {"merge": "none", "recent": 1.0}),
        ("streamingvlm", {"sink": 3.0, "text": 2.0}),
        ("streamingvlm", {"sink": 0.0, "text": 0.0}),
        ("streamingvlm", {"sink": 100.0, "text": 0.9}),
    ],
)
def test_oracle_with_knobs(name: str, knobs: dict[str, object]) -> None:
    for seed, kind in enumerate(("random", "ties", "film", "random")):
        tokens = make(kind, 2, 61, seed=seed)
        for budget in (1, 4, 17, 40, 60):
            assert not disagreement(tokens, name, budget, **knobs), (seed, budget)


@pytest.mark.parametrize("mass", [0.01, 0.3, 0.9, 0.975, 1.0])
def test_oracle_zipvl_adaptive(mass: float) -> None:
    for kind in KINDS:
        tokens = make(kind, 3, 50, seed=2)
        assert not disagreement(tokens, "zipvl", None, mass=mass), kind
    sharp = make("random", 2, 50)
    sharp.signals["attn_sum"][:, 7] = 1e4
    assert evict(sharp, "zipvl").keep.tolist() == [[7], [7]]  # one token holds it all
    assert evict(sharp, "zipvl?mass=1.0").m == 50


@pytest.mark.parametrize("beta", [1.0, 1.5, 20.0])
def test_a_pyramid_keeps_as_much_as_equal_layers(beta: float) -> None:
    """Budgets fall with depth and add up, whatever is too large for a layer."""
    tokens = make("random", 2, 61)
    for layers, mean in ((2, 1), (3, 20), (7, 30), (5, 44), (4, 60), (28, 9)):
        tokens.signals["depths"], kept = torch.tensor(layers), []
        for depth in range(layers):
            tokens.signals["depth"] = torch.tensor(depth)
            kept.append(evict(tokens, f"pyramidkv:{mean}?beta={beta}").m)
            assert not disagreement(tokens, "pyramidkv", mean, beta=beta)
        assert sum(kept) == layers * mean and kept == sorted(kept, reverse=True)
        last = min(8, max(mean // 2, 1))  # the window, which every layer keeps
        assert (kept[0] - kept[-1] > 1) == (beta > 1 and 61 - last >= 2 * (mean - last) > 0)
        assert kept[-1] >= last


@pytest.mark.parametrize("budget", ["12", "0.26"])
@pytest.mark.parametrize("first", [False, True])
def test_layers_compete_for_one_budget(first: bool, budget: str) -> None:
    """Tables of unlike length; together layers keep the budget, and the first may keep most."""
    lengths, kept = (61, 61, 40, 23), []
    parts = [make("random", 2, n, seed=seed) for seed, n in enumerate(lengths)]
    parts[2].signals["attn_repeated"] *= 1.1
    table = -torch.ones(4, 61, dtype=torch.float64)
    for row, part in zip(table, parts, strict=True):
        row[: part.n] = kvcompose.composite(part.signals["attn_repeated"])
    for depth, part in enumerate(parts):
        part.signals["depth"], part.signals["depths"] = torch.tensor(depth), torch.tensor(4)
        part.signals["layers_attn"] = table.expand(2, 4, 61)
        layer = layer_of(part)
        layer.layers = [each.signals["attn_repeated"].double().numpy() for each in parts]
        found = evict(part, f"kvcompose:{budget}?first={str(first).lower()}")
        assert found.keep.tolist() == [
            answer.keep for answer in oracles_caches.kvcompose(layer, 12, first=first)
        ]
        kept.append(found.m)
    assert sum(kept) == 4 * 12 and len({*kept}) > 2 and (kept[0] == max(kept)) == first


def test_a_batch_whose_layers_keep_unlike_numbers_is_refused() -> None:
    parts = [make("random", 2, 30, seed=seed) for seed in range(2)]
    for part, more in zip(parts, (1.0, 9.0), strict=True):
        part.signals["layers_attn"] = part.signals["layers_attn"] * torch.tensor([[[1.0], [more]]])
    with pytest.raises(MmfastError, match=r"'kvcompose' keeps .*one by one"):
        evict(stacked(parts), "kvcompose:9")


def test_a_lazy_layer_keeps_its_ends_alone() -> None:
    tokens = make("random", 2, 50)
    ends, attn = [*range(4), *range(44, 50)], tokens.signals["attn_window"]
    attn[:] = 0.08 / 40
    attn[:, ends] = 0.092
    assert evict(tokens, "simlayerkv?recent=6").keep.tolist() == [ends] * 2
    assert evict(tokens, "simlayerkv:10").keep.tolist() == [ends] * 2
    assert evict(tokens, "simlayerkv:10?threshold=0.93").m == 50
    assert not disagreement(tokens, "simlayerkv", None, recent=6)


def test_fastkv_votes_as_the_reducer_of_its_name_does() -> None:
    tokens = make("random", 2, 60)
    votes = Tokens(tokens.x, signals={"attn_window": tokens.signals["attn_window"]})
    cut = mmfast.reduce(votes, "fastkv@llm2:20")
    assert isinstance(cut, Reduction)
    tail = evict(tokens, "fastkv:21?window=1")
    both = [set(a) & set(b) for a, b in zip(cut.keep.tolist(), tail.keep.tolist(), strict=True)]
    assert min(map(len, both)) >= 18  # they differ next to the window only


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("sink:4+window:9", {"sink": 4, "window": 9}),
        ("sink:4+window:9+streamingvlm:20", {"sink": 4, "window": 9, "streamingvlm": 20}),
    ],
)
def test_positions_add_up_as_a_union(spec: str, names: dict[str, int]) -> None:
    tokens = make("random", 2, 70)
    union: set[int] = set()
    for name, budget in names.items():
        union |= set(oracles_caches.ORACLES[name](layer_of(tokens), budget)[0].keep)
    assert evict(tokens, spec).keep.tolist() == [sorted(union)] * 2
    plan = plan_cache(spec)
    assert plan is not None
    assert plan.standing(tokens.signals["kind"]).nonzero()[:, 0].tolist() == sorted(union)


@pytest.mark.parametrize(
    "score", ["snapkv:12?window=3", "lookm:0.2", "keynorm:9", "zipvl:8", "cam:8?merge=3"]
)
def test_a_score_chooses_among_what_does_not_stand(score: str) -> None:
    tokens = make("random", 2, 60, seed=3)
    rest = torch.arange(4, 54)
    part = Tokens(
        tokens.x[:, rest],
        signals={
            name: value
            if value.ndim == 0 or name.startswith("query_")
            else value[..., rest, :]
            if name == "values"
            else value[..., rest]
            for name, value in tokens.signals.items()
        }
        | {"behind": 60 - rest},
    )
    number = 12 if score == "lookm:0.2" else int(score.split("?")[0].split(":")[1])
    alone = evict(part, spec_of(score.split(":")[0], number, **_knobs(score)))
    found = evict(tokens, f"sink:4+window:6+{score}")
    assert found.m == 10 + number
    for head in range(2):
        chosen = [4 + i for i in alone.keep[head].tolist()]
        assert found.keep[head].tolist() == [0, 1, 2, 3, *chosen, *range(54, 60)]
    torch.testing.assert_close(
        found.apply(tokens.x)[:, 4:-6],
        alone.apply(part.x),  # merges stay among the chosen ones
    )


def _knobs(spec: str) -> dict[str, object]:
    pairs = spec.partition("?")[2]
    return dict([pairs.split("=")]) if pairs else {}


@settings(max_examples=60)
@given(
    method=st.sampled_from(EVICTING),
    kind=st.sampled_from(KINDS),
    heads=st.integers(1, 3),
    n=st.integers(1, 60),
    budget=st.one_of(st.integers(1, 80), st.floats(0.01, 1.0)),
    seed=st.integers(0, 9),
)
def test_any_cache_any_budget(
    method: Method, kind: str, heads: int, n: int, budget: float, seed: int
) -> None:
    tokens = make(kind, heads, n, seed=seed)
    knobs, number = checks.exact(method), budget if isinstance(budget, int) else f"{budget:.4f}"
    found = evict(tokens, spec_of(method, number, **knobs))
    share = round(float(f"{budget:.4f}") * n)
    assert found.m == (min(budget, n) if isinstance(budget, int) else max(1, share))
    assert not disagreement(tokens, method.name, found.m, **knobs)


@settings(max_examples=40)
@given(
    sinks=st.integers(1, 9),
    last=st.integers(1, 30),
    score=st.sampled_from([m for m in EVICTING if m.role == "score"]),
    budget=st.integers(1, 50),
    n=st.integers(1, 60),
)
def test_budgets_add_up(sinks: int, last: int, score: Method, budget: int, n: int) -> None:
    spec = spec_of(score, budget, **checks.exact(score))
    found = evict(make("random", 2, n), f"sink:{sinks}+window:{last}+{spec}")
    assert found.m == min(sinks + last + budget, n)
    places = {*range(min(sinks, n)), *range(max(n - last, 0), n)}
    assert all(places <= set(row) for row in found.keep.tolist())
