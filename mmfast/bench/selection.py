"""Cost of choosing tokens, against the textbook formulation of the same rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.bench.results import environment
from mmfast.bench.selection_ops import OPS, OpCase, SelectionJob
from mmfast.bench.selection_textbooks import TEXTBOOKS
from mmfast.bench.timing import noise, one_thread, peak_during
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import count, reduce
from mmfast.core.tokens import Tokens

_ENOUGH_MS = 10.0  # of one sample: what takes less is run several times in a row
_SLOW_MS = 1000.0  # a textbook that takes longer runs once


@dataclass(frozen=True)
class Case:
    """One comparison: `method` on a video of `grid` with features of width `d`."""

    method: str
    grid: tuple[int, int, int]
    d: int
    share: float

    @property
    def n(self) -> int:
        """Tokens of the video."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def job(self) -> SelectionJob:
        """The method and its textbook on a synthetic video.

        Raises:
            MmfastError: The method has no textbook formulation here.
        """
        name = self.method.partition("@")[0]
        if name not in TEXTBOOKS:
            raise MmfastError(f"no textbook for {name!r}; choices: {', '.join(sorted(TEXTBOOKS))}")
        tokens, budget = video(self.grid, self.d), self.budget
        return SelectionJob(
            lambda: _ours(tokens, f"{self.method}:{budget}"),
            lambda: TEXTBOOKS[name](tokens, budget),
            lambda kept, expected: kept.equal(expected.sort().values),
        )

    @property
    def budget(self) -> int:
        """Tokens to keep."""
        return count(self.share, self.n) or 1

    def fields(self) -> dict[str, Any]:
        """What a row says of the case."""
        case = f"{self.method}, {self.n:,} x {self.d:,}, keep {self.share:.0%}"
        sizes = {"n": self.n, "d": self.d, "budget": self.budget}
        return {"case": case, "method": self.method, **sizes}


CASES: tuple[Case | OpCase, ...] = (
    Case("divprune", (32, 14, 14), 1024, 0.25),
    Case("divprune", (8, 14, 14), 896, 0.25),
    Case("divprune", (8, 14, 14), 896, 0.10),
    Case("evs", (8, 14, 14), 896, 0.25),
    Case("evs", (32, 14, 14), 1024, 0.25),
    Case("evs", (32, 14, 14), 3584, 0.25),
    Case("holitom_inner@llm2", (8, 14, 14), 896, 0.25),
    *OPS,
)


def measure(cases: Sequence[Case | OpCase] = CASES, repeats: int = 9) -> Iterator[dict[str, Any]]:
    """Time every case on one thread, ours and textbook in turn.

    Args:
        cases: What to measure.
        repeats: Rounds; a textbook of more than a second runs once.

    Yields:
        Rows with `method`, `n`, `d`, `budget`, the medians `ms` and `textbook_ms` in processor
        milliseconds, `speedup`, `same_indices` and `noise`, the difference of two runs of ours in
        a round; `extra_mb` and `textbook_extra_mb`, the peak of memory above what was there
        before, of cases that ask for it; `case` and `median_ms` are for the table.

    Raises:
        MmfastError: A method has no textbook formulation here.
    """
    for case in cases:
        with one_thread():
            yield {**case.fields(), **_compare(case.job(), repeats), "threads": 1}


def result_rows(progress: Callable[[int, int], None] | None = None) -> list[dict[str, Any]]:
    """All cases as rows for `assets/results/selection-cpu.jsonl`."""
    shared = {"suite": "selection", "device": "cpu", "dtype": "float32", **environment()}
    rows = []
    for row in measure():
        rows.append({**shared, **row})
        if progress is not None:
            progress(len(rows), len(CASES))
    return rows


def _compare(job: SelectionJob, repeats: int) -> dict[str, Any]:
    jobs = {"ours": job.ours, "textbook": job.textbook, "again": job.ours}
    _settle_heap()
    results: dict[str, Any] = {}
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    first = {name: _processor_ms(partial(_keep, results, name, jobs[name]), 1) for name in jobs}
    if first["textbook"] > _SLOW_MS:
        samples["textbook"].append(first["textbook"])
    warm = {
        name: _processor_ms(jobs[name], 1) if ms < _SLOW_MS else ms for name, ms in first.items()
    }
    often = {name: 1 + int(_ENOUGH_MS / max(ms, 1e-3)) for name, ms in warm.items()}
    for turn in range(repeats):
        for name in jobs if turn % 2 == 0 else reversed(jobs):
            if name != "textbook" or first["textbook"] <= _SLOW_MS:
                samples[name].append(_processor_ms(jobs[name], often[name]))
    ms, textbook_ms = median(samples["ours"]), median(samples["textbook"])
    return {
        "ms": ms,
        "median_ms": ms,
        "textbook_ms": textbook_ms,
        "speedup": textbook_ms / ms,
        "same_indices": job.same(results["ours"], results["textbook"]),
        "noise": noise(samples["ours"], samples["again"]),
        **(_memory(job) if job.memory else {}),
    }


def _settle_heap() -> None:
    """Let the C library keep memory it was given back: page faults would be most of short jobs.

    It does so up to the size of the largest block that it ever returned to the system, 32 MB at
    most, hence a matter of what ran before.
    """
    torch.zeros(31 << 20, dtype=torch.uint8)


def _keep(results: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    results[name] = call()


def _processor_ms(call: Callable[[], Any], often: int) -> float:
    # Time of this process alone: other load on the machine counts little.
    start = time.process_time()
    for _ in range(often):
        call()
    return (time.process_time() - start) * 1e3 / often


def _memory(job: SelectionJob) -> dict[str, float]:
    """Peak megabytes above what was resident before, results included."""
    extra = {}
    for key, call in (("extra_mb", job.ours), ("textbook_extra_mb", job.textbook)):
        resident = peak_during(lambda: None)
        extra[key] = max(0.0, peak_during(call) - resident)
    return extra


def _ours(tokens: Tokens, spec: str) -> Tensor:
    found = reduce(tokens, spec)
    if not isinstance(found, Reduction):
        raise MmfastError(f"{spec!r} gave several reductions for one item")
    if not found.pure:  # the textbook merges too
        found.apply(tokens.x)
    return found.keep


def video(grid: tuple[int, int, int], d: int, seed: int = 0) -> Tokens:
    """A textured scene with camera noise and a patch that moves: tokens with attention scores."""
    frames, rows, columns = grid
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, d, 5, 5, generator=generator)
    scene = F.interpolate(coarse, size=(rows, columns), mode="bilinear")[0].permute(1, 2, 0)
    scene = scene + 0.5 * torch.randn(rows, columns, d, generator=generator)
    clip = scene + 0.2 * torch.randn(frames, rows, columns, d, generator=generator)
    side = min(3, rows, columns)
    patch, top = torch.randn(side, side, d, generator=generator), (rows - side) // 2
    for frame in range(frames):
        left = frame % (columns - side + 1)
        clip[frame, top : top + side, left : left + side] = patch
    attn = torch.rand(frames * rows * columns, generator=generator)
    return Tokens(clip.reshape(-1, d), attn=attn, grid=grid)
