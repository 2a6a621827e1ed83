"""Plans for model shapes: one layer and one tower block are built and timed, the rest is counted.

So a shape can be planned for that would never fit this machine. `check_plan` builds all of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from mmfast.bench.cases import Case, build, model_config, pick_device, pick_dtype
from mmfast.bench.inputs import pixel_inputs, video_grid
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.stages import Stage
from mmfast.models.adapter import tower_of
from mmfast.planner.calibrate import Tick
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.shape import Shape, shape_of
from mmfast.planner.target import Target

SHORT_MS = 1000.0  # a call this short is measured five times


@dataclass(frozen=True)
class Shaped:
    """A planner for a model shape, and the request it plans for."""

    planner: Planner
    inputs: Mapping[str, Any]


def shaped(preset: str, frames: int = 8, device: str | None = None, dtype: str = "auto") -> Shaped:
    """Build one layer and one block of a shape, with random weights.

    Raises:
        MmfastError: An unknown preset, device or dtype, or frames that the family cannot take.
    """
    shape, where = get_preset(preset), pick_device(device)
    kind = pick_dtype(dtype, shape, where)
    video_grid(shape, frames)
    case = build(preset, (), frames, where, kind)
    pixels = {
        k: v.to(where, kind if v.is_floating_point() else v.dtype)
        for k, v in pixel_inputs(shape, frames, 0).items()
    }
    planner = Planner(case.model, shape=whole_shape(shape, case.model))
    return Shaped(planner, {**case.prompt, **pixels})


def plan_shape(
    target: Target,
    preset: str,
    frames: int = 8,
    device: str | None = None,
    dtype: str = "auto",
    tick: Tick | None = None,
    fresh: bool = False,
) -> Plan:
    """Plan for a clip of `frames` frames on a model shape; `fresh` measures the device anew.

    Raises:
        MmfastError: Also where nothing meets the target.
    """
    made = shaped(preset, frames, device, dtype)
    if fresh:
        made.planner.learner.forget()
    return made.planner.plan(made.inputs, target, call="forward", tick=tick)


def whole_shape(preset: Preset, model: Any) -> Shape:
    """The shape of a preset, of which `model` has one layer and one tower block."""
    config = model_config(preset, ("ttft",))
    depth, vision = config.get_text_config().num_hidden_layers, config.vision_config
    blocks = int(getattr(vision, "num_hidden_layers", None) or vision.depth)
    cut = shape_of(model)
    layer = _bytes(model.get_decoder().layers[0])
    block = _bytes(tower_of(model).blocks[0])
    weights = cut.weights + (depth - 1) * layer + (blocks - 1) * block
    return replace(cut, layers=cut.layers[:1] * depth, blocks=blocks, weights=weights)


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def check_plan(plan: Plan, preset: str, frames: int, device: str | None, dtype: str) -> float:
    """Measure a plan on the whole shape, with random weights; ms to the first token."""
    shape, where = get_preset(preset), pick_device(device)
    case = build(preset, ("ttft",), frames, where, pick_dtype(dtype, shape, where))
    return measured(case, "ttft", plan.spec)


def measured(case: Case, group: str, spec: str | None) -> float:
    """Milliseconds of one group of stages: of a short one the median of five runs."""
    stage = Stage(case, group, (group,), time.perf_counter)
    first = stage.run(spec).ms[group]
    again = stage.run(spec).ms[group]
    if again > SHORT_MS:
        return min(first, again)
    return median(stage.run(spec).ms[group] for _ in range(5))
