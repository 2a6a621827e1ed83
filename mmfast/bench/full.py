"""`mmfast bench --full`: all benchmarks of one device in minutes, and the table of goals.

Rows are appended after every step; on the CPU the same steps run at tiny sizes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from mmfast.bench.cases import pick_dtype
from mmfast.bench.presets import get_preset
from mmfast.bench.registry import IncompleteError, named_rows, names
from mmfast.bench.report.accuracy import label
from mmfast.bench.report.table import NOT_MEASURED
from mmfast.bench.results import Row, bench_rows, share
from mmfast.bench.run import Tick, run_bench
from mmfast.bench.specs import parse_stages
from mmfast.bench.stages import check_fits
from mmfast.core.errors import MmfastError
from mmfast.models.loading import device_name, pick_device

MINUTES, KEEP = 6.0, "0.25,0.1"
_EVERY = "vit,llm,decode,ttft,selection"
_METHODS = ("uniform", "evs", "divprune", "holitom", "fastv")
_BIG = "llava-onevision-7b"
_IN_TOWER = "tome@vit:0.5+holitom:0.1"
# Those that run on the device; the other benchmarks of these suites measure processors, for long.
_ON_CUDA = {
    "kernels": (
        "attention-column-sums",
        "max-min-select",
        "segment-merge",
        "selected-attention",
        "temporal-difference",
    ),
    "decode": ("compiled", "hooks", "moshi-frame"),
    "encoder": ("attention", "batch", "compile", "merge", "patch", "scene", "timm"),
}
Sink = Callable[[list[Row]], None]


class RunStep(NamedTuple):
    """One part of the run."""

    label: str  # name on the terminal
    weight: float  # share of the time, relative to the other steps
    # from a tick and a condition that ends its rounds early to rows
    run: Callable[[Callable[[int, int], None], Callable[[], bool]], list[Row]]
    # raises an MmfastError where the model does not fit in memory
    check: Callable[[], None] = lambda: None


def plan(device: torch.device, preset: str | None = None) -> list[RunStep]:
    """Return the steps of `--full` on a device, the most important first."""
    cuda = device.type == "cuda"
    of = _ON_CUDA if cuda else {"kernels": names("kernels")}
    steps = [_named("kernels", name, 1.0) for name in of["kernels"]]
    if preset is not None:
        return [*steps, _shape(device, preset, 32 if cuda else 8, _METHODS, _EVERY, 8.0)]
    if not cuda:
        return [*steps, _shape(device, "tiny", 4, ("evs", "divprune", "fastv"), _EVERY, 2.0, 2)]
    # Separate stages each get their share of the time; decoding is slow and needs few specs.
    many = (*_METHODS, _IN_TOWER)
    steps.append(_shape(device, _BIG, 32, many, "vit,ttft,selection", 5.0))
    steps.append(_shape(device, _BIG, 32, _METHODS, "llm", 3.0))
    steps += [_named("decode", name, 1.0) for name in of["decode"]]
    steps += [_named("encoder", name, 1.0) for name in of["encoder"]]
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
    """Run the plan on a device, by default CUDA where there is one; `preset` is one shape for all.

    Steps share the remaining `minutes` by their weights; rounds end early, and a step without any
    is left out. `sink` receives the rows of each step, `tell` lines of text. Returns `ok`,
    `device`, `seconds`, `steps` [{label, state, seconds, rows, reason}] and `rows`; a step is
    `done`, `left out` or `failed`, and a failed one makes `ok` False.
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
    report: list[Row] = []
    whole = sum(step.weight for step in steps)
    for number, step in enumerate(steps):
        begun = clock()
        left = 60 * minutes - (begun - start)
        ahead = sum(each.weight for each in steps[number:])
        progress = _progress(tick, whole - ahead, step, whole)
        late = begun + left * step.weight / ahead
        enough = partial(lambda end: clock() > end, late)
        state, found, reason = _do(step, left, progress, enough)
        sink(found)
        rows += found
        seconds = clock() - begun
        report.append({"label": step.label, "state": state, "seconds": seconds})
        report[-1] |= {"rows": len(found), "reason": reason}
        if reason:
            tell(f"{state}: {step.label}: {reason}")
        if not _emptied(where):
            tell(f"{where} takes no more work after that; {len(steps) - number - 1} steps left out")
            break
    ok = all(step["state"] != "failed" for step in report)
    document = {"ok": ok, "device": where.type, "seconds": clock() - start}
    return {**document, "steps": report, "rows": rows}


def _emptied(device: torch.device) -> bool:
    """Free memory; False where a fault on the device ended all work there for this process."""
    gc.collect()
    try:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    except RuntimeError:  # AcceleratorError is one
        return False
    return True


def _do(
    step: RunStep, left: float, progress: Callable[[int, int], None], enough: Callable[[], bool]
) -> tuple[str, list[Row], str]:
    """Run one step; return (state, rows, reason), also after an error in it."""
    if left <= 0:
        return "left out", [], "no time left"
    try:
        step.check()
    except MmfastError as error:
        return "left out", [], str(error)
    try:
        return "done", step.run(progress, enough), ""
    except IncompleteError as error:
        return "failed", error.rows, str(error)
    except MmfastError as error:
        return "failed", [], str(error)
    except Exception as error:  # of a compiler or driver: the other steps still run
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
        asked: dict[str, Any] = {"keep": KEEP, "stages": stages, "device": str(device)}
        asked |= {"iters": rounds, "progress": progress, "enough": enough}
        document = run_bench(preset, list(methods), frames, **asked)
        if document["interrupted"]:
            raise KeyboardInterrupt
        if not document["ok"]:
            raise MmfastError("gate: " + "; ".join(document["faults"]))
        return bench_rows(document)

    text = f"{preset}, {frames} frames: {stages} of {', '.join(methods)}"
    return RunStep(text, weight, run, check)


def _progress(tick: Tick, behind: float, step: RunStep, whole: float) -> Callable[[int, int], None]:

    def progress(done: int, total: int) -> None:
        here = step.weight * done / max(1, total)
        tick(round(1000 * (behind + here) / whole), 1000, step.label.partition(":")[0])

    progress(0, 1)
    return progress


_SMALL = "llava-onevision-0.5b"
BEFORE = ("uniform", "evs", "divprune", "holitom")  # reduce before the language model
_LABELS = {"llm": "prefill", "ttft": "tower and prefill"}


class Goal(NamedTuple):
    """A required value of rows of suite `bench`."""

    what: str  # description
    bound: str  # the required value as text
    where: tuple[str, str, str]  # preset, device and stage of the rows
    selects: Callable[[Row], bool]  # selects rows among them
    key: str  # field of the value
    limit: float  # the least value, or the largest where `most`
    most: bool = False
    text: Callable[[float], str] = "{:.2f}x".format  # formats a value

    def fits(self, row: Row) -> bool:
        """Match the place of a row, then its spec."""
        return (row["preset"], row["device"], row["stage"]) == self.where and self.selects(row)

    def met(self, value: float) -> bool:
        """Compare a value with the limit."""
        return value <= self.limit if self.most else value >= self.limit


def _gain(preset: str, device: str, stage: str, kept: float, least: float) -> Goal:
    def selects(row: Row) -> bool:
        found = share(row["reduce"], row["kept"], row["tokens"])
        return label(row["reduce"]) in BEFORE and found == kept

    what = f"{preset}, {device.upper()}, {_LABELS[stage]}, {100 * kept:.0f} % kept before the "
    where = (preset, device, stage)
    return Goal(what + "language model", f"{least}x", where, selects, "speedup", least)


def _oracle(methods: tuple[str, ...], least: float) -> Goal:
    what = f"{_BIG}, CUDA, first token with fixed indices / with {' or '.join(methods)}"
    place = (_BIG, "cuda", "ttft")
    selects = lambda row: label(row["reduce"]) in methods
    return Goal(what, f"{least}", place, selects, "of_oracle", least, text="{:.2f}".format)


def _at_most(what: str, stage: str, key: str, most: float) -> Goal:
    bound, place = f"at most {100 * most:.0f} %", (_BIG, "cuda", stage)
    text = lambda value: f"{100 * value:.1f} %"
    what = f"{_BIG}, CUDA, {what}"
    return Goal(what, bound, place, lambda row: True, key, most, most=True, text=text)


GOALS = (
    _gain(_SMALL, "cpu", "llm", 0.25, 3.4),
    _gain(_SMALL, "cpu", "llm", 0.1, 7.0),
    _gain(_BIG, "cuda", "llm", 0.25, 3.7),
    _gain(_BIG, "cuda", "llm", 0.1, 7.5),
    _gain(_BIG, "cuda", "ttft", 0.25, 2.1),
    _gain(_BIG, "cuda", "ttft", 0.1, 2.6),
    Goal(
        f"{_BIG}, CUDA, tower and prefill, merged in the tower too, 10 % kept",
        *("3.2x", (_BIG, "cuda", "ttft")),
        lambda row: "@vit" in (row["reduce"] or "") and str(row["reduce"]).endswith(":0.1"),
        *("speedup", 3.2),
    ),
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
    """Return the range of values, and yes where all of them meet the goal."""
    values = [(v, row) for row in rows if goal.fits(row) and (v := row.get(goal.key)) is not None]
    if not values:
        return NOT_MEASURED, ""
    low, high = (pick(values, key=lambda pair: pair[0]) for pick in (min, max))
    found = [f"{goal.text(v)} (`{row['reduce']}`)" for v, row in (low, high)]
    return " to ".join(dict.fromkeys(found)), "yes" if all(goal.met(v) for v, _ in values) else "no"
