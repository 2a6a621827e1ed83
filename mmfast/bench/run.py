"""`mmfast bench`: what a reduction gains on a real model shape, beside what it could gain.

Protocol: what the machine can do at best (copy, matrix product); then a gate (keep 1.0 is the
stock model bit for bit, counts are exact); peak memory in a pass of its own; then rounds in which
stock, stock again, every method and its fixed-index twin each run once. Speed-ups are medians over
rounds of paired ratios; the two stock runs give the noise floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from mmfast.bench.cases import Case, build, pick_device, pick_dtype
from mmfast.bench.ceilings import ceilings
from mmfast.bench.group import Group
from mmfast.bench.inputs import video_grid
from mmfast.bench.measure import clock_of, frozen
from mmfast.bench.memory import check_fits, one_line_when_full
from mmfast.bench.presets import get_preset
from mmfast.bench.results import environment
from mmfast.bench.specs import expand, parse_keep, parse_stages
from mmfast.bench.stages import GROUPS
from mmfast.core.errors import MmfastError

Progress = Callable[[int, int], None]


def run_bench(
    preset: str = "tiny",
    reduce: Sequence[str] = (),
    frames: int = 8,
    keep: str | Sequence[float] | None = None,
    stages: str | Sequence[str] = "llm",
    device: str | None = None,
    dtype: str = "auto",
    threads: int | None = None,
    iters: int | None = None,
    progress: Progress | None = None,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measure `reduce` on `preset`.

    Args:
        preset: One of `mmfast.bench.presets.PRESETS`.
        reduce: Specs; those without a budget get each of `keep`.
        frames: Frames of the synthetic clip.
        keep: Budgets such as `"0.25,0.1"` (also the default).
        stages: Of `vit`, `llm` (prefill behind the encoder), `decode`, `ttft`, and `selection`
            (choosing and compacting inside the run, as a share of `ttft`, or else of `llm`).
        device: `cpu`, `cuda`, `cuda:1`; CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        threads: CPU threads; torch's own choice if None.
        iters: Timed rounds; if None 30 on CUDA, 10 on the CPU, and 5 for a real shape on the CPU,
            where one round of ten specs takes a minute.
        progress: Called with (done, total).
        enough: Ends a group's rounds early, behind the third, once it says so.

    Returns:
        The JSON document of `mmfast bench`. `ok` is False and `rows` empty where the gate found
        a fault; `faults` names them.

    Raises:
        MmfastError: A preset, spec, stage, budget, device or number that cannot be, or a model
            that does not fit.
    """
    shape, asked, where = get_preset(preset), parse_stages(stages), pick_device(device)
    alone = "selection" in asked and not {"llm", "ttft"} & set(asked)
    wanted = ("llm", *asked) if alone else asked  # it is looked at inside another stage
    specs = expand(reduce, parse_keep(keep))
    kind = pick_dtype(dtype, shape, where)
    video_grid(shape, frames)
    rounds = _positive("iters", iters) or _default_rounds(preset, where)
    with _on(where), threads_set(_positive("threads", threads)), one_line_when_full(preset, frames):
        check_fits(shape, wanted, frames, kind, where)
        limits = ceilings(where, kind)
        clock, told = clock_of(where, torch.get_num_threads())
        case = build(shape, wanted, frames, where, kind)
        named = [name for name in GROUPS if set(GROUPS[name]) & set(wanted)]
        groups = [Group(case, name, wanted, specs, clock) for name in named]
        measured = _measure(groups, rounds, limits, _Ticks(progress), enough)
        measured["rows"] = [row for row in measured["rows"] if row["stage"] in asked]
        found = {"preset": preset, **_described(case, kind), "frames": frames}
        limited = {"clock": told, "ceilings": limits, **measured}
        return {**found, "tokens": case.n, **limited, "environment": environment(where)}


def _described(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "device": case.device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _measure(
    groups: Sequence[Group],
    rounds: int,
    limits: Mapping[str, float],
    ticks: _Ticks,
    enough: Callable[[], bool],
) -> dict[str, Any]:
    """Gate and rounds of every group; a fault in any leaves no speed in the document."""
    ticks.total = sum(group.work(rounds) for group in groups)
    faults: list[str] = []
    rows: list[dict[str, Any]] = []
    floors: dict[str, float] = {}
    warm, ran = [], []
    with frozen():
        for group in groups:
            faults += group.prepare(ticks)
            if faults:
                continue
            measured = group.measure(rounds, ticks, enough)
            measured.ceilings = limits
            rows += [row for stage in group.stage.stages for row in measured.rows(stage)]
            rows += measured.selection_rows() if group.selection else ()
            floors |= measured.noise
            warm.append(group.warm)
            ran.append(measured.rounds)
    return {
        "iters": min(ran, default=rounds),
        "warm_ups": min(warm, default=0),
        "noise": floors,
        "ok": not faults,
        "faults": faults,
        "rows": [] if faults else rows,
    }


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Events and memory statistics are those of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _default_rounds(preset: str, device: torch.device) -> int:
    if device.type == "cuda":
        return 30
    return 10 if preset == "tiny" else 5


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise MmfastError(f"--{name} {value} measures nothing; give at least 1")
    return value


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """That many CPU threads; as they are if None."""
    old = torch.get_num_threads()
    torch.set_num_threads(count or old)
    try:
        yield
    finally:
        torch.set_num_threads(old)


class _Ticks:
    """Counts steps for a progress bar."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.total, self.done = progress, 0, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
