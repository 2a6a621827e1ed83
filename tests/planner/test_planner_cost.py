"""The cost model by hand, the measuring, and the file that remembers it."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmfast.bench.cases import build
from mmfast.bench.plan import plan_shape, whole_shape
from mmfast.bench.presets import PRESETS
from mmfast.core.spec import parse
from mmfast.planner.calibration import Bench, decoder_rates, encoder_rates, missing_points, reach
from mmfast.planner.cost import (
    ModelShape,
    Work,
    fingerprint,
    lengths_of,
    pixels_of,
    predict,
    shape_of,
    work_of,
)
from mmfast.planner.learner import Learner
from mmfast.planner.rates import (
    VARIABLE,
    Rates,
    at,
    cache_folder,
    from_dict,
    rates_key,
    read_rates,
    write_rates,
)
from mmfast.planner.target import make_target

SHAPE = ModelShape(
    (100, 100, 200, 200), width=8, hidden=8, entry=6, element=2, weights=5000, blocks=3
)
RATES = Rates(
    linear=((10, 1.0), (110, 11.0)),
    attention=((10, 0.1), (110, 12.1)),
    head=0.5,
    encode=((1000, 20.0),),
    signal=((1000, 2.0),),
    select={"evs:100": 3.0, "visionzip:100": 4.0, "fastv:100": 1.0},
    overhead={"generate": (7.0, 9.0)},
)
WORK = Work(110, 1, (100,), 1000, ((4, 5, 5),))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "rates"))
    return tmp_path / "rates"


@pytest.fixture(scope="module")
def case() -> Any:
    return build("tiny", ("llm", "ttft"), frames=2)


def test_stock_by_hand() -> None:
    cost = predict(SHAPE, RATES, WORK, ())
    # Two layers of 11 ms and two of twice the multiply-adds, each with 12.1 ms of attention.
    assert cost.prefill == pytest.approx(2 * 11 + 2 * 22 + 4 * 12.1 + 0.5)
    assert (cost.encode, cost.select, cost.overhead) == (20.0, 0.0, 7.0)
    assert cost.kept == 100 and cost.mean == 100
    assert cost.kv == 4 * 110 * 6 * 2 and cost.weights == 5000
    assert cost.memory == cost.weights + cost.kv + cost.activations > 5000


def test_pruned_before_the_model_by_hand() -> None:
    cost = predict(SHAPE, RATES, WORK, parse("evs:0.4"))
    n, attention = 50, 0.1 + (12.1 - 0.1) * (50**2 - 10**2) / (110**2 - 10**2)
    assert cost.prefill == pytest.approx(6 * (1 + (n - 10) * 0.1) + 4 * attention + 0.5)
    assert (cost.select, cost.overhead, cost.kept) == (3.0, 9.0, 40)
    assert cost.kv == 4 * 50 * 6 * 2


def test_tokens_of_a_layer_are_those_of_one_prompt() -> None:
    """A batch of prompts is held to the target that each of them would be held to alone."""
    both = Work(110, 2, (100, 100), 2000, WORK.grids * 2)
    for spec in ("evs:0.4", "fastv@llm2:0.4", "evs:0.5+fastv@llm2:0.5"):
        one, two = (predict(SHAPE, RATES, work, parse(spec)) for work in (WORK, both))
        assert two.mean == one.mean and two.kept == 2 * one.kept


def test_signals_of_the_encoder_cost() -> None:
    cost = predict(SHAPE, RATES, WORK, parse("visionzip:0.4"))
    assert cost.encode == 22.0 and cost.select == 4.0


def test_pruned_inside_the_model_by_hand() -> None:
    cost = predict(SHAPE, RATES, WORK, parse("fastv@llm2:0.4"))
    assert cost.mean == (100 + 100 + 40 + 40) / 4 and cost.kept == 40
    assert cost.kv == (110 + 110 + 50 + 50) * 6 * 2
    both = predict(SHAPE, RATES, WORK, parse("evs:0.5+fastv@llm2:0.5"))
    assert both.mean == (50 + 50 + 25 + 25) / 4


def test_lengths_add_up_over_items_and_rows() -> None:
    assert lengths_of(parse("evs:0.5+divprune:0.5"), 100, 3) == [25, 25, 25]
    two = Work(110, 2, (100, 60), 2000, ((4, 5, 5), (4, 5, 3)))
    cost = predict(SHAPE, RATES, two, parse("evs:0.5"))
    assert cost.kept == 80 and cost.encode == 40.0
    assert cost.kv == 4 * (2 * 110 - 160 + 80) * 6 * 2


def test_rates_go_on_between_and_beyond() -> None:
    points = ((10.0, 1.0), (20.0, 3.0))
    assert at(points, 15) == 2.0 and at(points, 5) == 1.0 and at(points, 40) == 6.0
    assert at(points, 40, power=2) == 12.0 and at((), 7) == 0.0 and at(points, 0) == 0.0


def test_points_that_are_missing() -> None:
    assert missing_points((), 300) == [8, 32, 128, 300]
    assert missing_points(((8, 1.0), (300, 2.0)), 350) == []
    assert missing_points(((8, 1.0), (300, 2.0)), 1000) == [32, 128, 512, 1000]


def test_learning_measures_once(case: Any) -> None:
    learner = Learner(case.model)
    inputs = {**case.prompt, **case.pixels}
    work = work_of(case.model, inputs)
    assert work.items == (32,) and work.prompt == case.prompt["input_ids"].shape[1]
    assert work.pixels == pixels_of(inputs) > 0 and work.grids == ((2, 4, 4),)
    learner.learn(inputs, work)
    rates = learner.rates
    assert all(ms > 0 for _, ms in (*rates.linear, *rates.attention, *rates.encode, *rates.signal))
    learner.learn(inputs, work)
    assert learner.rates == rates
    again = Learner(case.model)  # another process would find the file
    assert again.rates == rates and again.measuring_ms == 0


def test_measuring_leaves_the_model_alone(case: Any) -> None:
    before = case.model(**case.prompt, **case.pixels).logits
    bench = Bench(case.model, shape_of(case.model, 3))
    inputs = {**case.prompt, **case.pixels}
    encoder_rates(bench, decoder_rates(bench, Rates(), 64), inputs)
    assert all(not m._forward_pre_hooks for m in case.model.modules())
    assert torch.equal(case.model(**inputs).logits, before)


def test_reach_stops_at_the_module_in_its_own_thread() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.Sequential(first, second)
    x, others = torch.ones(5, 3), list[torch.Tensor]()
    second.register_forward_pre_hook(lambda *_: pytest.fail("ran on") if not others else None)

    def run() -> None:
        thread = threading.Thread(target=lambda: others.append(first(x)))
        thread.start()
        thread.join()
        others.clear() if len(others) > 1 else None
        model(x)

    found = reach(first, run)
    assert found is not None and found.hidden is x and found.ms > 0 and len(others) == 1
    assert found.rows(2).hidden.shape == (2, 3)
    assert reach(first, lambda: None) is None and not first._forward_pre_hooks


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"key": 1}', '{"key": {}, "rates": {"linear": 3}}', "\x00\xff"]
)
def test_a_corrupt_file_is_measured_again(case: Any, cache: Path, text: str) -> None:
    learner = Learner(case.model)
    assert learner.key is not None and learner.rates == Rates()
    assert write_rates(learner.key, RATES) and read_rates(learner.key) == RATES
    (file,) = cache.glob("rates-*.json")
    file.write_text(text)
    assert read_rates(learner.key) is None and Learner(case.model).rates == Rates()


def test_numbers_that_are_no_times_are_refused() -> None:
    for bad in ({"linear": [[8, -1.0]]}, {"head": float("nan")}, {"select": {"evs:9": "soon"}}):
        with pytest.raises(ValueError):
            from_dict({**asdict(RATES), **bad})
    assert from_dict(json.loads(json.dumps(asdict(RATES)))) == RATES


def test_a_folder_that_cannot_be_written_is_no_failure(
    case: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    learner = Learner(case.model)
    assert learner.key is not None and not write_rates(learner.key, RATES)
    learner.learn({**case.prompt, **case.pixels}, work_of(case.model, case.prompt | case.pixels))
    assert learner.rates.linear


def test_a_machine_that_stays_busy_is_measured_ever_more_rarely(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded server is never quiet, and halts all answers while it is measured."""
    now, asked, answer = [0.0], list[float](), ["busy"]
    monkeypatch.setattr("mmfast.planner.learner.time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        "mmfast.planner.learner.unrest", lambda _: asked.append(now[0]) or (0.03, answer[0])
    )
    learner, work = Learner(case.model, rates=Rates(), remember=False), replace(WORK, prompt=64)
    for now[0] in range(0, 24 * 3600, 10):
        assert learner.settle(work) == "busy"
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps[:4] == [60, 120, 240, 480] and max(gaps) <= 3610 and len(gaps) < 32
    answer[0], now[0] = "", now[0] + 3610
    assert not learner.settle(work)
    answer[0] = "busy"
    learner.forget()
    start = len(asked)
    for more in (10, 10, 70, 130):
        now[0] += more
        learner.settle(work)
    assert len(asked) == start + 3  # from the beginning again


def test_folder_of_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "mmfast"


def test_keys_tell_shapes_devices_and_threads_apart(case: Any) -> None:
    one = rates_key(torch.device("cpu"), torch.float32, fingerprint(case.model))
    assert {"device", "torch", "dtype", "threads", "model"} < set(one)
    other = build("tiny", ("llm",), frames=2).model  # one tower block less
    assert fingerprint(other) != fingerprint(case.model)
    assert fingerprint(build("tiny", ("llm", "ttft"), frames=4).model) == fingerprint(case.model)


def test_a_shape_is_planned_from_one_layer() -> None:
    whole = shape_of(build("tiny", ("llm", "ttft"), frames=2).model, 3)
    cut = build("tiny", (), frames=2).model
    assert whole_shape(PRESETS["tiny"], cut) == whole
    plan = plan_shape(make_target(target_tokens=12), "tiny", frames=2, device="cpu")
    assert plan.visual_tokens == 32 and plan.mean_tokens <= 12 and plan.ttft_ms["encode"] > 0
    assert plan.memory["weights"] == whole.weights


def test_stages_of_text_shorten_what_they_may_drop() -> None:
    both = parse("fastv@llm2:0.5?tokens=all+random@llm3:0.5?tokens=text")
    assert lengths_of(both, 100, 5) == [100, 100, 50, 50, 50]
    assert lengths_of(both, 40, 5, "media") == [40, 40, 20, 10, 10]
    media = parse("fastv@llm1:0.5")
    assert lengths_of(media, 40, 3, "media") == [40] * 3 and lengths_of(media, 40, 3)[1:] == [
        20,
        20,
    ]
