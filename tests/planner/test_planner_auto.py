"""`reduce="auto"`: a margin beyond chance and noise, busy machines, and one measurement."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from cli_runs import run
from listener_models import qwen3_asr
from planner_rows import RATES, SHARES, WORK, Choosing, row
from tiny_models import tiny
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3ASRForConditionalGeneration

import mmfast
from mmfast.bench.cases import build
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.spec import AUTO
from mmfast.planner import calibration, rates
from mmfast.planner.candidates import Candidate, evidence_for
from mmfast.planner.cost import Cost, work_of
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner, PlanWarning, ladder
from mmfast.planner.rates import VARIABLE, Rates
from mmfast.planner.target import Target, automatic, make_target

CLIP = str(Path(__file__).resolve().parents[2] / "assets" / "clips" / "red-circle.mp4")
QUESTION = "Which way does the red circle move?"
METHODS = ("evs", "divprune", "pool", "tome", "vidcom2", "dtd", "saint", "spatial_pool")
BASE = {"random": 0.80, "uniform": 0.82, "downsample@pre": 0.85}


@pytest.fixture(scope="module")
def model() -> Any:
    return build("tiny", ("llm", "ttft"), frames=2).model


def planner(model: Any, rows: list[dict[str, Any]]) -> Planner:
    made = Planner(model, name="m", rows=rows, rates=RATES, remember=False)
    made.learner.rates = Rates(**{**vars(RATES), "select": Choosing()})
    return made


def rows_of(scores: dict[str, float], n: int = 400) -> list[dict[str, Any]]:
    found = [row(None, 0.97, 288, n=n)]
    for name, score in scores.items():
        found += [row(f"{name}:{share}", score, 288 * share, n=n) for share in SHARES]
    return found


def drawn(share: float, n: int, rng: random.Random) -> float:
    """A score of n answers that are right with probability `share`."""
    return sum(rng.random() < share for _ in range(n)) / n


def test_noise_never_makes_it_switch(model: Any) -> None:
    """No method is better than the baselines here; only luck lifts some of their rows."""
    switched, lucky = 0, 0
    for seed in range(40):
        rng = random.Random(seed)
        scores = {name: drawn(0.85, 400, rng) for name in METHODS} | BASE
        lucky += max(scores[name] for name in METHODS) > 0.85
        plan = planner(model, rows_of(scores)).decide(WORK, make_target(target_tokens=40))
        switched += not str(plan.spec).startswith("downsample")
    assert lucky > 35 and switched <= 4  # 5 % of all draws, and some more by chance


def test_a_real_gain_does(model: Any) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        scores = {name: drawn(0.85, 400, rng) for name in METHODS} | BASE
        scores["divprune"] = drawn(0.96, 400, rng)
        plan = planner(model, rows_of(scores)).decide(WORK, make_target(target_tokens=40))
        assert str(plan.spec).startswith("divprune"), plan.spec
        assert "by more than chance" in {r.spec: r.reason for r in plan.rejected}["evs"] or any(
            "not above" in r.reason for r in plan.rejected
        )


def test_the_same_lead_of_more_questions_is_no_chance() -> None:
    scores = BASE | {"evs": 0.88}
    for n, sure in ((100, False), (4000, True)):
        evidence = evidence_for("video", rows_of(scores, n), "m")
        assert evidence is not None
        curve = next(c for c in evidence.curves if c.name == "evs")
        verdict = evidence.verdict(curve, 0.25)
        assert (verdict is None) is sure
        assert sure or "by more than chance" in str(verdict)


def test_a_gain_of_time_below_the_noise_is_none() -> None:

    def step(name: str, ttft: float, accuracy: float, noise: float) -> Any:
        cost = SimpleNamespace(ttft=ttft, mean=40.0, noise=noise)
        return SimpleNamespace(spec=name, accuracy=accuracy, cost=cost)

    for noise, length in ((0.0, 2), (0.05, 2), (0.12, 1)):
        steps = [step("slow", 100.0, 0.9, noise), step("fast", 90.0, 0.88, noise)]
        assert len(ladder(steps)) == length


def test_an_overhead_below_nothing_ends_the_ladder() -> None:
    """Times of a busy moment, which would leave every step faster than itself."""
    costs = [Cost(1.0, 0.0, ms, -9.0, 0, 0, 0, 4, mean) for ms, mean in ((20.0, 9.0), (2.0, 4.0))]
    assert [cost.ttft for cost in costs] == [12.0, 0.0]
    steps = [Candidate((), 0.9, cost) for cost in costs]
    assert ladder(steps) == steps


def test_auto_is_balanced_unless_told_otherwise() -> None:
    assert automatic("evs:0.5", Target()) == ("evs:0.5", Target())
    assert automatic(AUTO, Target())[1] == Target(quality="balanced", auto=True)
    reduce, target = automatic(AUTO, make_target(target_tokens=40))
    assert reduce is None and target == Target(tokens=40, auto=True)


def test_the_same_work_twice_tells_a_busy_machine(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = planner(model, []).learner.bench
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    for jumps, busy in (((1.0, 1.01), False), ((1.0, 1.4), True)):
        times = iter(jumps * calibration.PAIRS)
        monkeypatch.setattr(calibration, "_layer", lambda *_, times=times: next(times))
        noise, reason = calibration.unrest(bench)
        assert bool(reason) is busy and "\n" not in reason
        assert noise == pytest.approx(abs(jumps[0] / jumps[1] - 1))
    monkeypatch.setattr(calibration.os, "getloadavg", lambda: (1e3, 1e3, 1e3))
    monkeypatch.setattr(calibration, "_layer", lambda *_: 1.0)
    assert "load" in calibration.unrest(bench)[1]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-qa", reduce="auto", device="cpu", max_new_tokens=8)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Any) -> Iterator[Path]:
    """An empty folder for rates; the pipeline has not planned yet."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    pipe._planner = None
    yield tmp_path


def state(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr("mmfast.planner.learner.unrest", lambda bench: (0.03, reason))


def test_a_busy_machine_is_not_measured_and_nothing_kept(
    pipe: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(monkeypatch, "this machine is too busy to be measured (load 9)")
    with pytest.warns(PlanWarning, match="too busy"):
        answer = pipe(CLIP, QUESTION)
    assert answer.kept_tokens == answer.visual_tokens == 288 and not list(kept.iterdir())
    assert "busy" in answer.plan.why[0] and answer.plan.spec is None and not answer.plan.met
    (noted,) = [r for r in answer.trace.rows if r.stage == "plan"]
    assert "busy machine" in noted.method and json.dumps(answer.to_dict())
    with pytest.warns(PlanWarning, match="too busy"):  # a target is met as well as it can be
        late = pipe(CLIP, QUESTION, target_tokens=40)
    assert late.kept_tokens < 100 and not list(kept.iterdir())
    limits: tuple[dict[str, Any], ...] = ({"target_tokens": 40}, {"max_memory": "9MB"})
    for limit in limits:  # nor does auto let go of a limit that it was given
        pair = (pipe.model, pipe.processor)
        own = mmfast.pipeline("video-qa", pair, reduce="auto", max_new_tokens=8, **limit)
        if "max_memory" in limit:
            with pytest.warns(PlanWarning), pytest.raises(MmfastError, match="out of reach"):
                own(CLIP, QUESTION)
        else:
            with pytest.warns(PlanWarning, match="too busy"):
                assert own(CLIP, QUESTION).kept_tokens < 100
    pipe.planner.planner.learner._again = 0.0  # some time later
    state(monkeypatch, "")  # the machine is quiet again
    answer = pipe(CLIP, QUESTION)
    assert answer.plan.met and len(list(kept.iterdir())) == 1


def test_a_busy_machine_is_not_measured_at_every_call(
    pipe: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    answer = (0.03, "this machine is too busy to be measured (load 9)")
    monkeypatch.setattr("mmfast.planner.learner.unrest", lambda bench: asked.append(1) or answer)
    with pytest.warns(PlanWarning, match="too busy"):
        plans = [pipe(CLIP, QUESTION, target_ttft_ms=1e5).plan for _ in range(2)]
        monkeypatch.setattr(calibration, "duration", None)  # would fail
        later = pipe(CLIP, QUESTION, target_ttft_ms=1e5)
    assert len(asked) == 1
    assert later.plan.spec == plans[0].spec and not list(kept.iterdir())
    pipe.planner.planner.learner._again = 0.0  # some time later
    with pytest.raises(TypeError), pytest.warns(PlanWarning):  # measured anew
        pipe(CLIP, QUESTION, target_ttft_ms=1e5)
    assert len(asked) == 2


def test_measured_once_and_kept(
    pipe: Any, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state(monkeypatch, "")
    steps: list[Any] = []
    pipe.tick = lambda *step: steps.append(step)
    first = pipe(CLIP, QUESTION)
    (file,) = kept.iterdir()
    before = file.read_text()
    assert steps and json.loads(before)["rates"]["noise"] == 0.03
    (noted,) = [r for r in first.trace.rows if r.stage == "plan"]
    assert noted.method == (first.plan.spec or "all tokens")
    pipe._planner, steps[:] = None, []  # another process
    monkeypatch.setattr(calibration, "duration", None)  # would fail
    again = pipe(CLIP, QUESTION)
    assert again.plan.spec == first.plan.spec and not steps and file.read_text() == before
    assert "".join(pipe.stream(CLIP, QUESTION)).strip() == again.text
    assert capsys.readouterr().err == ""  # no terminal: no bar and no line
    pipe.tick = None


def test_the_line_says_where_it_is_kept(
    pipe: Any, kept: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmfast.planner.auto import announced

    learner = pipe.planner.planner.learner
    monkeypatch.setenv("FORCE_COLOR", "1")
    with announced(learner) as tick:
        tick(0, 2, "a layer")
        tick(1, 2, "another")
    told = capsys.readouterr().err
    assert told.count("once for it and this model") == 1
    assert str(rates.measured_path("rates", learner.key)).split("/")[-1] in told


def test_a_user_without_a_home_is_planned_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmfast.planner.auto import announced

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("FORCE_COLOR", "1")
    learner: Any = SimpleNamespace(key={"device": "cpu"})
    with announced(learner) as tick:
        tick(0, 2, "a layer")
    assert "kept in nowhere" in capsys.readouterr().err


def test_attach_plans_at_the_first_call(
    pipe: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state(monkeypatch, "")
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    stock = pipe.run(dict(inputs))
    with mmfast.attach(pipe.model, "auto") as trace:
        pipe.model(input_ids=torch.tensor([[1, 2, 3]]))  # no media: nothing to plan
        assert trace.calls == 1 and not trace.rows
        pipe.run(dict(inputs))
        pipe.run(dict(inputs))
    plans = [r.method for r in trace.rows if r.stage == "plan"]
    assert len(plans) == 1
    with mmfast.attach(pipe.model, None if plans[0] == "all tokens" else plans[0]) as other:
        pipe.run(dict(inputs))
    twice = [r.m for _, _, r in other.reductions] * 2
    assert [r.m for _, _, r in trace.reductions] == twice
    assert torch.equal(pipe.run(dict(inputs)), stock)
    assert not {"generate", "forward"} & set(pipe.model.__dict__)


def test_attach_plans_however_the_prompt_is_given(
    pipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids by position, or embeddings in their place: the same request is planned."""
    asked: list[Any] = []

    def plan(model: Any, name: Any, inputs: Any) -> Plan:
        asked.append(work_of(model, inputs))
        return Plan("evs:0.25", {}, 288, 72, 72.0, {})

    monkeypatch.setattr("mmfast.planner.auto.plan_once", plan)
    inputs, _ = pipe._inputs([(CLIP, QUESTION)], mmfast.Trace())
    ids, model = inputs.pop("input_ids"), pipe.model
    embeds = model.get_input_embeddings()(ids)
    calls = [
        lambda: model(input_ids=ids, **inputs),
        lambda: model(ids, **inputs),
        lambda: model(inputs_embeds=embeds, **inputs),
        lambda: model.generate(ids, **inputs, max_new_tokens=1),
        lambda: model.generate(inputs=ids, **inputs, max_new_tokens=1),
    ]
    for call in calls:
        with torch.no_grad(), mmfast.attach(model, "auto") as trace:
            call()
        assert [row.method for row in trace.rows] == ["evs:0.25", "evs"]
        assert [r.m for _, _, r in trace.reductions] == [72]
    assert len(asked) == len(calls) and len({str(work) for work in asked}) == 1


def test_media_are_planned_by_what_was_measured_of_their_kind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images under `attach` and a suite of pages under `eval` are no clips."""
    asked: list[Any] = []

    def plan(self: Planner, inputs: Any, target: Target, kind: str, **_: Any) -> Plan:
        asked.append(target.kind or kind)
        return Plan(None, {}, 1, 1, 1.0, {})

    monkeypatch.setattr(Planner, "plan", plan)
    this = tiny("llava_onevision")
    given = [
        this.inputs(["on {image} what?"], images=this.images(1)),
        this.inputs(["on {image} and {image} what?"], images=this.images(2)),
        this.inputs(["on {image} what?", "{image} who?"], images=this.images(2)),
        this.inputs(["on {video} what?"], videos=this.videos(1)),
    ]
    for inputs in given:
        with torch.no_grad(), mmfast.attach(this.model, "auto"):
            this.model(**inputs)
    assert asked == ["image", "multi-image", "image", "video"]
    asked.clear()
    for suite in ("image", "table"):
        code, _, err = run(capsys, "eval", "--suite", suite, "--n", "1", "--reduce", "auto")
        assert code == 0 and "auto: all tokens" in err
    assert asked == ["image", "document"]


def test_attach_plans_no_model_without_media_in_its_prompts() -> None:
    text = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=9,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(SpecError, match=r"LlamaForCausalLM reads text alone.*snapkv"):
        mmfast.attach(text, "auto")
    tower = timm.create_model("vit_tiny_patch16_224", depth=1)
    with pytest.raises(SpecError, match=r"VisionTransformer is a vision encoder alone.*@vit"):
        mmfast.attach(tower, "auto")
    with mmfast.attach(text, cache="snapkv:4") as trace:  # nothing stayed in the way
        text(torch.tensor([[1, 2, 3]]))
    assert trace.calls == 1


def test_sound_is_not_planned_by_what_was_measured_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("evs:0.25", {}, 82, 24, 24.0, {})
    monkeypatch.setattr("mmfast.planner.auto.plan_once", lambda *_: plan)
    this = tiny("qwen2_5_omni_thinker")
    heard = this.inputs(["on {audio} what?"], sounds=this.sounds(1))
    both = this.inputs(["{video} {audio}?"], sounds=this.sounds(1), videos=this.videos(1))
    with torch.no_grad(), mmfast.attach(this.model, "auto") as trace:
        with pytest.warns(UserWarning, match="plans images and clips, and a prompt has sound"):
            this.model(**heard)
        assert not trace.rows
        this.model(**both)
    assert [row.method for row in trace.rows] == ["evs:0.25", "evs"] and len(trace.notes) == 1
    listener = Qwen3ASRForConditionalGeneration.from_pretrained(qwen3_asr(tmp_path))
    with pytest.raises(SpecError, match=r"Qwen3ASR.* hears sound alone; .*'a_tome:0.5'"):
        mmfast.attach(listener, "auto")


def test_auto_answers_text_alone(pipe: Any) -> None:
    """A turn without a clip has nothing to plan, whatever the target."""
    chat = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    answer = pipe(chat)
    (noted,) = [row for row in answer.trace.rows if row.stage == "plan"]
    assert answer.plan is None and noted.method == "no media: nothing to plan"
    stock = mmfast.pipeline("video-qa", (pipe.model, pipe.processor), max_new_tokens=8)
    assert answer.text == stock(chat).text == "".join(pipe.stream(chat)).strip()
    with pytest.warns(UserWarning, match="visual tokens 40 is planned of media, and .* has none"):
        assert pipe(chat, target_tokens=40).text == answer.text


def test_auto_takes_targets_and_nothing_else() -> None:
    with pytest.raises(MmfastError):
        mmfast.pipeline("video-qa", model="./nowhere", reduce="auto:0.5")
    with pytest.raises(MmfastError):
        mmfast.pipeline("video-qa", model="./nowhere", reduce="auto+evs:0.5")
