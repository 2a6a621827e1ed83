"""Break-even of reductions, by visual tokens and by answers computed at once.

Without the encoder, which costs both sides the same; selection and hooks count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from mmfast.bench.cases import Case, build, pick_device, pick_dtype
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row, dtype_name, environment
from mmfast.bench.run import SpecGroup
from mmfast.bench.stages import check_fits, one_line_when_full
from mmfast.bench.timing import Clock, clock_of, frozen, threads_set
from mmfast.core.errors import MmfastError

# Tokens along the side of one frame, then frames of the shape's own size.
SIDES, FRAMES = (3, 5, 7, 10), (1, 2, 4, 8, 16)
TINY_SIDES, TINY_FRAMES = (2, 3), (1, 4, 8, 16, 64, 128)


def shapes(preset: Preset) -> list[tuple[Preset, int]]:
    """Return (shape, frames) with increasing visual tokens."""
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


METHODS = ("evs", "divprune", "fastv", "holitom")
IN_A_BATCH = ("evs", "fastv")
KEEP = 0.25
BATCHES, AT = (1, 2, 4, 8), 4  # several at once with the fourth largest clip
ROUND_SECONDS, MOST = 20.0, 20  # rounds of one point end at the first of both
Tick = Callable[[int, int, str | None], None]


class CurvePoint(NamedTuple):
    """One point of a curve."""

    bench: str  # the varied quantity, `tokens` or `batch`
    preset: Preset  # the shape, its grid chosen for the count
    frames: int  # frames of the clip
    batch: int  # prompts at once
    methods: tuple[str, ...]  # methods to compare with stock
    stages: tuple[str, ...]  # `llm`, or `llm` and `decode`


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
    """Rows of all points of a shape; `pays` is None where the gain is within noise."""
    where = pick_device(device)
    kind = pick_dtype("auto", get_preset(preset), where)
    todo, found = points(preset), []
    with threads_set(threads), frozen():
        clock, clock_name = clock_of(where, torch.get_num_threads())
        shared: Row = {"suite": "breakeven", "preset": preset, "device": where.type}
        shared |= {"dtype": dtype_name(kind), "threads": torch.get_num_threads()}
        shared |= {"clock": clock_name, **environment(where)}
        for number, point in enumerate(todo):
            check_fits(point.preset, ("llm",), point.frames * point.batch, kind, where)
            tick(number, len(todo), f"{point.bench} {number + 1}")
            with one_line_when_full(preset, point.frames):
                case = build(point.preset, ("llm",), point.frames, where, kind)
                found += [{**shared, **row} for row in _rows(case, point, clock)]
        tick(len(todo), len(todo), None)
    return found


def _rows(case: Case, point: CurvePoint, clock: Clock) -> Iterator[Row]:
    specs = [f"{method}:{KEEP}" for method in point.methods]
    group = SpecGroup(case.repeated(point.batch), "llm", point.stages, specs, clock, full=False)
    faults = group.prepare()
    if faults:
        raise MmfastError("gate: " + "; ".join(faults))
    end = time.monotonic() + ROUND_SECONDS
    measured = group.measure(MOST, enough=lambda: time.monotonic() > end)
    for stage in point.stages:
        stock, *rows = measured.rows(stage)
        for row in rows:
            gain = row["speedup"]
            pays = None if abs(gain - 1) <= row["noise"] else gain > 1
            found = {"bench": point.bench, "batch": point.batch, "stock_ms": stock["median_ms"]}
            kept = ("stage", "reduce", "tokens", "median_ms", "ideal", "speedup", "noise")
            yield {key: row[key] for key in kept} | {**found, "pays": pays, "n": measured.rounds}
