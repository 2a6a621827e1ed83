"""`mmfast bench --full`: everything for one device, kernels' correctness first, in minutes.

Meant for a GPU that is at hand for a short while: one command builds, checks and times, writes
rows as they come, and says what a lack of time or memory left out. On the CPU the same steps run
at tiny sizes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmfast.bench.cases import pick_device, pick_dtype
from mmfast.bench.named import named_rows, names
from mmfast.bench.presets import get_preset
from mmfast.bench.report.accuracy import label
from mmfast.bench.report.table import NOT_MEASURED
from mmfast.bench.results import Row, bench_rows, share
from mmfast.bench.run import run_bench
from mmfast.bench.specs import parse_stages
from mmfast.bench.stages import check_fits
from mmfast.core.errors import MmfastError
from mmfast.models.loading import device_name

MINUTES, KEEP = 6.0, "0.25,0.1"
_EVERY = "vit,llm,decode,ttft,selection"
_METHODS = ("uniform", "evs", "divprune", "holitom", "fastv")
_BIG = "llava-onevision-7b"
_IN_TOWER = "tome@vit:0.5+holitom:0.1"
Tick = Callable[[int, int, str | None], None]
Sink = Callable[[list[Row]], None]


@dataclass(frozen=True)
class RunStep:
    """One part of the run.

    Attributes:
        label: What it measures, for people.
        weight: Its part of the time, relative to the others.
        run: Given a tick and what ends its rounds early, returns rows.
        check: Raises an MmfastError where the machine cannot hold it.
    """

    label: str
    weight: float
    run: Callable[[Callable[[int, int], None], Callable[[], bool]], list[Row]]
    check: Callable[[], None] = lambda: None


def plan(device: torch.device, preset: str | None = None) -> list[RunStep]:
    """What `--full` does on a device, in order: what matters most comes first.

    Args:
        device: CUDA gets real shapes, the CPU tiny ones.
        preset: Measure this shape alone.

    Raises:
        MmfastError: There is no such preset.
    """
    cuda = device.type == "cuda"
    steps = [_named("kernels", name, 1.0) for name in names("kernels")]
    if preset is not None:
        return [*steps, _shape(device, preset, 32 if cuda else 8, _METHODS, _EVERY, 8.0)]
    if not cuda:
        return [*steps, _shape(device, "tiny", 4, ("evs", "divprune", "fastv"), _EVERY, 2.0, 2)]
    # Stages apart, so that each gets its part of the time; decoding is slow and needs few specs.
    many = (*_METHODS, _IN_TOWER)
    steps.append(_shape(device, _BIG, 32, many, "vit,ttft,selection", 5.0))
    steps.append(_shape(device, _BIG, 32, _METHODS, "llm", 3.0))
    steps += [_named("decode", name, 1.0) for name in names("decode")]
    steps += [_named("encoder", name, 1.0) for name in names("encoder")]
    steps.append(_shape(device, _BIG, 32, ("uniform",), "decode", 1.0))
    few = ("evs", "fastv")
    for name in ("qwen2.5-vl-7b", "qwen3-vl-8b", "llava-onevision-0.5b"):
        steps.append(_shape(device, name, 32, few, "vit,llm,ttft,selection", 2.5))
    return steps


def run_full(
    device: str | None = None,
    preset: str | None = None,
    minutes: float = MINUTES,
    tick: Tick = lambda done, total, label: None,
    sink: Sink = lambda rows: None,
    tell: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the plan.

    Args:
        device: `cpu`, `cuda`; CUDA where there is one.
        preset: One shape instead of all.
        minutes: What it may take. Steps share what is left by their weights; rounds end early,
            and a step that finds no time left is left out.
        tick: Called with (done, total, label).
        sink: Gets the rows of each step as it ends.
        tell: Gets lines for people: the plan, then what was left out or failed.
        clock: Seconds.

    Returns:
        `ok`, `device`, `seconds`, `steps` [{label, state, seconds, rows, reason}] and `rows`; a
        step is `done`, `left out` or `failed`, and a failed one makes `ok` False.

    Raises:
        MmfastError: No such device or preset, or no time.
    """
    if not minutes > 0:
        raise MmfastError(f"--minutes {minutes} is no time to measure in; give more than 0")
    where = pick_device(device)
    steps = plan(where, preset)
    tell(f"on {device_name(where)}, about {minutes:g} minutes at most:")
    for step in steps:
        tell(f"  {step.label}")
    start = clock()
    rows: list[Row] = []
    told: list[Row] = []
    whole = sum(step.weight for step in steps)
    for number, step in enumerate(steps):
        begun = clock()
        left = 60 * minutes - (begun - start)
        ahead = sum(each.weight for each in steps[number:])
        progress = _progress(tick, whole - ahead, step, whole)
        state, found, reason = _do(step, begun + left * step.weight / ahead, left, progress, clock)
        sink(found)
        rows += found
        seconds = clock() - begun
        told.append({"label": step.label, "state": state, "seconds": seconds})
        told[-1] |= {"rows": len(found), "reason": reason}
        if reason:
            tell(f"{state}: {step.label}: {reason}")
        _free(where)
    ok = all(step["state"] != "failed" for step in told)
    document = {"ok": ok, "device": where.type, "seconds": clock() - start}
    return {**document, "steps": told, "rows": rows}


def _do(
    step: RunStep,
    deadline: float,
    left: float,
    progress: Callable[[int, int], None],
    clock: Callable[[], float],
) -> tuple[str, list[Row], str]:
    """(state, rows, reason) of one step; the run goes on whatever happens in it."""
    if left <= 0:
        return "left out", [], "no time left"
    try:
        step.check()
    except MmfastError as error:
        return "left out", [], str(error)
    try:
        return "done", step.run(progress, lambda: clock() > deadline), ""
    except MmfastError as error:
        return "failed", [], str(error)
    except Exception as error:  # a compiler's or driver's; the machine is lent, so go on
        lines = str(error).splitlines() or [""]
        return "failed", [], f"{type(error).__name__}: {lines[0][:200]}"


def _named(suite: str, name: str, weight: float) -> RunStep:
    def run(progress: Callable[[int, int], None], enough: Callable[[], bool]) -> list[Row]:
        return named_rows(suite, name, lambda label, done, total: progress(done, total))

    return RunStep(f"{suite} {name}: correctness, then time", weight, run)


def _shape(
    device: torch.device,
    preset: str,
    frames: int,
    methods: Sequence[str],
    stages: str,
    weight: float,
    rounds: int | None = None,
) -> RunStep:
    shape, kind = get_preset(preset), pick_dtype("auto", get_preset(preset), device)

    def check() -> None:
        check_fits(shape, parse_stages(stages), frames, kind, device)

    def run(progress: Callable[[int, int], None], enough: Callable[[], bool]) -> list[Row]:
        document = run_bench(
            preset=preset,
            reduce=list(methods),
            frames=frames,
            keep=KEEP,
            stages=stages,
            device=str(device),
            iters=rounds,
            progress=progress,
            enough=enough,
        )
        if not document["ok"]:
            raise MmfastError("gate: " + "; ".join(document["faults"]))
        return bench_rows(document)

    label = f"{preset}, {frames} frames: {stages} of {', '.join(methods)}"
    return RunStep(label, weight, run, check)


def _progress(tick: Tick, behind: float, step: RunStep, whole: float) -> Callable[[int, int], None]:
    """The bar of the whole run, in thousandths, from that of one step."""

    def progress(done: int, total: int) -> None:
        here = step.weight * done / max(1, total)
        tick(round(1000 * (behind + here) / whole), 1000, step.label.partition(":")[0])

    progress(0, 1)
    return progress


def _free(device: torch.device) -> None:
    """Give one model's memory back before the next is built."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


_SMALL, _BIG_SHAPE = "llava-onevision-0.5b", "llava-onevision-7b"
BEFORE = ("uniform", "evs", "divprune", "holitom")  # reduce before the language model


@dataclass(frozen=True)
class Goal:
    """One line of the table of goals.

    Attributes:
        what: For people.
        bound: What is asked for, for people.
        fits: Whether a row of suite `bench` says something about it.
        value: What it says.
        met: Whether a value is good enough.
        told: A value as text.
    """

    what: str
    bound: str
    fits: Callable[[Row], bool]
    value: Callable[[Row], float | None]
    met: Callable[[float], bool]
    told: Callable[[float], str]


def _gain(preset: str, device: str, stage: str, kept: float, least: float) -> Goal:
    name = {"llm": "prefill", "ttft": "tower and prefill"}[stage]

    def fits(row: Row) -> bool:
        return (
            (row["preset"], row["device"], row["stage"]) == (preset, device, stage)
            and label(row["reduce"]) in BEFORE
            and share(row["reduce"], row["kept"], row["tokens"]) == kept
        )

    what = f"{preset}, {device.upper()}, {name}, {100 * kept:.0f} % kept before the language model"
    return Goal(what, f"{least}x", fits, lambda r: r["speedup"], lambda v: v >= least, _times)


def _in_tower(preset: str, least: float) -> Goal:
    def fits(row: Row) -> bool:
        return (
            (row["preset"], row["device"], row["stage"]) == (preset, "cuda", "ttft")
            and "@vit" in (row["reduce"] or "")
            and str(row["reduce"]).endswith(":0.1")
        )

    what = f"{preset}, CUDA, tower and prefill, merged in the tower too, 10 % kept"
    return Goal(what, f"{least}x", fits, lambda r: r["speedup"], lambda v: v >= least, _times)


def _oracle(names: tuple[str, ...], least: float) -> Goal:
    def fits(row: Row) -> bool:
        found = (row["preset"], row["device"], row["stage"]) == (_BIG_SHAPE, "cuda", "ttft")
        return found and label(row["reduce"]) in names

    what = f"{_BIG_SHAPE}, CUDA, first token with fixed indices / with {' or '.join(names)}"
    return Goal(
        what, f"{least}", fits, lambda r: r["of_oracle"], lambda v: v >= least, lambda v: f"{v:.2f}"
    )


def _at_most(what: str, stage: str, key: str, most: float) -> Goal:
    def fits(row: Row) -> bool:
        return (row["preset"], row["device"], row["stage"]) == (_BIG_SHAPE, "cuda", stage)

    return Goal(
        f"{_BIG_SHAPE}, CUDA, {what}",
        f"at most {100 * most:.0f} %",
        fits,
        lambda r: r.get(key),
        lambda v: v <= most,
        lambda v: f"{100 * v:.1f} %",
    )


def _times(value: float) -> str:
    return f"{value:.2f}x"


GOALS = (
    _gain(_SMALL, "cpu", "llm", 0.25, 3.4),
    _gain(_SMALL, "cpu", "llm", 0.1, 7.0),
    _gain(_BIG_SHAPE, "cuda", "llm", 0.25, 3.7),
    _gain(_BIG_SHAPE, "cuda", "llm", 0.1, 7.5),
    _gain(_BIG_SHAPE, "cuda", "ttft", 0.25, 2.1),
    _gain(_BIG_SHAPE, "cuda", "ttft", 0.1, 2.6),
    _in_tower(_BIG_SHAPE, 3.2),
    _at_most("choosing and compacting, of the time to first token", "selection", "share", 0.03),
    _oracle(("evs", "fastv"), 0.97),
    _oracle(("divprune", "holitom"), 0.93),
    _at_most(
        "peak memory of layers whose attention is read, over SDPA", "ttft", "scoring_over", 0.02
    ),
)


def judged(rows: Sequence[Row]) -> list[Row]:
    """Every goal with the least and the best of the rows that speak about it."""
    found = ((goal, *_found(goal, rows)) for goal in GOALS)
    return [{"what": g.what, "bound": g.bound, "told": told, "met": met} for g, told, met in found]


def _found(goal: Goal, rows: Sequence[Row]) -> tuple[str, str]:
    """What was measured and whether all of it is good enough."""
    values = [(v, row) for row in rows if goal.fits(row) and (v := goal.value(row)) is not None]
    if not values:
        return NOT_MEASURED, ""
    low, high = (pick(values, key=lambda pair: pair[0]) for pick in (min, max))
    told = [f"{goal.told(v)} (`{row['reduce']}`)" for v, row in (low, high)]
    return " to ".join(dict.fromkeys(told)), "yes" if all(goal.met(v) for v, _ in values) else "no"
