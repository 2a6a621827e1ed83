"""Break-even of reductions, by visual tokens and by answers computed at once.

It measures prefill behind the encoder and decoding steps: the encoder costs both sides the same, so
it changes the gain but not the break-even point. Selection and hooks count against the method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfast.bench.cases import Case, build, pick_device, pick_dtype
from mmfast.bench.gate import check
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row, dtype_name, environment
from mmfast.bench.specs import Twins
from mmfast.bench.stages import MeasuredStage, RunOutcome, check_fits, one_line_when_full
from mmfast.bench.timing import (
    AGAIN,
    PairedTimes,
    Sample,
    clock_of,
    frozen,
    interleave,
    threads_set,
    warm_up,
)
from mmfast.core.errors import MmfastError
from mmfast.models.flops import decode_bytes, prefill_flops

# Tokens along the side of one frame, then frames of the shape's own size.
SIDES, FRAMES = (3, 5, 7, 10), (1, 2, 4, 8, 16)
TINY_SIDES, TINY_FRAMES = (2, 3), (1, 4, 8, 16, 64, 128)


def shapes(preset: Preset) -> list[tuple[Preset, int]]:
    """Return (shape, frames) with increasing visual tokens.

    Raises:
        MmfastError: The family takes no images of these sizes.
    """
    if preset.family != "llava_onevision":
        raise MmfastError(
            f"--break-even takes LLaVA-OneVision shapes and tiny, not {preset.name!r}"
        )
    tiny = preset.name == "tiny"
    sides, frames = (TINY_SIDES, TINY_FRAMES) if tiny else (SIDES, FRAMES)
    small = [(_shrunk(preset, side), 1) for side in sides]
    return small + [(preset, count) for count in frames]


def _shrunk(preset: Preset, side: int) -> Preset:
    """Return the shape with frames of `side` x `side` tokens, of 2 x 2 patches each."""
    patches = 2 * side
    size = patches * int(preset.vision["patch_size"])
    vision = {**preset.vision, "image_size": size}
    return replace(preset, vision=vision, grid=(patches, patches))


@dataclass
class BatchCase(Case):
    """A case whose prompt is repeated `batch` times."""

    batch: int = 1

    @classmethod
    def of(cls, case: Case, batch: int) -> BatchCase:
        """Repeat the prompt of a case."""
        values = {each.name: getattr(case, each.name) for each in fields(case)}
        prompt = {k: v.repeat(batch, *[1] * (v.ndim - 1)) for k, v in case.prompt.items()}
        return cls(**{**values, "prompt": prompt}, batch=batch)

    def features(self) -> dict[str, Any]:
        """Return fresh `mm_encoder_outputs` `[B, N + 1, D]`."""
        out = super().features()["video"]
        out.pooler_output = out.pooler_output.repeat(self.batch, 1, 1)
        return {"video": out}


METHODS = ("evs", "divprune", "fastv", "holitom")
IN_A_BATCH = ("evs", "fastv")
KEEP = 0.25
BATCHES, AT = (1, 2, 4, 8), 4  # several at once with the fourth largest clip
ROUND_SECONDS = 20.0  # for the rounds of one count, but at least `FEWEST`
FEWEST, MOST = 3, 20
Tick = Callable[[int, int, str | None], None]


@dataclass(frozen=True)
class CurvePoint:
    """One point of a curve.

    Attributes:
        bench: The varied quantity, `tokens` or `batch`.
        preset: The shape, its grid chosen for the count.
        frames: Frames of the clip.
        batch: Prompts at once.
        methods: Methods to compare with stock.
        stages: `llm`, or `llm` and `decode`.
    """

    bench: str
    preset: Preset
    frames: int
    batch: int
    methods: tuple[str, ...]
    stages: tuple[str, ...]


def points(preset: str) -> list[CurvePoint]:
    """Return the points, from few tokens to many, then from one answer to eight."""
    shape = get_preset(preset)
    counts = shapes(shape)
    by_tokens = [CurvePoint("tokens", s, frames, 1, METHODS, ("llm",)) for s, frames in counts]
    shape, frames = counts[-AT]
    both = ("llm", "decode")
    return by_tokens + [CurvePoint("batch", shape, frames, b, IN_A_BATCH, both) for b in BATCHES]


def run_break_even(
    preset: str = "tiny",
    threads: int | None = None,
    device: str | None = None,
    tick: Tick = lambda done, total, label: None,
) -> list[Row]:
    """Measure all points of a shape.

    Args:
        preset: A LLaVA-OneVision shape or `tiny`.
        threads: CPU threads; torch's own choice if None.
        device: `cpu` or `cuda`; CUDA where there is one.
        tick: Called with (done, total, label).

    Returns:
        Rows of suite `breakeven`. `pays` is True where the gain is beyond noise, False where the
        loss is, None between.

    Raises:
        MmfastError: A shape of another family, a device that is not there, too little memory, or
            a method that fails the gate.
    """
    where = pick_device(device)
    kind = pick_dtype("auto", get_preset(preset), where)
    todo, found = points(preset), []
    with threads_set(threads), frozen():
        clock, clock_name = clock_of(where, torch.get_num_threads())
        shared = {
            "suite": "breakeven",
            "preset": preset,
            "device": where.type,
            "dtype": dtype_name(kind),
            "threads": torch.get_num_threads(),
            "clock": clock_name,
            **environment(where),
        }
        gated: set[str] = set()
        for number, point in enumerate(todo):
            check_fits(point.preset, ("llm",), point.frames * point.batch, kind, where)
            tick(number, len(todo), f"{point.bench} {number + 1}")
            with one_line_when_full(preset, point.frames):
                case = build(point.preset, ("llm",), point.frames, where, kind)
                stage = MeasuredStage(BatchCase.of(case, point.batch), "llm", point.stages, clock)
                found += [{**shared, **row} for row in _rows(stage, point, gated)]
        tick(len(todo), len(todo), None)
    return found


def _rows(stage: MeasuredStage, point: CurvePoint, gated: set[str]) -> Iterator[Row]:
    """Gate each method once, then run stock, stock again and every method in turn."""
    twins = [Twins(f"{m}:{KEEP}", f"even{i}", towerless=True) for i, m in enumerate(point.methods)]
    with ExitStack() as stack:
        for each in twins:
            stack.enter_context(each.registered())
        stock = stage.run(None)
        for each in twins:
            _gate(stage, each, stock, gated)
        specs = {each.asked: each.spec() for each in twins}
        seen = {text: stage.run(spec) for text, spec in specs.items()}
        jobs: dict[str, Callable[[], Sample]] = {
            "stock": partial(_sample, stage, None),
            **{text: partial(_sample, stage, spec) for text, spec in specs.items()},
            AGAIN: partial(_sample, stage, None),
        }
        if sum(stock.ms.values()) < 1000:
            for job in jobs.values():
                warm_up(job)
        samples = interleave(jobs, _rounds(stock, seen.values()))
    for name in stage.stages:
        yield from _stage_rows(stage, point, name, stock, seen, samples)


def _stage_rows(
    stage: MeasuredStage,
    point: CurvePoint,
    name: str,
    stock: RunOutcome,
    seen: dict[str, RunOutcome],
    samples: dict[str, list[Sample]],
) -> Iterator[Row]:
    times = PairedTimes.of(samples, name)
    for text, outcome in seen.items():
        gain, mine = times.speedup(text), times.times[text]
        costs = [_cost(stage, each, name, point.batch) for each in (stock, outcome)]
        yield {
            "bench": point.bench,
            "stage": name,
            "reduce": text,
            "batch": point.batch,
            "tokens": stage.case.n,
            "stock_ms": median(times.base),
            "median_ms": median(mine),
            "speedup": gain,
            "ideal": costs[0] / costs[1],
            "noise": times.noise,
            "pays": None if abs(gain - 1) <= times.noise else gain > 1,
            "n": len(mine),
        }


def _gate(stage: MeasuredStage, twins: Twins, stock: RunOutcome, gated: set[str]) -> None:
    """Run the gate at the first point of a method."""
    method = twins.asked.partition(":")[0]
    if method in gated:
        return
    gated.add(method)
    faults = check(stage, twins, stock).faults
    if faults:
        raise MmfastError("gate: " + "; ".join(faults))


def _sample(stage: MeasuredStage, spec: str | None) -> Sample:
    return stage.run(spec).ms


def _rounds(stock: RunOutcome, seen: Any) -> int:
    """Return the number of rounds that `ROUND_SECONDS` allow, within bounds."""
    one = 2 * sum(stock.ms.values()) + sum(sum(outcome.ms.values()) for outcome in seen)
    return max(FEWEST, min(MOST, int(1000 * ROUND_SECONDS / one)))


def _cost(stage: MeasuredStage, outcome: RunOutcome, name: str, batch: int) -> float:
    """Count FLOPs of a prefill; bytes of a decoding step, whose weights are read once for all."""
    model = stage.case.model
    if name == "llm":
        return prefill_flops(model, outcome.lengths)  # of one prompt, which suffices for a ratio
    weights = decode_bytes(model, [0] * len(outcome.lengths))
    return weights + batch * (decode_bytes(model, outcome.lengths) - weights)
