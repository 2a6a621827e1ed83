"""Plans for model shapes, and predicted against measured times to the first token.

One layer and one tower block are built and timed, the others counted, so that a shape can be
planned that does not fit here; `check_plan` builds all of it, with rates of the same process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from mmfast.attach import attach
from mmfast.bench.cases import (
    Case,
    build,
    check_frames,
    model_config,
    pick_dtype,
    pixel_inputs,
)
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row, dtype_name, environment
from mmfast.bench.stages import MeasuredStage, one_line_when_full
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.cost import Clock, FirstToken
from mmfast.models.families.adapter import tower_of
from mmfast.models.loading import pick_device
from mmfast.planner.calibration import Tick
from mmfast.planner.cost import Cost, ModelShape, Work, shape_of, work_of
from mmfast.planner.learner import Learner, Run
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.target import Target

SHORT_MS = 1000.0  # a call this short is measured five times


def shape_planner(
    preset: str, frames: int = 8, device: str | None = None, dtype: str = "auto"
) -> tuple[Planner, dict[str, Any]]:
    """Return a planner for a shape with random weights, of one layer and block, and its inputs."""
    shape, where = get_preset(preset), pick_device(device)
    kind = pick_dtype(dtype, shape, where)
    check_frames(shape, frames)
    case = build(preset, (), frames, where, kind)
    pixels = {
        k: v.to(where, kind if v.is_floating_point() else v.dtype)
        for k, v in pixel_inputs(shape, frames, 0).items()
    }
    planner = Planner(case.model, shape=whole_shape(shape, case.model))
    return planner, {**case.prompt, **pixels}


def plan_shape(
    target: Target,
    preset: str,
    frames: int = 8,
    device: str | None = None,
    dtype: str = "auto",
    tick: Tick | None = None,
    fresh: bool = False,
    answer: int = 0,
) -> Plan:
    """Plan for a clip of `frames` frames on a model shape; `fresh` measures the device anew."""
    most = model_config(get_preset(preset), ()).get_text_config().max_position_embeddings
    if answer > most:
        raise MmfastError(
            f"--max-new-tokens {answer:,} are more than the {most:,} positions of {preset}; give "
            "fewer"
        )
    with one_line_when_full(preset, frames):
        planner, inputs = shape_planner(preset, frames, device, dtype)
    if fresh:
        planner.learner.forget()
    return planner.plan(inputs, target, call="forward", tick=tick, answer=answer)


def whole_shape(preset: Preset, model: Any) -> ModelShape:
    """Return the shape of a preset, of which `model` has one layer and one tower block."""
    config = model_config(preset, ("ttft",))
    depth, vision = config.get_text_config().num_hidden_layers, config.vision_config
    blocks = int(getattr(vision, "num_hidden_layers", None) or vision.depth)
    cut = shape_of(model)
    layer = _bytes(model.get_decoder().layers[0])
    block = _bytes(tower_of(model).blocks[0])
    weights = cut.weights + (depth - 1) * layer + (blocks - 1) * block
    full = cut.full[:1] * depth
    return replace(cut, layers=cut.layers[:1] * depth, blocks=blocks, weights=weights, full=full)


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def check_plan(plan: Plan, preset: str, frames: int, device: str | None, dtype: str) -> float:
    """Measure a plan on the whole shape with random weights; return ms to the first token."""
    shape, where = get_preset(preset), pick_device(device)
    with one_line_when_full(preset, frames):
        case = build(preset, ("ttft",), frames, where, pick_dtype(dtype, shape, where))
        return measured(case, "ttft", plan.spec)


def measured(case: Case, group: str, spec: str | None) -> float:
    """Measure milliseconds of one group of stages, of a short one the median of five runs."""
    stage = MeasuredStage(case, group, (group,), time.perf_counter)
    first = stage.run(spec).ms[group]
    again = stage.run(spec).ms[group]
    if again > SHORT_MS:
        return min(first, again)
    return median(stage.run(spec).ms[group] for _ in range(5))


# Reduction before the model and inside it, with cheap and with costly selection.
_EARLY = (None, "evs:0.5", "evs:0.25", "evs:0.1", "divprune:0.25")
SPECS = (*_EARLY, "fastv@llm8:0.5", "fastv@llm8:0.1")
SHALLOW = (*_EARLY, "fastv@llm1:0.25")
WHOLE = (None, "evs:0.25", "visionzip:0.1")
EMBEDDED = "tiny-video"
EMBEDDED_SPECS = (
    *(None, "evs:0.5", "evs:0.25", "divprune:0.1", "visionzip:0.25", "holitom:0.1"),
    *("fastv@llm2:0.5", "fastv@llm2:0.1", "holitom_inner@llm3:0.25"),
)


class PlanCheck(NamedTuple):
    """Specs to compare on one shape."""

    preset: str
    stage: str  # `llm`, behind the encoder, or `ttft`, with it
    frames: int
    specs: Sequence[str | None]
    # decoder layers and tower blocks of a cut shape; None is the whole model
    layers: int | None = None


CHECKS = (
    PlanCheck("llava-onevision-0.5b", "llm", 8, SPECS),
    PlanCheck("llava-onevision-0.5b", "ttft", 2, WHOLE),
    PlanCheck("llava-onevision-7b", "llm", 4, SHALLOW, layers=2),
    PlanCheck("qwen2.5-vl-7b", "llm", 4, SHALLOW, layers=2),
    PlanCheck("qwen3-vl-8b", "llm", 4, SHALLOW, layers=2),
    PlanCheck("qwen2.5-vl-7b", "ttft", 4, WHOLE, layers=2),
)


def check_rows(tick: Tick | None = None, checks: Sequence[PlanCheck] | None = None) -> list[Row]:
    """Return rows of predicted and measured milliseconds; a ratio of 1 is a perfect prediction."""
    rows: list[Row] = []
    asked, tick = CHECKS if checks is None else checks, tick or (lambda *_: None)
    for done, check in enumerate(asked):
        tick(done, len(asked) + 1, f"{check.preset} {check.stage}")
        rows += _check(check)
    tick(len(asked), len(asked) + 1, EMBEDDED)
    return rows + embedded_rows() if checks is None else rows


def cut(preset: Preset, layers: int | None) -> Preset:
    """Return a shape with fewer decoder layers and tower blocks."""
    if layers is None:
        return preset
    vision, text = dict(preset.vision), dict(preset.text)
    vision["num_hidden_layers" if "num_hidden_layers" in vision else "depth"] = layers
    text["num_hidden_layers"] = layers
    if "fullatt_block_indexes" in vision:
        vision["fullatt_block_indexes"] = [layers - 1]
    if "deepstack_visual_indexes" in vision:
        vision["deepstack_visual_indexes"] = list(range(layers - 1))
    return replace(preset, vision=vision, text=text)


def _check(check: PlanCheck) -> list[Row]:
    preset = cut(get_preset(check.preset), check.layers)
    # Without native instructions bfloat16 is slow on a CPU; the cut shapes fit in float32.
    half = preset.half and check.layers is None
    case = build(
        preset, (check.stage,), check.frames, None, torch.bfloat16 if half else torch.float32
    )
    stage = MeasuredStage(case, check.stage, (check.stage,))
    inputs = {**case.prompt, **case.pixels}
    if check.stage == "llm":
        inputs["mm_encoder_outputs"] = case.features()
        work = Work(inputs["input_ids"].shape[1], 1, (case.n,), 0, (case.grid,))
    else:
        work = work_of(case.model, inputs)

    def run(spec: str | None) -> float:
        return stage.run(spec).ms[check.stage]

    learner = Learner(case.model, remember=False)
    learner.learn(inputs, work, "forward", run)
    shared = {"preset": check.preset, "stage": check.stage, "frames": check.frames}
    shared |= {"layers": check.layers, "dtype": dtype_name(case.visual.dtype)}
    return _rows(learner, work, "forward", run, check.specs, shared)


def embedded_rows(clock: Clock = time.perf_counter) -> list[Row]:
    """Measure the embedded model on a clip, from ready inputs to the first token."""
    from mmfast.core.trace import Trace
    from mmfast.pipelines import pipeline
    from mmfast.tiny.suites import suite

    pipe = pipeline("video-qa", EMBEDDED, device="cpu", max_new_tokens=1)
    case = suite(1, 0)[0]
    inputs, _ = pipe._inputs([(case.media[0], case.question)], Trace())
    work = work_of(pipe.model, inputs)
    learner = Learner(pipe.model, remember=False, clock=clock)
    run = partial(first_token, pipe, inputs, clock)
    learner.learn(inputs, work, "generate", run)
    shared = {"preset": EMBEDDED, "stage": "generate", "frames": 8, "layers": None}
    return _rows(learner, work, "generate", run, EMBEDDED_SPECS, {**shared, "dtype": "float32"})


def first_token(pipe: Any, inputs: Mapping[str, Any], clock: Clock, spec: str | None) -> float:
    """Measure milliseconds to the first token of a pipeline with prepared inputs."""
    first = FirstToken(clock)
    start = clock()
    with attach(pipe.model, spec):
        pipe.run(dict(inputs), streamer=first)
    return (first.at - start) * 1e3


def _rows(
    learner: Learner, work: Work, call: str, run: Run, specs: Sequence[str | None], shared: Row
) -> list[Row]:
    for spec in specs:
        learner.price(parse(spec), work)
    costs = {spec: learner.cost(work, parse(spec), call) for spec in specs}
    times: dict[str | None, list[float]] = {spec: [run(spec)] for spec in specs}
    for _ in range(7 if times[None][0] < SHORT_MS else 1):
        for spec in specs:
            times[spec].append(run(spec))
    environ = {**environment(), "device": "cpu", "threads": torch.get_num_threads()}
    return [
        {"suite": "plan", **shared, **environ, **_row(spec, costs[spec], times[spec])}
        for spec in specs
    ]


def _row(spec: str | None, cost: Cost, times: Sequence[float]) -> Row:
    ms = median(times[1:])  # the first run warmed up
    row = {"reduce": spec, "kept": cost.kept, "predicted_ms": cost.ttft, "measured_ms": ms}
    parts = {p: getattr(cost, p) for p in ("encode", "select", "prefill", "overhead")}
    return {**row, "ratio": ms / cost.ttft, "n": len(times) - 1, "parts": parts}
