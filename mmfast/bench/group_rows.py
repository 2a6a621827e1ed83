"""Samples of one group of stages as rows: medians, ratios, shares of what the machine can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mmfast.bench.gate import Checked
from mmfast.bench.measure import Sample, noise, paired, quantile
from mmfast.bench.scoring import Span
from mmfast.bench.stages import Outcome, Stage

REDUCING, SHARE = "reducing", "share"  # beside the stages in a sample
_NO_SPEED = dict.fromkeys(("speedup", "ideal", "of_ideal", "of_oracle"))


@dataclass
class Entry:
    """One spec of a group, with what the untimed passes found.

    Attributes:
        text: The spec as it was asked for.
        checked: What the gate saw; its run was the first of this spec.
        selection_ms: The methods alone, outside the model.
        peak_mb: Of the whole run.
        spans: Peak megabytes where attention is read.
        stock_spans: The same of the stock model.
    """

    text: str
    checked: Checked
    selection_ms: float
    peak_mb: float
    spans: Mapping[Span, float] = field(default_factory=dict)
    stock_spans: Mapping[Span, float] = field(default_factory=dict)

    def scoring(self) -> dict[str, float | None]:
        """The span that grew most, beside stock with its fused attention."""
        worst = max(
            self.spans, key=lambda span: self.spans[span] / self.stock_spans[span], default=None
        )
        mine = None if worst is None else self.spans[worst]
        stock = None if worst is None else self.stock_spans[worst]
        over = None if mine is None or stock is None else mine / stock - 1.0
        return {"scoring_mb": mine, "scoring_stock_mb": stock, "scoring_over": over}


@dataclass
class Measured:
    """All samples of one group.

    Attributes:
        stage: Knows what a run costs.
        stock: The first stock run.
        stock_peak: Peak megabytes of a stock run.
        entries: The specs.
        samples: By job, one a round.
        ceilings: Of the machine; see `mmfast.bench.ceilings`.
        noise: By stage, filled while rows are made.
    """

    stage: Stage
    stock: Outcome
    stock_peak: float
    entries: Sequence[Entry]
    samples: Mapping[str, list[Sample]]
    ceilings: Mapping[str, float] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How often each job ran."""
        return len(self.samples["stock"])

    def rows(self, stage: str) -> Iterator[dict[str, Any]]:
        """The rows of one timed stage, stock first."""
        first, again = ([s[stage] for s in self.samples[k]] for k in ("stock", "again"))
        self.noise[stage] = floor = noise(first, again)
        stock = [(a + b) / 2 for a, b in zip(first, again, strict=True)]
        shared = {"stage": stage, "tokens": self.stage.case.n, "noise": floor}
        still = {"speedup": 1.0, "ideal": 1.0, "of_ideal": 1.0, "of_oracle": 1.0}
        full = self.stage.cost(self.stock, stage)
        yield {"reduce": None, **shared, **_times(first + again), **still} | {
            **self._achieved(stage, full, median(first + again)),
            "kept": self.stage.case.n,
            "selection_ms": 0.0,
            "first_ms": self.stock.ms[stage],
            "peak_mb": self.stock_peak,
            "equal": True,
        }
        for entry in self.entries:
            yield {"reduce": entry.text, **shared, **self._entry_row(entry, stage, stock, full)}

    def _entry_row(
        self, entry: Entry, stage: str, stock: Sequence[float], full: int
    ) -> dict[str, Any]:
        mine = self.samples[f"plain {entry.text}"]
        times = [s[stage] for s in mine]
        outcome = entry.checked.outcome or self.stock
        cost, speedup = self.stage.cost(outcome, stage), paired(stock, times)
        row = {
            **_times(times),
            "speedup": speedup,
            "ideal": full / cost,
            "of_ideal": speedup * cost / full,
            "of_oracle": self._of_oracle(entry, stage, times),
            **self._achieved(stage, cost, median(times)),
            "kept": entry.checked.kept or self.stage.case.n,
            "selection_ms": entry.selection_ms,
            "first_ms": outcome.ms[stage],
            "peak_mb": entry.peak_mb,
            "equal": abs(speedup - 1.0) <= self.noise[stage],
        }
        if stage == "decode":
            return row
        inside = {
            "reducing_ms": median(s[REDUCING] for s in mine),
            "reducing_share": median(s[SHARE] for s in mine),
        }
        return {**row, **inside, **entry.scoring()}

    def _achieved(self, stage: str, cost: int, ms: float) -> dict[str, float | None]:
        """What was reached of the machine: a decoding step is bound by bytes, the rest by FLOPs."""
        moved = stage == "decode"
        name, ceiling = ("gb_s", "copy_gb_s") if moved else ("tflop_s", "matmul_tflop_s")
        reached, best = cost / ms / (1e6 if moved else 1e9), self.ceilings.get(ceiling)
        return {name: reached, "of_ceiling": None if best is None else reached / best}

    def _of_oracle(self, entry: Entry, stage: str, times: list[float]) -> float | None:
        """Time with free selection / time of the method; None where no token was chosen."""
        fixed = self.samples.get(f"fixed {entry.text}")
        if fixed is None or stage == "decode":
            return None
        return paired([s[stage] for s in fixed], times)

    def selection_rows(self) -> Iterator[dict[str, Any]]:
        """What choosing and compacting took inside the runs, and its share of them."""
        host = self.stage.group
        for entry in self.entries:
            mine = self.samples[f"plain {entry.text}"]
            fixed = self.samples.get(f"fixed {entry.text}")
            yield {"reduce": entry.text, "stage": "selection", "tokens": self.stage.case.n} | {
                "noise": self.noise[host],
                **_times([s[REDUCING] for s in mine]),
                **_NO_SPEED,
                "share": median(s[SHARE] for s in mine),
                "share_of": host,
                "compact_ms": None if fixed is None else median(s[REDUCING] for s in fixed),
                "kept": entry.checked.kept or self.stage.case.n,
                "selection_ms": entry.selection_ms,
                "peak_mb": entry.peak_mb,
                "equal": False,
            }


def host_of(stages: Sequence[str]) -> str:
    """The stage inside which selection is looked at: the whole way to the first token if run."""
    return "ttft" if "ttft" in stages else "llm"


def _times(times: list[float]) -> dict[str, float]:
    return {
        "median_ms": median(times),
        "p20_ms": quantile(times, 0.2),
        "p80_ms": quantile(times, 0.8),
    }
