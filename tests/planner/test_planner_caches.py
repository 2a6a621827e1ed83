"""KV policies for a limit of memory: when they are taken, and their bytes against those of runs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runs import CLIP, QUESTION, run
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_rows import RATES, SHARES, WORK, Choosing, row

import mmfast
from mmfast.attach import attach
from mmfast.bench.cases import build
from mmfast.caches.plan import plan_cache
from mmfast.cli.output import print_answer
from mmfast.compressors.base import save
from mmfast.core.errors import MmfastError
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.early_exit import new_adapter
from mmfast.models.kv.packs import nbytes
from mmfast.models.kv.view import ViewStage
from mmfast.models.loading import embedded_path
from mmfast.pipelines.answer import Answer
from mmfast.planner import learner
from mmfast.planner.auto import say
from mmfast.planner.caches import cache_evidence
from mmfast.planner.candidates import evidence_for, shipped_rows
from mmfast.planner.cost import DraftShape, ModelShape, Work, held_bytes, shape_of
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.rates import VARIABLE, Rates
from mmfast.planner.target import make_target

TOLERANCE = 0.01  # of the bytes behind a prompt
BLOCK = 128  # tokens that may wait to be packed at the end of an answer
LIMIT = 6_750_000  # bytes beside the weights: below all tokens, and above `quant:2`
SPECS = ("lagkv:0.25", "quant:8", "quant:2")


def kept(spec: str | None, score: float, **more: Any) -> dict[str, Any]:
    return row(None, score, 288, cache=spec, n=500) | more


def curve(method: str, scores: tuple[float, ...], make: Any = kept) -> list[dict[str, Any]]:
    pairs = zip(SHARES, scores, strict=True)
    if make is kept:
        return [kept(f"{method}:{share}", score) for share, score in pairs]
    return [row(f"{method}:{share}", score, 288 * share) for share, score in pairs]


REDUCED = [
    row(None, 0.98, 288),
    *curve("random", (0.9, 0.8, 0.6, 0.4), row),
    *curve("evs", (0.97, 0.95, 0.9, 0.8), row),
]
KEPT = [
    kept(None, 0.9),
    *curve("random", (0.7, 0.6, 0.5, 0.4)),
    *curve("lagkv", (0.9, 0.9, 0.86, 0.7)),
    *curve("tova", (0.7, 0.6, 0.5, 0.4)),  # no better than random
    kept("quant:8", 0.9),
    kept("quant:2", 0.87),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return build("tiny", ("llm", "ttft"), frames=2).model


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A pipeline whose planner need not measure: bytes are asked for, and no time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("rates")))
        patch.setattr(learner, "read_rates", lambda key: RATES)
        patch.setattr(learner.Learner, "settle", lambda *given, **more: "")
        patch.setattr(learner.Learner, "learn", lambda *given, **more: None)
        yield mmfast.pipeline("video-qa", device="cpu", max_new_tokens=600)


def planner(model: Any, rows: list[dict[str, Any]]) -> Planner:
    made = Planner(model, name="m", rows=rows, rates=RATES)
    made.learner.key = None
    made.learner.rates = Rates(**{**vars(RATES), "select": Choosing()})
    return made


def decide(
    model: Any, rows: list[dict[str, Any]], answer: int = 0, caches: bool = True, **limits: Any
) -> Plan:
    work = WORK.__class__(**{**vars(WORK), "answer": answer})
    return planner(model, rows).decide(work, make_target(**limits), caches=caches)


def fixed(plan: Plan) -> int:
    """Bytes that no choice changes."""
    return plan.memory["weights"]


def test_a_policy_is_taken_where_it_loses_less(model: Any) -> None:
    whole = decide(model, REDUCED + KEPT, answer=500, max_memory="1GB")
    assert whole.cache is None and whole.spec is None
    tight = whole.total_bytes - 1
    reduced = decide(model, REDUCED, answer=500, max_memory=tight)
    plan = decide(model, REDUCED + KEPT, answer=500, max_memory=tight)
    assert reduced.spec is not None and reduced.cache is None and plan.spec is None
    assert plan.cache is not None and plan.total_bytes <= tight
    assert plan.accuracy == (0.98, 0.98) and reduced.accuracy[0] == 0.97
    line = plan.why[0]
    assert "\n" not in line and f"cache {plan.cache} holds" in line and "97.0%" in line
    assert any("is sure of" in each and "500 questions" in each for each in plan.why)
    assert plan.to_dict()["cache"] == plan.cache and plan.to_dict()["reduce"] is None


def test_not_where_time_counts_or_the_call_has_one(model: Any) -> None:
    whole = decide(model, REDUCED + KEPT, answer=500, max_memory="1GB").total_bytes
    for more in ({"target_ttft_ms": 1e6}, {"caches": False}):
        plan = decide(model, REDUCED + KEPT, answer=500, max_memory=whole - 1, **more)
        assert plan.cache is None and plan.spec is not None
    assert decide(model, REDUCED + KEPT, answer=500, target_tokens=100).cache is None


def test_a_reducer_that_loses_nothing_stays(model: Any) -> None:
    rows = [*REDUCED, *curve("divprune", (0.98, 0.98, 0.98, 0.98), row), *KEPT]
    whole = decide(model, rows, max_memory="1GB").total_bytes
    plan = decide(model, rows, max_memory=whole - 1)
    assert plan.cache is None and str(plan.spec).startswith("divprune")


def test_below_random_is_never_taken(model: Any) -> None:
    rows = [*REDUCED, *(each for each in KEPT if "tova" in str(each["cache"])), KEPT[0]]
    rows += curve("random", (0.7, 0.6, 0.5, 0.4))
    known = cache_evidence("video", rows, "m")
    assert known is not None and not known.packs
    (tova,) = [each for each in known.chosen.curves if each.name == "tova"]
    assert not known.chosen.allowed(tova, SHARES)[0]
    whole = decide(model, rows, answer=500, max_memory="1GB").total_bytes
    assert decide(model, rows, answer=500, max_memory=whole - 1).cache is None


def test_out_of_reach_names_the_least(model: Any) -> None:
    with pytest.raises(MmfastError, match=r"the best is .* with cache quant:2; raise") as caught:
        decide(model, REDUCED + KEPT, answer=5000, max_memory=fixed_of(model) + 1000)
    assert "\n" not in str(caught.value)


def fixed_of(model: Any) -> int:
    return fixed(decide(model, REDUCED, max_memory="1GB"))


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), answer=st.integers(0, 3000))
def test_any_rows_any_limit(model: Any, seed: int, answer: int) -> None:
    """No limit is broken, a tighter one is never surer, and no reducer within it is better."""
    rng = random.Random(seed)

    def scores(low: int, high: int) -> tuple[float, ...]:
        return tuple(rng.randint(low, high) / 100 for _ in SHARES)

    rows = [row(None, 0.9, 288), *curve("random", scores(20, 50), row)]
    rows += [*curve("evs", scores(40, 90), row), *curve("divprune", scores(40, 90), row)]
    reduced = list(rows)
    rows += [kept(None, 0.8), *curve("random", scores(20, 50))]
    rows += [*curve("lagkv", scores(40, 80)), *curve("snapkv", scores(40, 80))]
    rows += [kept(f"quant:{bits}", rng.randint(40, 80) / 100) for bits in (8, 4, 2)]
    top = decide(model, rows, answer=answer, max_memory="1GB").total_bytes
    base, sure = fixed_of(model), 0.0
    for part in (0.1, 0.3, 0.5, 0.8, 1.0):
        limit = int(base + part * (top - base))
        try:
            plan = decide(model, rows, answer=answer, max_memory=limit)
        except MmfastError:
            assert not sure, "a looser limit is met wherever a tighter one is"
            continue
        assert plan.total_bytes <= limit and plan.accuracy[0] is not None
        assert plan.accuracy[0] >= sure
        sure = plan.accuracy[0]
        try:
            other = decide(model, reduced, answer=answer, max_memory=limit).accuracy[0]
        except MmfastError:
            assert plan.cache is not None
            continue
        assert other is not None
        assert plan.accuracy[0] > other if plan.cache is not None else plan.accuracy[0] == other


def test_bytes_by_hand() -> None:
    shape = ModelShape((1, 1), 8, 8, entry=2 * 3 * 32, element=2, weights=0, head=32)
    token = 2 * 3 * 32 * 2
    quarter, eight = plan_cache("lagkv:0.25"), plan_cache("quant:8")
    assert quarter is not None and eight is not None
    assert held_bytes(shape, quarter, 400) == 100 * token
    assert held_bytes(shape, quarter, 400, 50) == 150 * token
    # 64 of 192 in codes of a byte; two groups of 32 keys and one group a value, two numbers each
    packed = 64 * 2 * 3 * 32 + 3 * (2 * 32 + 64) * 2 * 2
    assert held_bytes(shape, eight, 192) == 128 * token + packed
    assert held_bytes(shape, eight, 100, 20) == 120 * token


@pytest.mark.parametrize("spec", SPECS)
def test_the_estimate_is_what_a_run_holds(pipe: Any, spec: str) -> None:
    """Behind the prompt, as the trace has it, and at the end of a long answer."""
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    shape, cache = pipe.planner.planner.learner.bench.shape, plan_cache(spec)
    prompt, most = inputs["input_ids"].shape[1], 140
    assert cache is not None
    with attach(pipe.model, cache=spec) as trace, torch.inference_mode():
        given = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False}
        out = pipe.model.generate(**inputs, **given, return_dict_in_generate=True)
    (found,) = [each.peak_bytes for each in trace.rows if each.stage == "kv"]
    assert shape.depth * held_bytes(shape, cache, prompt) == pytest.approx(found, rel=TOLERANCE)
    end = sum(nbytes(layer) for layer in out[CACHE].layers)
    told = shape.depth * held_bytes(shape, cache, prompt, most)
    wait = 1 if cache.store is None else BLOCK
    assert end <= told <= end + wait * shape.depth * shape.entry * shape.element


def test_a_pipeline_runs_the_policy_of_its_plan(pipe: Any) -> None:
    """Of a long answer, whose keys and values no reducer makes fewer."""
    weights = pipe.plan(CLIP, QUESTION, max_memory="10GB").memory["weights"]
    answer = pipe(CLIP, QUESTION, max_memory=weights + LIMIT)
    plan = answer.plan
    assert plan is not None and plan.spec is None and str(plan.cache).startswith("quant:")
    (found,) = [each for each in answer.trace.rows if each.stage == "kv"]
    assert found.method == plan.cache and found.peak_bytes < plan.memory["kv"]
    assert [r.method for r in answer.trace.rows if r.stage == "plan"] == [f"cache {plan.cache}"]
    words = "".join(pipe.stream(CLIP, QUESTION, max_memory=weights + LIMIT))
    assert words.strip() == answer.text
    with attach(pipe.model, cache=plan.cache):
        assert pipe(CLIP, QUESTION).text == answer.text


def test_a_pipeline_with_a_policy_of_its_own_keeps_it(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def plan(self: Planner, inputs: Any, target: Any, **more: Any) -> Plan:
        asked.append(more)
        return Plan(None, {}, 1, 1, 1.0, {})

    monkeypatch.setattr(Planner, "plan", plan)
    pair = (pipe.model, pipe.processor)
    for options in ({}, {"cache": "lagkv:0.5"}, {"decode": "self:0.25"}):
        made = mmfast.pipeline("video-qa", pair, max_new_tokens=7, **options)
        made.plan(CLIP, QUESTION, max_memory="1GB")
    assert [each["caches"] for each in asked] == [True, False, False]
    assert {each["answer"] for each in asked} == {7}


def test_weights_and_cache_of_a_draft_model_count(pipe: Any) -> None:
    """Of the same weights from a folder it holds as much again; a twin has a cache alone."""
    pair, most = (pipe.model, pipe.processor), {"max_new_tokens": 12}
    folder, limit = embedded_path(), {"max_memory": "10GB"}
    memory = {
        decode: mmfast.pipeline("video-qa", pair, decode=decode, **most)
        .plan(CLIP, QUESTION, **limit)
        .memory
        for decode in (
            None,
            "recycle",
            f"draft:{folder}",
            f"draft:{folder}?media=false",
            f"draft:{folder}?reduce=divprune:0.25",
            "self?reduce=divprune:0.25",
        )
    }
    alone, texts, both, blind, less, twin = memory.values()
    assert texts == alone
    assert both["kv"] == 2 * alone["kv"] and both["activations"] == alone["activations"]
    draft = both["weights"] - alone["weights"]
    # tied weights count once, and buffers of the model that answers are not weights of a draft
    assert 0.9 * alone["weights"] < draft <= alone["weights"]
    assert {blind["weights"], less["weights"]} == {both["weights"]}
    assert alone["kv"] < blind["kv"] < less["kv"] < both["kv"]
    assert twin["weights"] == alone["weights"] and twin["kv"] == less["kv"]
    own = mmfast.pipeline("video-qa", pair, decode=f"draft:{folder}", **most)
    with pytest.raises(MmfastError, match="out of reach"):
        own.plan(CLIP, QUESTION, max_memory=sum(alone.values()))


def test_the_view_of_a_draft_counts(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a draft copies of the cache, as it lies in memory at the end of an answer."""
    views, view = list[Any](), ViewStage.view

    def watched(stage: Any, cache: Any) -> Any:
        views.append(view(stage, cache))
        return views[-1]

    monkeypatch.setattr(ViewStage, "view", watched)
    how, shape = {"max_new_tokens": 12, "min_new_tokens": 12}, shape_of(pipe.model)
    answer = how["max_new_tokens"] * shape.depth * shape.entry * shape.element
    memory = {}
    for decode in (None, "self:0.25", "self:64", "self:0.1?rise=0.8", "self:0.5"):
        own = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), decode=decode, **how)
        memory[decode] = own.plan(CLIP, QUESTION, max_memory="10GB").memory
        if decode in ("self:0.25", "self:64"):
            own(CLIP, QUESTION)
            told, mine = memory[decode]["kv"] - memory[None]["kv"], views[-1]
            held = sum(nbytes(layer) for layer in mine.cache.layers)
            held += sum(k.nbytes + v.nbytes for k, v, _ in mine._chosen.values())
            assert 0 <= told - held < answer  # the last drafts were never read
    assert memory["self:0.1?rise=0.8"] == memory["self:0.5"]
    assert memory["self:0.25"]["weights"] == memory[None]["weights"]
    alone = Work(prompt=20, answer=12)
    assert DraftShape(shape, stages=None, share=0.25).kept_bytes(alone) == 0  # text drafts nothing


def test_an_early_exit_counts(pipe: Any, tmp_path: Path) -> None:
    """Its adapter has weights, and keys and values of one layer of its own."""
    adapter = new_adapter(pipe.model, 2)
    save(adapter, tmp_path / "exit.safetensors")
    given, limit = (pipe.model, pipe.processor), {"max_memory": "10GB"}
    alone, more = (
        mmfast.pipeline("video-qa", given, decode=decode, max_new_tokens=12)
        .plan(CLIP, QUESTION, **limit)
        .memory
        for decode in (None, f"exit:{tmp_path}/exit.safetensors")
    )
    assert more["weights"] - alone["weights"] == sum(p.nbytes for p in adapter.parameters())
    config = pipe.model.config.get_text_config()
    held = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    share = config.hidden_size / held / config.num_hidden_layers
    assert more["kv"] - alone["kv"] == pytest.approx(share * alone["kv"])


def test_beams_and_a_bounded_length_count(pipe: Any) -> None:
    """Each beam holds keys and values of its own, and `max_length` bounds the answer, too."""
    pair, given = (pipe.model, pipe.processor), {"max_new_tokens": 12, "do_sample": False}
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    with torch.inference_mode():
        out = pipe.model.generate(
            **inputs, **given, min_new_tokens=12, num_beams=3, return_dict_in_generate=True
        )
    held = sum(nbytes(layer) for layer in out[CACHE].layers)
    memory = {
        beams: mmfast.pipeline("video-qa", pair, num_beams=beams, **given)
        .plan(CLIP, QUESTION, max_memory="10GB")
        .memory
        for beams in (1, 3)
    }
    entry = pipe.planner.planner.learner.bench.shape
    assert 0 <= memory[3]["kv"] - held <= 3 * entry.depth * entry.entry * entry.element
    assert memory[3]["kv"] == 3 * memory[1]["kv"] and memory[3]["weights"] == memory[1]["weights"]
    assert memory[3]["activations"] > memory[1]["activations"]
    prompt = inputs["input_ids"].shape[1]
    bounded = mmfast.pipeline("video-qa", pair, max_length=prompt + 12)
    assert bounded.plan(CLIP, QUESTION, max_memory="10GB").memory == memory[1]
    limit = sum(memory[3].values()) - 1
    own = mmfast.pipeline("video-qa", pair, **given)
    plans = [own(CLIP, QUESTION, max_memory=limit, num_beams=n).plan for n in (1, 3)]
    assert plans[0].spec is None and plans[0].cache is None
    assert plans[1].spec is not None or plans[1].cache is not None
    assert plans[1].met and plans[1].total_bytes <= limit


def test_ask_names_the_policy_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    made = Plan(None, {"prefill": 3.0}, 288, 288, 288.0, {}, cache="quant:4")
    print_answer(Answer("left", mmfast.Trace(), 5.0, 288, 288, made), as_json=False)
    assert "planned: cache quant:4, predicted after 3 ms" in capsys.readouterr().err
    assert say(replace(made, met=False)) == "cache quant:4, the nearest to a target out of reach"


def test_plan_shows_it(capsys: pytest.CaptureFixture[str], pipe: Any) -> None:
    weights = pipe.plan(CLIP, QUESTION, max_memory="10GB").memory["weights"]
    asked = ("plan", CLIP, QUESTION, "--max-memory", str(weights + LIMIT))
    asked += ("--max-new-tokens", "600", "--check")
    code, out, _ = run(capsys, *asked)
    assert code == 0 and "keys and values" in out and "cache quant:" in out and "measured" in out


def test_answers_of_another_suite_say_nothing_about_clips() -> None:
    rows = [row for row in shipped_rows() if row.get("suite") == "video"]
    other = [{**row, "suite": "scenes", "n": 7, "score": 0.1} for row in rows]
    found = cache_evidence("video", rows)
    assert found is not None and cache_evidence("video", [*rows, *other]) == found
    assert evidence_for("video", [*rows, *other]) == evidence_for("video", rows)
    assert cache_evidence("video", other) is None and evidence_for("video", other) is None
