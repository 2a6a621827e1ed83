"""One group of stages for all specs: gate, selection time, peak memory, rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from mmfast.bench.cases import Case
from mmfast.bench.gate import Checked, check
from mmfast.bench.group_rows import REDUCING, SHARE, Entry, Measured, host_of
from mmfast.bench.measure import Clock, Sample, interleave, peak_during, timed, warm_up
from mmfast.bench.scoring import Span, peaks_in, spans
from mmfast.bench.specs import Twins
from mmfast.bench.stages import Stage
from mmfast.core.spec import parse
from mmfast.models.signals import from_tower

WARM_ENOUGH_MS = 1000.0  # a run this long is its own warm-up; the gate made several


class Group:
    """The specs that one group of stages can show, from gate to rows."""

    def __init__(
        self,
        case: Case,
        name: str,
        stages: tuple[str, ...],
        specs: list[str],
        clock: Clock = time.perf_counter,
    ) -> None:
        self.stage = Stage(case, name, stages, clock)
        self.selection = "selection" in stages and name == host_of(stages)
        self.twins = [
            Twins(part, f"{name}{i}", towerless=name == "llm", asked=text)
            for i, text in enumerate(specs)
            if (part := _part(text, name))
        ]
        self.entries: list[Entry] = []
        self.warm = 1

    def work(self, rounds: int) -> int:
        """Ticks that `prepare` and `measure` will make."""
        return 1 + len(self.twins) + rounds * (2 + self._jobs_per_spec() * len(self.twins))

    def _jobs_per_spec(self) -> int:
        return 1 if self.stage.group == "vit" else 2

    def prepare(self, tick: Callable[[], None]) -> list[str]:
        """Gate, selection time and peak memory; returns the faults."""
        faults: list[str] = []
        self.stock = self.stage.observe(None)
        self.stock_peak = peak_during(partial(self.stage.run, None))
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

    def _entry(self, twins: Twins, checked: Checked) -> Entry:
        run = partial(self.stage.run, twins.spec())
        where = self._spans(twins)
        alone = _selection(twins, self.stage.clock)
        peaks = peaks_in(self.stage.case.model, where, run)
        stock = {span: self.stock_spans[span] for span in where}
        return Entry(twins.asked, checked, alone, peak_during(run), peaks, stock)

    def _spans(self, twins: Twins) -> list[Span]:
        tower = self.stage.group != "llm"
        return spans(self.stage.case.model, twins.stages, tower)

    def _stock_spans(self) -> dict[Span, float]:
        """What the stock model holds where some method reads attention."""
        where = list(dict.fromkeys(span for twins in self.twins for span in self._spans(twins)))
        return peaks_in(self.stage.case.model, where, partial(self.stage.run, None))

    def measure(
        self,
        rounds: int,
        tick: Callable[[], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> Measured:
        """Interleaved rounds, fewer where `enough()` says so."""
        with ExitStack() as stack:
            for twins in self.twins:
                stack.enter_context(twins.registered())
            jobs = self._jobs()
            self.warm = min(self._warm(name, job) for name, job in jobs.items())
            samples = interleave(jobs, rounds, tick, enough)
        return Measured(self.stage, self.stock, self.stock_peak, self.entries, samples)

    def _jobs(self) -> dict[str, Callable[[], Sample]]:
        """Stock first, stock again in the middle, each method beside its fixed-index twin."""
        specs: dict[str, str | None] = {"stock": None}
        for index, entry in enumerate(self.entries):
            if index == len(self.entries) // 2:
                specs["again"] = None
            chosen = any(recording.results for recording in entry.checked.twins.recordings)
            for role in ("plain", "fixed")[: self._jobs_per_spec() if chosen else 1]:
                specs[f"{role} {entry.text}"] = entry.checked.twins.spec(role)
        specs.setdefault("again", None)
        return {name: partial(self._sample, spec) for name, spec in specs.items()}

    def _sample(self, spec: str | None) -> Sample:
        outcome = self.stage.run(spec)
        return {**outcome.ms, REDUCING: outcome.reducing_ms, SHARE: outcome.share}

    def _warm(self, name: str, job: Callable[[], Sample]) -> int:
        """Warm a job up; the gate ran it already, which is enough for one that takes long."""
        spec = name.partition(" ")[2]
        known = {e.text: e.checked.outcome for e in self.entries}.get(spec) or self.stock
        if sum(known.ms.values()) > WARM_ENOUGH_MS:
            return 1
        return 1 + warm_up(job)


def _part(text: str, group: str) -> str | None:
    """The stages of a spec that `group` shows: the tower knows nothing of the decoder."""
    stages = parse(text)
    if group == "llm":
        stages = tuple(s for s in stages if s.site != "vit")
    elif group == "vit" and not any(
        s.site == "vit" or (s.site == "pre" and from_tower(s.method.needs)) for s in stages
    ):
        return None
    return "+".join(map(str, stages)) or None


def _selection(twins: Twins, clock: Clock) -> float:
    """Milliseconds the methods take alone, median of five after the one the gate made."""
    with torch.no_grad():
        calls = twins.selection()
        return sum((median(timed(call, clock)[1] for _ in range(5)) for call in calls), 0.0)
