"""The planner's choice: evidence, targets, the ladder, and what it must never recommend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_rows import RATES, SHARES, WORK, Choosing, row

from mmfast.bench.cases import build
from mmfast.bench.results import append
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import methods, register, unregister
from mmfast.core.spec import parse
from mmfast.core.tokens import Tokens
from mmfast.planner.calibration import Bench
from mmfast.planner.candidates import Curve, Evidence, evidence_for, shipped_rows
from mmfast.planner.cost import Work
from mmfast.planner.learner import selection_ms
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner, PlanWarning
from mmfast.planner.rates import Rates
from mmfast.planner.target import Target, make_target, parse_bytes


def curve(method: str, scores: tuple[float, ...], **more: Any) -> list[dict[str, Any]]:
    pairs = zip(SHARES, scores, strict=False)
    return [row(f"{method}:{share}", score, 288 * share, **more) for share, score in pairs]


ROWS = [
    row(None, 0.98, 288),
    *curve("random", (0.95, 0.85, 0.6, 0.4)),
    *curve("evs", (0.98, 0.975, 0.9, 0.8)),
    *curve("divprune", (0.97, 0.96, 0.955, 0.85)),
    *curve("uniform", (0.94, 0.84, 0.6, 0.39)),  # below random, and equal to it at a tenth
    *curve("fastv@llm2", (0.98, 0.97, 0.97, 0.96)),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("tiny", ("llm", "ttft"), frames=2).model


def planner(model: Any, rows: list[dict[str, Any]] | None = None) -> Planner:
    made = Planner(model, name="m", rows=ROWS if rows is None else rows, rates=RATES)
    made.learner.key = None
    made.learner.rates = Rates(**{**vars(RATES), "select": Choosing()})
    return made


@pytest.mark.parametrize("rows", [ROWS, []])
def test_a_plan_that_misses_its_target_does_not_claim_to_meet_it(
    model: Any, rows: list[dict[str, Any]]
) -> None:
    """With methods that are measured, and without any, where all tokens are all there is."""
    with pytest.warns(PlanWarning, match="out of reach"):
        plan = planner(model, rows).decide(WORK, make_target(target_ttft_ms=0.01), strict=False)
    assert not plan.met and (plan.spec is None) is (not rows)
    assert plan.why[0].startswith("The time to first token 0.01 ms is out of reach here")
    assert not any("meets the target" in line for line in plan.why)
    kept = planner(model, rows).decide(WORK, make_target(target_ttft_ms=1e9))
    assert kept.met and kept.why == ("All visual tokens are kept: that meets the target.",)


def decide(model: Any, rows: list[dict[str, Any]] | None = None, **limits: Any) -> Plan:
    return planner(model, rows).decide(WORK, make_target(**limits))


def test_no_limit_keeps_everything(model: Any) -> None:
    assert planner(model).decide(WORK, Target()).spec is None
    loose = decide(model, target_ttft_ms=1e6)
    assert loose.spec is None and loose.kept_tokens == 128 and loose.met


def test_evidence_is_weighed_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request plans before its first token, and the rows are the same for all of them."""
    made, weighed = planner(model), list[str]()
    allowed = Evidence.allowed

    def counted(self: Evidence, curve: Curve, shares: Any) -> Any:
        weighed.append(curve.name)
        return allowed(self, curve, shares)

    monkeypatch.setattr(Evidence, "allowed", counted)
    first = made.decide(WORK, make_target(quality="high"))
    assert sorted(weighed) == ["divprune", "evs", "fastv", "random", "uniform"]
    assert made.decide(WORK, make_target(quality="high")) == first
    made.decide(WORK, make_target(target_ttft_ms=1e6))
    assert len(weighed) == len(set(weighed))


def test_quality_is_points_of_accuracy(model: Any) -> None:
    high = decide(model, quality="high")
    assert high.spec == "evs:0.25" and high.accuracy == (0.975, 0.98)
    assert decide(model, quality="balanced").spec in ("divprune:0.1", "divprune:0.12")
    fast = decide(model, quality="fast")
    assert fast.spec == "divprune:0.1" and fast.mean_tokens <= 0.1 * 128 + 0.5


def test_fast_counts_tokens_of_all_layers(model: Any) -> None:
    # fastv@llm2:0.05 answers most at a tenth, but half of the layers work on everything.
    assert "fastv" not in str(decide(model, quality="fast").spec)


@pytest.mark.parametrize("at", [0.05, 0.1, 0.25, 0.5])
def test_below_random_is_never_recommended(model: Any, at: float) -> None:
    tokens = round(at * 128)
    plan = decide(model, target_tokens=tokens)
    assert plan.spec is not None and not plan.spec.startswith(("uniform", "random"))
    reasons = {r.spec.partition(":")[0]: r.reason for r in plan.rejected}
    assert "not above random" in reasons["uniform"]
    only = [r for r in ROWS if not str(r["reduce"]).startswith(("evs", "divprune", "fastv"))]
    with pytest.raises(MmfastError, match="out of reach"):
        decide(model, only, target_tokens=tokens)


def test_random_at_the_same_site_counts_too(model: Any) -> None:
    rows = [r for r in ROWS if str(r["reduce"]).startswith(("None", "random", "fastv"))]
    assert "fastv" in str(decide(model, rows, target_tokens=90).spec)
    rows += curve("random@llm2", (0.985, 0.98, 0.975, 0.97))
    with pytest.raises(MmfastError):
        decide(model, rows, target_tokens=90)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_any_rows_any_target(model: Any, seed: int, data: st.DataObject) -> None:
    """No plan at or below random, no limit broken, and a tighter target never gets more."""
    rng = random.Random(seed)
    rows = [row(None, 0.9, 288)]
    for method in ("random", "evs", "divprune", "pool", "fastv@llm2", "fastv@llm1"):
        low = 20 if method == "random" else 40
        rows += curve(method, tuple(rng.randrange(low, low + 50) / 100 for _ in SHARES))
    made = planner(model, rows)
    costs = {name: rng.uniform(0, 30) for name in ("evs", "divprune", "pool", "fastv")}
    made.learner.rates = Rates(**{**vars(RATES), "select": Choosing(costs)})
    measure: dict[str, dict[float, float]] = {}
    for r in rows[1:]:
        name, _, share = r["reduce"].partition(":")
        measure.setdefault(name, {})[float(share)] = r["score"]
    name = data.draw(st.sampled_from(["target_tokens", "target_ttft_ms", "max_memory"]))
    top = {"target_tokens": 128, "target_ttft_ms": 100, "max_memory": 3_000_000}[name]
    values = sorted(data.draw(st.lists(st.integers(top // 4, top), min_size=9, max_size=30)))
    found = []
    for value in values:
        try:
            plan = made.decide(WORK, make_target(**{name: value}))
        except MmfastError:
            assert not found, "a looser target is met wherever a tighter one is"
            continue
        found.append(plan)
        reached = {
            "target_tokens": plan.mean_tokens,
            "target_ttft_ms": plan.total_ms,
            "max_memory": plan.total_bytes,
        }
        assert reached[name] <= value
        if plan.spec is not None:
            method, _, share = plan.spec.partition(":")
            at = float(share)
            below, above = [s for s in SHARES if s <= at], [s for s in SHARES if s > at]
            near = below[:1] if at in SHARES else below[:1] + above[-1:]
            label = "fastv@llm2" if method == "fastv" else method
            assert all(measure[label][s] > measure["random"][s] for s in near), plan.spec
    tokens = [plan.mean_tokens for plan in found]
    assert tokens == sorted(tokens)


def test_between_budgets_the_worse_counts() -> None:
    evidence = evidence_for("video", ROWS, "m")
    assert evidence is not None
    evs = next(c for c in evidence.curves if c.stages[0].method.name == "evs")
    assert evidence.accuracy(evs, 0.3) == 0.975 and evidence.accuracy(evs, 0.25) == 0.975
    assert evidence.accuracy(evs, 0.2) == 0.9 and evidence.accuracy(evs, 0.7) == 0.98
    assert evidence.accuracy(evs, 0.04) is None
    assert "no measured budget" in str(evidence.verdict(evs, 0.04))


def test_rows_of_the_kind_of_media(model: Any) -> None:
    pages = [row(None, 0.9, 288, suite="document"), row("evs:0.25", 0.5, 72, suite="document")]
    pages += curve("random", (0.8, 0.6, 0.3, 0.1), suite="document")
    pages += curve("pool", (0.88, 0.7, 0.4, 0.2), suite="document")
    on_clips = decide(model, ROWS + pages, quality="high")
    on_pages = decide(model, ROWS + pages, quality="balanced", kind="document")
    assert on_clips.spec == "evs:0.25" and on_pages.spec == "pool:0.5"
    assert on_pages.accuracy == (0.88, 0.9)


def test_other_questions_are_no_comparison(model: Any) -> None:
    easy = [*ROWS, *curve("pool", (0.98,) * 4, seed=7), *curve("pool", (0.98,) * 4, n=20)]
    assert "pool" not in str(decide(model, easy, target_tokens=13).spec)
    assert "pool" in str(decide(model, ROWS + curve("pool", (0.98,) * 4), target_tokens=13).spec)


def test_a_document_without_rows_keeps_half(model: Any) -> None:
    plan = decide(model, quality="balanced", kind="document")
    assert plan.spec is not None and plan.mean_tokens >= 64
    with pytest.raises(MmfastError, match="out of reach"):
        decide(model, target_tokens=20, kind="document")


def test_another_model_is_told_whose_rows_they_are(model: Any) -> None:
    made = planner(model)
    assert not any("no accuracy rows" in line for line in _why(made))
    made.name, made._known = "other", {}
    assert any("no accuracy rows of this model" in line for line in _why(made))


def _why(made: Planner) -> tuple[str, ...]:
    return made.decide(WORK, make_target(quality="balanced")).why


def test_sites_move_with_the_depth(model: Any) -> None:
    rows = [row(None, 0.98, 288, model="tiny-video")]
    rows += curve("random", (0.9, 0.8, 0.6, 0.4), model="tiny-video")
    rows += curve("fastv@llm4", (0.98, 0.98, 0.98, 0.97), model="tiny-video")
    # Layer 4 of the embedded model's 5 is layer 3.2 of 4, and the later one is the safer.
    plan = decide(model, rows, target_tokens=127)
    assert plan.spec is None or parse(plan.spec)[0].layer == 3


@pytest.fixture
def raster() -> Iterator[None]:
    """A method that needs a raster, and one that breaks on the tokens it gets."""

    @register("raster", needs=("x", "grid"))
    def on_raster(tokens: Tokens, budget: int | None) -> Reduction:
        """Keep the first tokens."""
        return Reduction.prune(torch.arange(budget or 1), tokens.n)

    @register("fussy")
    def fussy(tokens: Tokens, budget: int | None) -> Reduction:
        """Refuse everything."""
        raise SpecError("fussy wants at least a million tokens; give more")

    yield
    unregister("raster")
    unregister("fussy")


def test_a_method_that_refuses_is_passed_over(
    model: Any, raster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "duration", lambda *_: 0.01)  # of this machine, however busy
    made = planner(model, [*ROWS, *curve("fussy", (0.98,) * 4)])
    made.learner.rates = RATES
    plan = made.decide(WORK, make_target(quality="high"))
    assert plan.spec == "evs:0.25"
    assert "a million" in {r.spec: r.reason for r in plan.rejected}["fussy"]


def test_missing_signals_are_named(model: Any, raster: None) -> None:
    rows = [*ROWS, *curve("visionzip", (0.98,) * 4), *curve("raster", (0.98,) * 4)]
    tiles = Work(160, 1, (128,), 0, (None,))
    plan = planner(model, rows).decide(tiles, make_target(quality="high"))
    reasons = {r.spec: r.reason for r in plan.rejected}
    assert reasons["raster"].startswith("needs 'grid': the tokens are no full raster")
    assert reasons["visionzip"].endswith("the encoder, which does not run")
    assert plan.spec == "evs:0.25"


def test_out_of_reach_says_what_is(model: Any) -> None:
    with pytest.raises(MmfastError, match=r"the best is \d+ ms .* with divprune:0\.05") as caught:
        decide(model, target_ttft_ms=1)
    assert "\n" not in str(caught.value)
    made = planner(model)
    with pytest.warns(PlanWarning, match="running the fastest plan"):
        plan = made.decide(WORK, make_target(target_ttft_ms=1), strict=False)
    assert plan.spec == "divprune:0.05" and not plan.met
    with pytest.raises(MmfastError, match="MB"):  # memory does not bend
        made.decide(WORK, make_target(max_memory=10), strict=False)


def test_time_already_spent_counts(model: Any) -> None:
    made, target = planner(model), make_target(target_ttft_ms=80)
    early, late = made.decide(WORK, target), made.decide(WORK, target, spent=20)
    assert late.mean_tokens < early.mean_tokens and late.ttft_ms["read"] == 20
    assert late.total_ms <= 80


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"target_ttft_ms": -3}, ["target_ttft_ms=-3", "300"]),
        ({"target_ttft_ms": float("nan")}, ["nan"]),
        ({"target_ttft_ms": "fast"}, ["'fast'"]),
        ({"target_tokens": 0}, ["target_tokens=0", "64"]),
        ({"target_tokens": 2.5}, ["2.5", "whole"]),
        ({"target_tokens": True}, ["True"]),
        ({"max_memory": "lots"}, ["'lots'", "2GB"]),
        ({"max_memory": "-2GB"}, ["'-2GB'"]),
        ({"max_memory": -5}, ["-5"]),
        ({"quality": "hihg"}, ["did you mean 'high'", "balanced"]),
        ({"quality": "high", "kind": "vidoe"}, ["did you mean 'video'"]),
    ],
)
def test_nonsense_is_one_line(limits: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(MmfastError) as caught:
        make_target(**limits)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_sizes() -> None:
    assert parse_bytes("2GB") == 2 * 10**9 and parse_bytes("1.5 GiB") == 3 * 2**29
    assert parse_bytes("512mb") == 512 * 10**6 and parse_bytes(77) == 77 == parse_bytes("77")
    assert parse_bytes(None) is None


def test_shipped_rows_are_read() -> None:
    assert any(r["reduce"] is None for r in shipped_rows())


def test_separators_inside_a_string_part_no_shipped_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"suite": "video", "answer": "a\u2028b\x85c"}
    append(tmp_path / "results" / "eval-odd.jsonl", [row, row])
    monkeypatch.setattr("mmfast.planner.candidates.files", lambda package: tmp_path)
    assert shipped_rows.__wrapped__() == (row, row)
    evidence = evidence_for("video", None, "tiny-video", lambda name: 5)
    assert evidence is not None and evidence.own and evidence.baselines
    assert all(c.layers == 5 for c in evidence.curves)


def test_choosing_is_timed_for_every_method(model: Any) -> None:
    bench = planner(model).learner.bench
    torch.manual_seed(0)
    for method in methods("reducer"):
        stage = parse(f"{method.name}:0.25")[0]
        if stage.site in ("pre", "llm") and not any(
            WORK.lacks(stage.site, n) for n in method.needs
        ):
            assert selection_ms(bench, stage, WORK) > 0, method.name
