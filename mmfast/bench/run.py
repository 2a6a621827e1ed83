"""`mmfast bench`: the gain of a reduction on a real model shape, beside the possible gain.

Protocol: ceilings of the machine; a gate (keep 1.0 equals the stock model bit for bit, counts are
exact); peak memory in a separate pass; then rounds of stock, stock again, every method and its
fixed-index twin. Speed-ups are medians of paired ratios; the stock runs give the noise floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch

from mmfast.bench import timing
from mmfast.bench.cases import Case, build, check_frames, pick_dtype
from mmfast.bench.gate import Checked, check
from mmfast.bench.presets import Preset, get_preset
from mmfast.bench.results import Row, dtype_name, environment
from mmfast.bench.specs import Twins, expand, parse_keep, parse_stages
from mmfast.bench.stages import (
    GROUPS,
    MeasuredStage,
    RunOutcome,
    Span,
    ceilings,
    check_fits,
    one_line_when_full,
    peaks_in,
    spans,
)
from mmfast.bench.timing import Clock, clock_of, frozen, threads_set
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.loading import pick_device
from mmfast.models.reduction.tower_signals import from_tower

REDUCING, SHARE = "reducing", "share"  # beside the stages in a sample
_NO_SPEED = dict.fromkeys(("speedup", "ideal", "of_ideal", "of_oracle"))


@dataclass
class GroupEntry:
    """One spec of a group, with the results of the untimed passes."""

    text: str  # the spec as the user wrote it
    checked: Checked  # result of the gate, whose run was the first of this spec
    selection_ms: float  # the methods alone, outside the model
    peak_mb: float  # of the whole run
    # peak megabytes in layers whose attention is read
    spans: Mapping[Span, float] = field(default_factory=dict)
    stock_spans: Mapping[Span, float] = field(default_factory=dict)  # the same of the stock model

    def scoring(self) -> dict[str, float | None]:
        """Return the span that grew most, beside stock with its fused attention."""
        pairs = [(mb, self.stock_spans[span]) for span, mb in self.spans.items()]
        if not pairs:
            return dict.fromkeys(("scoring_mb", "scoring_stock_mb", "scoring_over"))
        mine, stock = max(pairs, key=lambda pair: pair[0] / pair[1])
        over = mine / stock - 1.0
        return {"scoring_mb": mine, "scoring_stock_mb": stock, "scoring_over": over}


@dataclass
class Measured:
    """All samples of one group."""

    stage: MeasuredStage  # computes the cost of a run
    stock: RunOutcome  # the first stock run
    stock_peak: float  # peak megabytes of a stock run
    entries: Sequence[GroupEntry]
    samples: Mapping[str, list[timing.Sample]]  # by job, one a round
    # of the machine; see `mmfast.bench.stages`
    ceilings: Mapping[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)  # by stage, filled by `rows`

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.samples["stock"])

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of one timed stage, stock first."""
        pair = {k: [s[stage] for s in self.samples[k]] for k in ("stock", timing.AGAIN)}
        times, both = timing.PairedTimes(pair), [ms for mine in pair.values() for ms in mine]
        self.noise[stage] = floor = times.noise
        stock = times.base
        shared = {"stage": stage, "tokens": self.stage.case.n, "noise": floor}
        still: dict[str, Any] = {"speedup": 1.0, "ideal": 1.0, "of_ideal": 1.0, "of_oracle": 1.0}
        full = self.stage.cost(self.stock, stage)
        figures = {"kept": self.stage.case.n, "selection_ms": 0.0, "equal": True}
        figures |= {"first_ms": self.stock.ms[stage], "peak_mb": self.stock_peak}
        still |= {**self._achieved(stage, full, median(both)), **figures}
        yield {"reduce": None, **shared, **timing.spread(both), **still}
        for entry in self.entries:
            yield {"reduce": entry.text, **shared, **self._entry_row(entry, stage, stock, full)}

    def _entry_row(
        self, entry: GroupEntry, stage: str, stock: Sequence[float], full: int
    ) -> dict[str, Any]:
        mine = self.samples[f"plain {entry.text}"]
        times = [s[stage] for s in mine]
        outcome = entry.checked.outcome or self.stock
        cost, speedup = self.stage.cost(outcome, stage), timing.paired(stock, times)
        row: dict[str, Any] = {
            "speedup": speedup,
            "ideal": full / cost,
            "of_ideal": speedup * cost / full,
        }
        row |= {"of_oracle": self._of_oracle(entry, stage, times), "peak_mb": entry.peak_mb}
        row |= {**timing.spread(times), **self._achieved(stage, cost, median(times))}
        row |= {"kept": entry.checked.kept or self.stage.case.n, "first_ms": outcome.ms[stage]}
        row |= {"selection_ms": entry.selection_ms, "equal": abs(speedup - 1) <= self.noise[stage]}
        if stage != "decode":
            row |= {"reducing_ms": median(s[REDUCING] for s in mine), **entry.scoring()}
            row["reducing_share"] = median(s[SHARE] for s in mine)
        return row

    def _achieved(self, stage: str, cost: int, ms: float) -> dict[str, float | None]:
        """Return the share of the ceiling: bytes bound a decoding step, FLOPs the other stages."""
        moved = stage == "decode"
        name, ceiling = ("gb_s", "copy_gb_s") if moved else ("tflop_s", "matmul_tflop_s")
        reached, best = cost / ms / (1e6 if moved else 1e9), self.ceilings.get(ceiling)
        return {name: reached, "of_ceiling": None if best is None else reached / best}

    def _of_oracle(self, entry: GroupEntry, stage: str, times: list[float]) -> float | None:
        """Return time with free selection / time of the method; None without a selection."""
        fixed = self.samples.get(f"fixed {entry.text}")
        if fixed is None or stage == "decode":
            return None
        return timing.paired([s[stage] for s in fixed], times)

    def selection_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the time of choosing and compacting inside the runs, and its share of them."""
        host = self.stage.group
        for entry in self.entries:
            mine = self.samples[f"plain {entry.text}"]
            fixed = self.samples.get(f"fixed {entry.text}")
            n = self.stage.case.n
            alone = None if fixed is None else median(s[REDUCING] for s in fixed)
            row = {"reduce": entry.text, "stage": "selection", "tokens": n, "equal": False}
            row |= {"noise": self.noise[host], **timing.spread([s[REDUCING] for s in mine])}
            row |= {"share": median(s[SHARE] for s in mine), "share_of": host, "compact_ms": alone}
            row |= {"kept": entry.checked.kept or n, "selection_ms": entry.selection_ms}
            yield {**row, **_NO_SPEED, "peak_mb": entry.peak_mb}


WARM_ENOUGH_MS = 1000.0  # a run this long is its own warm-up; the gate made several


class SpecGroup:
    """Specs of one group of stages; without `full` there are no twins, memory or selection."""

    def __init__(
        self,
        case: Case,
        name: str,
        stages: tuple[str, ...],
        specs: list[str],
        clock: timing.Clock = time.perf_counter,
        full: bool = True,
    ) -> None:
        self.stage = MeasuredStage(case, name, stages, clock)
        # Selection is measured inside the time to the first token if that is measured.
        self.selection = "selection" in stages and name == ("ttft" if "ttft" in stages else "llm")
        self.twins = [
            Twins(part, f"{name}{i}", towerless=name == "llm", asked=text)
            for i, text in enumerate(specs)
            if (part := _part(text, name))
        ]
        self.entries: list[GroupEntry] = []
        self.warm, self.full = 1, full

    def work(self, rounds: int) -> int:
        """Count the ticks of `prepare` and `measure`."""
        return 1 + len(self.twins) + rounds * (2 + self._jobs_per_spec() * len(self.twins))

    def _jobs_per_spec(self) -> int:
        return 2 if self.full and self.stage.group != "vit" else 1

    def prepare(self, tick: Callable[[], None] = lambda: None) -> list[str]:
        """Run the gate, measure selection time and peak memory, and return the faults."""
        faults: list[str] = []
        self.stock = self.stage.observe(None)
        self.stock_peak, self.stock_spans = 0.0, dict[Span, float]()
        if self.full:
            self.stock_peak = timing.peak_during(partial(self.stage.run, None))
            self.stock_spans = self._stock_spans()
        tick()
        seen: set[str] = set()
        for twins in self.twins:
            with twins.registered():
                checked = check(self.stage, twins, self.stock, whole=twins.whole not in seen)
                seen.add(twins.whole)
                faults += checked.faults
                if not faults:
                    self.entries.append(self._entry(twins, checked))
            tick()
        return faults

    def _entry(self, twins: Twins, checked: Checked) -> GroupEntry:
        if not self.full:
            return GroupEntry(twins.asked, checked, 0.0, 0.0)
        run = partial(self.stage.run, twins.spec())
        where = self._spans(twins)
        with torch.no_grad():  # the methods alone, after the run of the gate
            calls = [partial(timing.timed, call, self.stage.clock) for call in twins.selection()]
            alone = sum((median(call()[1] for _ in range(5)) for call in calls), 0.0)
        peaks = peaks_in(self.stage.case.model, where, run)
        stock = {span: self.stock_spans[span] for span in where}
        return GroupEntry(twins.asked, checked, alone, timing.peak_during(run), peaks, stock)

    def _spans(self, twins: Twins) -> list[Span]:
        return spans(self.stage.case.model, twins.stages, tower=self.stage.group != "llm")

    def _stock_spans(self) -> dict[Span, float]:
        where = list(dict.fromkeys(span for twins in self.twins for span in self._spans(twins)))
        return peaks_in(self.stage.case.model, where, partial(self.stage.run, None))

    def measure(
        self,
        rounds: int,
        tick: Callable[[], None] = lambda: None,
        enough: Callable[[], bool] = lambda: False,
    ) -> Measured:
        """Run interleaved rounds, fewer once `enough()` is true."""
        with ExitStack() as stack:
            for twins in self.twins:
                stack.enter_context(twins.registered())
            jobs = self._jobs()
            self.warm = min(self._warm(name, job) for name, job in jobs.items())
            samples = timing.interleave(jobs, rounds, tick, enough, keep=True)
        return Measured(self.stage, self.stock, self.stock_peak, self.entries, samples)

    def _jobs(self) -> dict[str, Callable[[], timing.Sample]]:
        """Return stock first, stock again in the middle, methods beside fixed-index twins."""
        specs: dict[str, str | None] = {"stock": None}
        for index, entry in enumerate(self.entries):
            if index == len(self.entries) // 2:
                specs[timing.AGAIN] = None
            chosen = any(recording.results for recording in entry.checked.twins.recordings)
            for role in ("plain", "fixed")[: self._jobs_per_spec() if chosen else 1]:
                specs[f"{role} {entry.text}"] = entry.checked.twins.spec(role)
        specs.setdefault(timing.AGAIN, None)
        return {name: partial(self._sample, spec) for name, spec in specs.items()}

    def _sample(self, spec: str | None) -> timing.Sample:
        outcome = self.stage.run(spec)
        return {**outcome.ms, REDUCING: outcome.reducing_ms, SHARE: outcome.share}

    def _warm(self, name: str, job: Callable[[], timing.Sample]) -> int:
        """Warm a job up, unless it takes long: the gate ran it already."""
        spec = name.partition(" ")[2]
        known = {e.text: e.checked.outcome for e in self.entries}.get(spec) or self.stock
        if sum(known.ms.values()) > WARM_ENOUGH_MS:
            return 1
        return 1 + timing.warm_up(job)


def _part(text: str, group: str) -> str | None:
    stages = parse(text)
    if group == "llm":
        stages = tuple(s for s in stages if s.site != "vit")
    elif group == "vit" and not any(
        s.site == "vit" or (s.site == "pre" and from_tower(s.method.needs)) for s in stages
    ):
        return None
    return "+".join(map(str, stages)) or None


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
    """Measure `reduce` on `preset` and return the JSON document of `mmfast bench`.

    Specs without a budget get each of `keep`, such as `"0.25,0.1"`. `frames` are those of the
    synthetic clip. `stages` are of `vit`, `llm` (prefill behind the encoder), `decode`, `ttft`, and
    `selection` (choosing and compacting inside the run, as a share of `ttft`, or else of `llm`).
    `dtype` is `auto`, `float32`, `bfloat16` or `float16`. `iters` rounds are timed: 30 on CUDA by
    default, 10 on the CPU, and 5 for a real shape there, where one round of ten specs takes a
    minute; once `enough` is true, a group ends after its third, on Ctrl-C the run (`interrupted`).
    `progress` gets (done, total).
    Where the gate found `faults`, `ok` is False and `rows` empty.
    """
    shape, asked, where = get_preset(preset), parse_stages(stages), pick_device(device)
    alone = "selection" in asked and not {"llm", "ttft"} & set(asked)
    wanted = ("llm", *asked) if alone else asked  # it is measured inside another stage
    specs = expand(reduce, parse_keep(keep))
    kind = pick_dtype(dtype, shape, where)
    check_frames(shape, frames)
    cuda, count = where.type == "cuda", _positive("threads", threads)
    rounds = _positive("iters", iters) or (30 if cuda else 10 if preset == "tiny" else 5)
    there: AbstractContextManager[Any] = torch.cuda.device(where) if cuda else nullcontext()
    with there, timing.threads_set(count), one_line_when_full(preset, frames):
        check_fits(shape, wanted, frames, kind, where)
        limits = ceilings(where, kind)
        clock, clock_name = timing.clock_of(where, torch.get_num_threads())
        case = build(shape, wanted, frames, where, kind)
        named = [name for name in GROUPS if set(GROUPS[name]) & set(wanted)]
        groups = [SpecGroup(case, name, wanted, specs, clock) for name in named]
        measured = _measure(groups, rounds, limits, _Ticks(progress), enough)
        measured["rows"] = [row for row in measured["rows"] if row["stage"] in asked]
        found: dict[str, Any] = {
            "preset": preset,
            "device": case.device.type,
            "dtype": dtype_name(kind),
        }
        found |= {"threads": torch.get_num_threads(), "frames": frames}
        limited = {"clock": clock_name, "ceilings": limits, **measured}
        return {**found, "tokens": case.n, **limited, "environment": environment(where)}


def _measure(
    groups: Sequence[SpecGroup],
    rounds: int,
    limits: Mapping[str, float],
    ticks: _Ticks,
    enough: Callable[[], bool],
) -> dict[str, Any]:
    ticks.total = sum(group.work(rounds) for group in groups)
    faults, rows, floors = list[str](), list[dict[str, Any]](), dict[str, float]()
    warm, ran = [], []
    with timing.frozen():
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
            if measured.rounds < rounds and not enough():  # Ctrl-C
                break
    counts = {"iters": min(ran, default=rounds), "warm_ups": min(warm, default=0)}
    found = {"ok": not faults, "faults": faults, "rows": [] if faults else rows}
    found["interrupted"] = not faults and counts["iters"] < rounds and not enough()
    return {**counts, "noise": floors, **found}


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise MmfastError(f"--{name} {value} measures nothing; give at least 1")
    return value


class _Ticks:
    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.total, self.done = progress, 0, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


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
