"""One group of stages for all specs: gate, selection time, peak memory, rounds, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from mmfast.bench.cases import Case
from mmfast.bench.gate import Checked, check
from mmfast.bench.measure import (
    Sample,
    interleave,
    noise,
    paired,
    peak_during,
    quantile,
    timed,
    warm_up,
)
from mmfast.bench.specs import Twins
from mmfast.bench.stages import Stage
from mmfast.core.spec import parse
from mmfast.models.signals import from_tower

WARM_ENOUGH_MS = 1000.0  # a run this long is its own warm-up; the gate made several


@dataclass
class _Entry:
    """One spec of a group, with what the untimed passes found."""

    text: str
    checked: Checked
    selection_ms: float
    peak_mb: float


class Group:
    """The specs that one group of stages can show, from gate to rows."""

    def __init__(self, case: Case, name: str, stages: tuple[str, ...], specs: list[str]) -> None:
        self.stage = Stage(case, name, stages)
        self.twins = [
            Twins(part, f"{name}{i}", towerless=name == "llm", asked=text)
            for i, text in enumerate(specs)
            if (part := _part(text, name))
        ]
        self.entries: list[_Entry] = []
        self.noise: dict[str, float] = {}
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
        tick()
        seen: set[str] = set()
        for twins in self.twins:
            with twins.registered():
                checked = check(self.stage, twins, self.stock, whole=twins.whole not in seen)
                seen.add(twins.whole)
                faults += checked.faults
                if not faults:
                    peak = peak_during(partial(self.stage.run, twins.spec()))
                    entry = _Entry(twins.asked, checked, _selection(twins), peak)
                    self.entries.append(entry)
            tick()
        return faults

    def measure(self, rounds: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
        """Interleaved rounds; returns the rows."""
        with ExitStack() as stack:
            for twins in self.twins:
                stack.enter_context(twins.registered())
            jobs = self._jobs()
            self.warm = min(self._warm(name, job) for name, job in jobs.items())
            samples = interleave(jobs, rounds, tick)
        return [row for stage in self.stage.stages for row in self._rows(stage, samples)]

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
        return self.stage.run(spec).ms

    def _warm(self, name: str, job: Callable[[], Sample]) -> int:
        """Warm a job up; the gate ran it already, which is enough for one that takes long."""
        spec = name.partition(" ")[2]
        known = {e.text: e.checked.outcome for e in self.entries}.get(spec) or self.stock
        if sum(known.ms.values()) > WARM_ENOUGH_MS:
            return 1
        return 1 + warm_up(job)

    def _rows(self, stage: str, samples: dict[str, list[Sample]]) -> Iterator[dict[str, Any]]:
        first, again = ([s[stage] for s in samples[k]] for k in ("stock", "again"))
        self.noise[stage] = floor = noise(first, again)
        stock = [(a + b) / 2 for a, b in zip(first, again, strict=True)]
        n = self.stage.case.n
        shared = {"stage": stage, "tokens": n, "noise": floor}
        still = {"speedup": 1.0, "ideal": 1.0, "of_ideal": 1.0, "of_oracle": 1.0}
        yield {"reduce": None, **shared, **_times(first + again), **still, "kept": n} | {
            "selection_ms": 0.0,
            "peak_mb": self.stock_peak,
            "equal": True,
        }
        full = self.stage.cost(self.stock, stage)
        for entry in self.entries:
            times = [s[stage] for s in samples[f"plain {entry.text}"]]
            speedup = paired(stock, times)
            outcome = entry.checked.outcome or self.stock
            ideal = full / self.stage.cost(outcome, stage)
            yield {"reduce": entry.text, **shared, **_times(times)} | {
                "speedup": speedup,
                "ideal": ideal,
                "of_ideal": speedup / ideal,
                "of_oracle": self._of_oracle(entry, stage, times, samples),
                "kept": entry.checked.kept or n,
                "selection_ms": entry.selection_ms,
                "peak_mb": entry.peak_mb,
                "equal": abs(speedup - 1.0) <= floor,
            }

    def _of_oracle(
        self, entry: _Entry, stage: str, times: list[float], samples: dict[str, list[Sample]]
    ) -> float | None:
        """Time with free selection / time of the method; None where no token was chosen."""
        fixed = samples.get(f"fixed {entry.text}")
        if fixed is None or stage == "decode":
            return None
        return paired([s[stage] for s in fixed], times)


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


def _times(times: list[float]) -> dict[str, float]:
    return {
        "median_ms": median(times),
        "p20_ms": quantile(times, 0.2),
        "p80_ms": quantile(times, 0.8),
    }


def _selection(twins: Twins) -> float:
    """Milliseconds the methods take alone, median of five after the one the gate made."""
    with torch.no_grad():
        return sum(median(timed(call)[1] for _ in range(5)) for call in twins.selection())
