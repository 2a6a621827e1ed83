"""Trace: what every stage took in, put out and cost."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from mmfast.core.reduction import Reduction


@dataclass
class Row:
    """One stage: tokens in and out (0 where it has none), milliseconds and peak bytes."""

    stage: str
    tokens_in: int = 0
    tokens_out: int = 0
    ms: float = 0.0
    peak_bytes: int = 0

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass
class Trace:
    """Rows per stage in the order they ended, and every Reduction that was applied.

    Attributes:
        rows: One `Row` per stage.
        reductions: `(site, item, Reduction)` in order of application; `item` counts the images
            and videos of the batch.
    """

    rows: list[Row] = field(default_factory=list)
    reductions: list[tuple[str, int, Reduction]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str, tokens_in: int = 0, tokens_out: int = 0) -> Iterator[Row]:
        """Time a stage; the caller may set the token counts on the yielded row."""
        row = Row(name, tokens_in, tokens_out)
        _synchronize()
        start = time.perf_counter()
        try:
            yield row
        finally:
            _synchronize()
            row.ms = (time.perf_counter() - start) * 1e3
            row.peak_bytes = peak_bytes()
            self.rows.append(row)

    def add(self, stage: str, tokens_in: int, tokens_out: int, ms: float) -> None:
        """Append a row that was measured elsewhere."""
        self.rows.append(Row(stage, tokens_in, tokens_out, ms, peak_bytes()))

    def record(self, site: str, item: int, reduction: Reduction) -> None:
        """Remember that `reduction` was applied at `site` to image or video `item`."""
        self.reductions.append((site, item, reduction))

    def to_dict(self) -> dict[str, Any]:
        """Rows and reductions as plain lists and numbers, ready for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "reductions": [
                {
                    "site": site,
                    "item": item,
                    "n": reduction.n,
                    "m": reduction.m,
                    "keep": reduction.keep.tolist(),
                    "owner": reduction.owner.tolist(),
                }
                for site, item, reduction in self.reductions
            ],
        }

    def __str__(self) -> str:
        lines = [f"{'stage':<12}{'tokens in':>10}{'out':>8}{'ms':>10}{'peak MB':>10}"]
        for r in self.rows:
            counts = f"{r.stage:<12}{r.tokens_in:>10}{r.tokens_out:>8}"
            lines.append(f"{counts}{r.ms:>10.1f}{r.peak_bytes / 1e6:>10.0f}")
        return "\n".join(lines)


def peak_bytes() -> int:
    """Peak bytes so far: of the CUDA allocator where it is in use, else of this process."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but macOS


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
