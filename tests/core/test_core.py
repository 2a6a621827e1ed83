"""Tokens, Reduction, registry, spec strings and trace: properties over random input."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmfast
from mmfast import Mix, MmfastError, Reduction, SpecError, Tokens, Trace
from mmfast.core import registry
from mmfast.core.errors import unknown, warn
from mmfast.core.spec import count, parse, run
from mmfast.core.trace import free_bytes

settings.register_profile("mmfast", max_examples=60)
settings.load_profile("mmfast")


@st.composite
def reductions(draw: st.DrawFn, n: int | None = None) -> Reduction:
    """A pruning, a plain mean or a weighted mean of `n` tokens, with two leading items."""
    n = draw(st.integers(1, 24)) if n is None else n
    m = draw(st.integers(1, n))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    keep = torch.stack([torch.randperm(n, generator=g)[:m] for _ in range(2)])
    kind = draw(st.sampled_from(["prune", "mean", "weighted"]))
    if kind == "prune":
        return Reduction.prune(keep, n)
    slot = torch.randint(-1, m, (2, n), generator=g)
    target = keep.gather(-1, slot.clamp_min(0)).masked_fill(slot < 0, -1)
    target.scatter_(-1, keep, keep)
    weight = torch.rand(2, n, generator=g, dtype=torch.float64) if kind == "weighted" else None
    return Reduction.merge(keep, target, weight)


def dense(reduction: Reduction) -> torch.Tensor:
    """The Reduction as a matrix `[2, M, N]`, from its definition, by loops."""
    matrix = torch.zeros(2, reduction.m, reduction.n, dtype=torch.float64)
    for item in range(2):
        owner = reduction.owner[item].tolist()
        for source, slot in enumerate(owner):
            if slot >= 0:
                share = 1 / owner.count(slot)
                if reduction.weight is not None:
                    share = float(reduction.weight[item, source])
                matrix[item, slot, source] = share
    return matrix


@given(reductions())
def test_reduction_is_what_its_fields_say(reduction: Reduction) -> None:
    reduction.check()
    x = torch.randn(2, reduction.n, 3, dtype=torch.float64)
    matrix = dense(reduction)
    torch.testing.assert_close(reduction.apply(x), matrix @ x)
    torch.testing.assert_close(reduction.share(), matrix.sum(1).to(reduction.share().dtype))
    assert reduction.sizes().equal(
        (reduction.owner[:, None] == torch.arange(reduction.m)[:, None]).sum(-1)
    )
    back = reduction.expand(reduction.apply(x))
    for item in range(2):
        for source, slot in enumerate(reduction.owner[item].tolist()):
            expected = reduction.apply(x)[item, slot] if slot >= 0 else torch.zeros(3)
            assert back[item, source].equal(expected.to(back.dtype))
    for item in range(2):
        alone = reduction.select(item)
        torch.testing.assert_close(alone.apply(x[item]), reduction.apply(x)[item])


@given(st.data())
def test_composition_law(data: st.DataObject) -> None:
    first = data.draw(reductions())
    second = data.draw(reductions(first.m))
    both = first.then(second)
    both.check()
    x = torch.randn(2, first.n, 3, dtype=torch.float64)
    torch.testing.assert_close(both.apply(x), second.apply(first.apply(x)))
    assert both.keep.equal(first.keep.gather(-1, second.keep))
    if second.pure or first.pure:
        kept = torch.where(second.owner >= 0, first.sizes(), 0).sum()
        assert both.sizes().sum() == kept
    identity = Reduction.identity(first.m, (2,))
    torch.testing.assert_close(first.then(identity).apply(x), first.apply(x))
    torch.testing.assert_close(
        Reduction.identity(first.n, (2,)).then(first).apply(x), first.apply(x)
    )


@given(st.data())
def test_composition_is_associative(data: st.DataObject) -> None:
    a = data.draw(reductions())
    b = data.draw(reductions(a.m))
    c = data.draw(reductions(b.m))
    left, right = a.then(b).then(c), a.then(b.then(c))
    assert left.keep.equal(right.keep) and left.owner.equal(right.owner)
    torch.testing.assert_close(dense(left), dense(right), rtol=1e-5, atol=1e-7)


def test_a_mean_of_means_is_weighted_by_size() -> None:
    pairs = Reduction.merge(torch.tensor([0, 2]), torch.tensor([0, 0, 2, 2, 2]))
    one = Reduction.merge(torch.tensor([0]), torch.tensor([0, 0]))
    x = torch.tensor([[1.0], [3.0], [6.0], [6.0], [6.0]])
    assert pairs.then(one).apply(x).item() == 4  # the mean of 2 and 6, as done one after the other


@given(reductions(), st.sampled_from([torch.bfloat16, torch.float16]))
def test_half_precision_accumulates_in_float32(reduction: Reduction, dtype: torch.dtype) -> None:
    x = torch.randn(2, reduction.n, 3).to(dtype)
    out = reduction.apply(x)
    assert out.dtype == dtype
    if reduction.pure:
        assert out.equal(x.gather(1, reduction.keep[..., None].expand(-1, -1, 3)))
    else:
        assert out.equal(reduction.apply(x.float()).to(dtype))


def test_emission_order_and_mix() -> None:
    reduction = Reduction(
        torch.tensor([1, 3]), torch.tensor([-1, 0, -1, 1]), order=torch.tensor([1, 0]), pure=True
    )
    x = torch.arange(4.0)[:, None]
    assert reduction.apply(x).flatten().tolist() == [1, 3]
    assert reduction.apply(x, emit=True).flatten().tolist() == [3, 1]
    mix = Mix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 0.5]))
    mixed = Reduction(torch.tensor([0, 1]), torch.tensor([0, 1, -1, -1]), mix=mix)
    assert mixed.apply(x).flatten().tolist() == [2, 0.5]
    assert mixed.then(Reduction.identity(2)).apply(x).flatten().tolist() == [2, 0.5]


def _some(n: int, m: int, kind: str, seed: int, lead: tuple[int, ...] = ()) -> Reduction:
    """A random Reduction of one kind: a choice, weighted groups, or triplets."""
    g = torch.Generator().manual_seed(seed)
    keep = torch.rand(*lead, n, generator=g).argsort(-1)[..., :m]
    if kind == "prune":
        return Reduction.prune(keep, n)
    target = keep.gather(-1, torch.randint(0, m, (*lead, n), generator=g))
    target = target.scatter(-1, keep, keep)
    weight = torch.rand(*lead, n, generator=g)
    merged = Reduction.merge(keep, target, weight if kind == "weighted" else None)
    if kind != "mix":
        return merged
    count = 3 * m
    output = torch.randint(0, m, (*lead, count), generator=g)
    source = torch.randint(0, n, (*lead, count), generator=g)
    mix = Mix(output, source, torch.rand(*lead, count, generator=g))
    return Reduction(merged.keep, merged.owner, mix=mix)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("second", ["prune", "merge", "weighted", "mix"])
@pytest.mark.parametrize("first", ["prune", "merge", "weighted", "mix"])
def test_then_is_one_after_the_other(first: str, second: str, lead: tuple[int, ...]) -> None:
    a, b = _some(12, 7, first, 1, lead), _some(7, 4, second, 2, lead)
    x = torch.randn(*lead, 12, 5, dtype=torch.float64)
    both = a.then(b)
    both.check()
    torch.testing.assert_close(both.apply(x), b.apply(a.apply(x)), rtol=1e-5, atol=1e-6)
    assert both.keep.equal(a.keep.gather(-1, b.keep))


def test_stack() -> None:
    items = [Reduction.prune(torch.tensor([1, 4]), 6), Reduction.prune(torch.tensor([0, 2]), 6)]
    both = Reduction.stack(items, (2,))
    assert both.keep.tolist() == [[1, 4], [0, 2]] and both.pure
    means = [*items, Reduction.merge(torch.tensor([0, 1]), torch.tensor([0, 1, 1, 1, -1, -1]))]
    x = torch.randn(3, 6, 4)
    together = Reduction.stack(means, (3,)).apply(x)
    for index, one in enumerate(means):
        torch.testing.assert_close(together[index], one.apply(x[index]))


@pytest.mark.parametrize(
    ("keep", "owner", "words"),
    [
        ([2, 1], [-1, 1, 0], "not strictly ascending"),
        ([1, 1], [-1, 1, -1], "not strictly ascending"),
        ([0, 3], [0, -1, 1], "keep is out of range"),
        ([0, 2], [0, 2, 1], "owner is out of range"),
        ([0, 2], [0, -2, 1], "owner is out of range"),
        ([0, 2], [1, 0, 0], "does not own its slot"),
    ],
)
def test_check_names_the_broken_invariant(keep: list[int], owner: list[int], words: str) -> None:
    with pytest.raises(MmfastError, match=words):
        Reduction(torch.tensor(keep), torch.tensor(owner)).check()


def test_wrong_shapes_are_refused() -> None:
    reduction = Reduction.identity(4)
    for shape in [(3, 2), (2, 4, 2), (4,)]:
        with pytest.raises(MmfastError, match="shape"):
            reduction.apply(torch.zeros(shape))
    two = Reduction.prune(torch.tensor([0, 2]), 4)
    for shape in [(4, 2), (3, 2), (2, 2, 2), (2,)]:
        with pytest.raises(MmfastError, match=r"expand got shape .*; give \[2, D\]"):
            two.expand(torch.zeros(shape))
    with pytest.raises(MmfastError, match="cannot compose"):
        reduction.then(Reduction.identity(3))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tokens([[1.0]]), ["list", "torch tensor"]),
        (lambda: Tokens(torch.zeros(4)), ["shape [4]"]),
        (lambda: Tokens(torch.zeros(4, 2, dtype=torch.int64)), ["int64", "floating"]),
        (lambda: Tokens(torch.zeros(0, 2)), ["no token"]),
        (lambda: Tokens(torch.zeros(4, 2), attn=torch.zeros(3)), ["[3]", "[4]"]),
        (lambda: Tokens(torch.zeros(4, 2), grid=(1, 2, 3)), ["(1, 2, 3)", "4 tokens"]),
        (lambda: Tokens(torch.zeros(4, 2), grid=(-1, -2, 2)), ["(-1, -2, 2)"]),
        (lambda: Tokens(torch.zeros(4, 2), grid=4), ["Tokens.grid is 4", "(frames, rows, col"]),
        (lambda: Tokens(torch.zeros(4, 2), grid=(1.0, 2, 2)), ["(1.0, 2, 2)"]),
        (lambda: Tokens(torch.zeros(4, 2), attn=5), ["Tokens.attn is an int; give a tensor"]),
        (lambda: Tokens(torch.zeros(4, 2), query=[1.0]), ["Tokens.query is a list"]),
        (lambda: mmfast.reduce(torch.zeros(4, 2), "divprune:2"), ["a Tensor", "mmfast.Tokens(x)"]),
        (lambda: mmfast.methods(["reducer"]), ["unknown kind ['reducer']", "reducer"]),
        (lambda: mmfast.pipeline(["video-qa"]), ["unknown task ['video-qa']", "video-qa"]),
        (
            lambda: mmfast.calibrate_heads("x"),
            ["a str has no decoder with heads", "from_pretrained"],
        ),
        (lambda: Tokens(torch.zeros(4, 2)).need("keys"), ["keys"]),
    ],
)
def test_bad_tokens(make: object, words: list[str]) -> None:
    with pytest.raises(MmfastError) as error:
        make()
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_are_not_finite(value: float, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 5, 3, dtype=dtype)
    x[1, 4, 2] = value
    with pytest.raises(MmfastError, match=r"x is not finite at \[1, 4, 2\]"):
        mmfast.reduce(Tokens(x), "uniform:2")
    with pytest.raises(MmfastError, match=r"attn is not finite at \[4\]"):
        mmfast.reduce(Tokens(torch.zeros(5, 3), attn=x[1, :, 2]), "fastv@pre:2")
    large = torch.full((5, 3), torch.finfo(dtype).max, dtype=dtype)
    assert mmfast.reduce(Tokens(large), "uniform:2").m == 2


@pytest.mark.parametrize(
    ("spec", "where", "budget", "knobs"),
    [
        ("evs", "pre", None, {}),
        ("evs:0.25", "pre", 0.25, {}),
        ("evs:25", "pre", 25, {}),
        ("evs:1.0", "pre", 1.0, {}),
        ("evs:2.5e-1", "pre", 0.25, {}),
        ("evs?threshold=0.3", "pre", None, {"threshold": 0.3}),
        ("evs:7?threshold=3e-1&parity=true", "pre", 7, {"threshold": 0.3, "parity": True}),
        ("fastv:0.5", "llm2", 0.5, {}),
        ("fastv@llm17:0.5", "llm17", 0.5, {}),
        ("fastv@pre:8", "pre", 8, {}),
        ("tome@vit:0.5", "vit", 0.5, {}),
        (" random:3?seed=9 ", "pre", 3, {"seed": 9}),
    ],
)
def test_parse(spec: str, where: str, budget: object, knobs: dict[str, object]) -> None:
    (stage,) = parse(spec)
    assert (stage.where, stage.budget, dict(stage.knobs)) == (where, budget, knobs)
    assert type(stage.budget) is type(budget)
    assert parse(str(stage)) == (stage,)  # what is printed can be read again


def test_parse_stages() -> None:
    assert parse(None) == parse("") == parse("  ") == ()
    names = [stage.method.name for stage in parse("evs:0.25 + fastv@llm3:0.5+random:1")]
    assert names == ["evs", "fastv", "random"]
    (stage,) = parse("evs?threshold=1e+0")
    assert stage.knobs == {"threshold": 1.0}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("divprun:0.5", ["divprun", "did you mean 'divprune'", "choices"]),
        ("xyzzy:0.5", ["xyzzy", "choices: ", "divprune"]),
        ("divprune", ["needs a budget", "divprune:0.25"]),
        ("divprune:", ["budget ''"]),
        ("divprune:0", ["budget 0"]),
        ("divprune:-3", ["budget -3"]),
        ("divprune:0.0", ["budget 0.0", "(0, 1]"]),
        ("divprune:1.5", ["budget 1.5", "(0, 1]"]),
        ("divprune:nan", ["budget nan"]),
        ("divprune:inf", ["budget inf"]),
        ("divprune:many", ["'many'"]),
        ("divprune@vit:0.5", ["'vit'", "choices: pre, llm<K>"]),
        ("divprune@llm:0.5", ["'llm'", "llm3"]),
        ("divprune@pre3:0.5", ["'pre3'"]),
        ("divprune@:0.5", ["''"]),
        ("divprune:0.5?seed=3", ["seed", "choices: parity"]),
        ("adaptinfer:0.5?seed=3", ["it has none", "seed"]),
        ("random:0.5?seed=x", ["seed='x'", "int"]),
        ("random:0.5?seed", ["no value", "seed=0"]),
        ("random:0.5?seed=", ["no value"]),
        ("random:0.5?seed=1&seed=2", ["seed", "twice"]),
        ("divprune:0.5?parity=maybe", ["maybe", "bool"]),
        ("+", ["cannot read"]),
        ("evs:0.5+", ["cannot read"]),
        ("evs:0.5:0.5", ["cannot read"]),
        (":0.5", ["cannot read"]),
        ("snapkv:0.5", ["unknown reducer 'snapkv'", "cache policy", "cache= (--cache)"]),
        (7, ["int"]),
    ],
)
def test_spec_errors(spec: str, words: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        parse(spec)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_budget_and_missing_signal_errors() -> None:
    tokens = Tokens(torch.randn(10, 4))
    with pytest.raises(SpecError, match="budget 11 is more than the 10 tokens"):
        mmfast.reduce(tokens, "uniform:11")
    with pytest.raises(SpecError, match="'fastv' needs 'attn'"):
        mmfast.reduce(tokens, "fastv@pre:3")
    with pytest.raises(SpecError, match="empty"):
        mmfast.reduce(tokens, "")


@given(st.floats(0, 1, exclude_min=True), st.integers(1, 7000))
def test_count(share: float, n: int) -> None:
    kept = count(share, n)
    assert kept is not None and 1 <= kept <= n and abs(kept - max(share * n, 1)) <= 0.5
    assert count(n, n) == n and count(1.0, n) == n and count(None, n) is None


def test_stages_compose() -> None:
    x = torch.randn(2, 48, 6)
    tokens = Tokens(x, attn=torch.rand(2, 48), grid=(3, 4, 4))
    both = mmfast.reduce(tokens, "pool:24+fastv@pre:5")
    pool = mmfast.reduce(tokens, "pool:24")
    fastv = mmfast.reduce(
        Tokens(pool.apply(x), attn=tokens.attn.gather(-1, pool.keep)), "fastv@pre:5"
    )
    assert both.m == 5 and both.keep.equal(pool.keep.gather(-1, fastv.keep))
    torch.testing.assert_close(both.apply(x), fastv.apply(pool.apply(x)))


def test_adaptive_on_a_batch_is_a_list() -> None:
    x = torch.randn(2, 12, 4)
    x[1, 4:] = x[1, :4].repeat(2, 1)
    found = mmfast.reduce(Tokens(x, grid=(3, 2, 2)), "evs")
    assert isinstance(found, list) and found[0].m > found[1].m == 4
    with pytest.raises(SpecError, match="one by one"):
        mmfast.reduce(Tokens(x, grid=(3, 2, 2)), "evs+random:1")
    one = mmfast.reduce(Tokens(x[1], grid=(3, 2, 2)), "evs+random:3")
    assert isinstance(one, Reduction) and one.m == 3


def test_a_method_that_misses_its_budget_is_reported() -> None:
    @mmfast.register("drifting")
    def drifting(tokens: Tokens, budget: int) -> Reduction:
        """Keep one token less than asked."""
        return Reduction.prune(torch.arange(budget - 1), tokens.n)

    try:
        with pytest.raises(MmfastError, match="'drifting' kept 3 tokens instead of 4"):
            mmfast.reduce(Tokens(torch.randn(9, 2)), "drifting:4")
    finally:
        registry.unregister("drifting")


def test_registry() -> None:
    rows = mmfast.methods("reducer")
    assert [row.name for row in rows] == sorted(row.name for row in rows)
    for row in rows:
        assert set(row.to_dict()) == {"name", "kind", "paper", "needs", "summary"}
        assert row["summary"].endswith(".") and len(row.summary) < 100
        assert json.dumps(row.to_dict())
    with pytest.raises(SpecError, match="unknown kind 'reducers'"):
        mmfast.methods("reducers")
    with pytest.raises(SpecError, match="already registered"):
        mmfast.register("evs")(lambda tokens, budget: None)
    with pytest.raises(SpecError, match="docstring"):
        mmfast.register("bare")(lambda tokens, budget: None)


def test_run_short_circuits_a_full_budget() -> None:
    (spec,) = parse("fastv@pre:1.0")
    assert run(spec, Tokens(torch.randn(5, 2))).keep.tolist() == [0, 1, 2, 3, 4]  # needs no attn


def test_trace() -> None:
    trace = Trace()
    with trace.stage("vit", tokens_in=8) as row:
        row.tokens_out = 4
    with pytest.raises(RuntimeError), trace.stage("llm"):
        raise RuntimeError
    trace.add("decode", 4, 4, 1.5)
    reduction = mmfast.reduce(Tokens(torch.randn(6, 2)), "uniform:2")
    trace.record("pre", 0, reduction)
    assert [row.stage for row in trace.rows] == ["vit", "llm", "decode"]
    assert trace.rows[0]["tokens_out"] == 4 and trace.rows[0].ms >= 0
    document = json.loads(json.dumps(trace.to_dict()))
    assert document["reductions"][0]["keep"] == reduction.keep.tolist()
    assert set(document["rows"][0]) == {"stage", "tokens_in", "tokens_out", "ms", "peak_bytes"}
    assert "decode" in str(trace) and len(str(trace).splitlines()) == 4


def test_apply_does_not_depend_on_the_order_of_sources() -> None:
    """A sum over sources in ascending order: twice the same, bit for bit."""
    rng = random.Random(0)
    target = torch.tensor([rng.choice([0, 50]) for _ in range(100)])
    target[0], target[50] = 0, 50
    merged = Reduction.merge(torch.tensor([0, 50]), target)
    x = torch.randn(100, 7)
    assert merged.apply(x).equal(merged.apply(x.clone()))


def test_free_bytes_keep_within_the_limit_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, limits = torch.device("cpu"), (("1000", 600), ("300", 0))
    free = free_bytes(cpu, tmp_path)
    if free is None:
        pytest.skip("no /proc/meminfo here")
    assert free > 1 << 20
    (tmp_path / "memory.current").write_text("400\n")
    for most, rest in limits:
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert free_bytes(cpu, tmp_path) == rest
    for most in ("max", ""):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert (free_bytes(cpu, tmp_path) or 0) > 1 << 20
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 20))
    assert free_bytes(torch.device("cuda")) == 7


def test_a_warning_stands_at_the_callers_line() -> None:
    """Not at the frames of mmfast, torch and decorators between."""
    code = compile("def passed_on():\n    warn('look')\n", "inside.py", "exec")
    inside: dict[str, Any] = {"__name__": "mmfast.somewhere", "warn": warn}
    exec(code, inside)

    @contextmanager
    def around() -> Iterator[None]:
        inside["passed_on"]()
        yield

    for call in (inside["passed_on"], lambda: around().__enter__()):
        with pytest.warns(UserWarning, match="look") as seen:
            call()
        assert Path(seen[0].filename).name == Path(__file__).name


def test_an_unknown_name_where_there_is_none_to_choose() -> None:
    assert unknown("part", "what", []) == "unknown part 'what'; there is none to choose"
    near = "unknown option 'devcie'; did you mean 'device'?"  # a name that is known, but not listed
    assert unknown("option", "devcie", [], ["device", "dtype"]) == near
    assert unknown("part", "whot", ["what"]).endswith("did you mean 'what'? choices: what")
    assert "did you mean 'EVS'?" in unknown("part", "evs", ["EVS", "dtd"])
