"""What `mmfast bench --kernels NAME` measured: kernels beside their goals, the cost of reducers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmfast.bench.named_tables import markdown
from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED


@dataclass(frozen=True)
class _Goal:
    """One goal for a GPU: the row of `bench` whose case begins so says whether it is met."""

    bench: str
    case: str
    way: str
    bound: str
    told: Callable[[Row], str]


def _ms(row: Row) -> str:
    return f"{row['median_ms']:.2f} ms"


def _us(row: Row) -> str:
    return f"{1e3 * row['median_ms']:.0f} us"


def _of_copy(row: Row) -> str:
    return f"{100 * row['of_copy']:.0f} %"


_GOALS = (
    _Goal("attention-column-sums", "7B prefill of 6,336", "ours", "at most 0.45 ms", _ms),
    _Goal("attention-column-sums", "32 frames of 729", "ours", "at most 0.30 ms", _ms),
    _Goal("max-min-select", "627 of 6,272", "ours", "at most 2 ms", _ms),
    _Goal("max-min-select", "1,568 of 6,272", "ours", "at most 4 ms", _ms),
    _Goal("temporal-difference", "1,024 frames", "ours, cosine", "70 % of a copy", _of_copy),
    _Goal("segment-merge", "mean of 6,272 onto 1,568", "ours", "at most 25 us", _us),
)


def kernels(rows: Sequence[Row]) -> list[str]:
    """Every kernel's goals on a GPU, and what the latest row of one says."""
    lines = []
    for goal in _GOALS:
        found = [row for row in rows if _speaks(row, goal)]
        told = f"{goal.told(found[-1])} ({found[-1]['processor']})" if found else NOT_MEASURED
        lines.append((f"`{goal.bench.replace('-', '_')}`", goal.case, goal.bound, told))
    return markdown(("kernel", "case, bfloat16", "goal on an H200", "measured"), lines)


def _speaks(row: Row, goal: _Goal) -> bool:
    named = row["bench"] == goal.bench and row.get("way") == goal.way
    on_gpu = named and row["device"] == "cuda" and row["dtype"] == "bfloat16"
    return on_gpu and row["case"].startswith(goal.case)


def reducers(rows: Sequence[Row]) -> list[str]:
    """Choosing a quarter of a video's and of an image's tokens, by every reducer."""
    latest = {(row["method"], row["n"]): row for row in rows if row["bench"] == "reducers"}
    if not latest:
        return [NOT_MEASURED]
    sizes = sorted({n for _, n in latest}, reverse=True)
    names = sorted({name for name, _ in latest})
    some = next(iter(latest.values()))
    where = f"{some['processor']}, {some['date']}, commit `{some['commit'] or 'none'}`"
    what = " and ".join(f"{n:,} x {some['d']:,}" for n in sizes)
    lines = [f"A quarter of {what} tokens, one thread of {where}.", ""]
    head = [f"{n:,}: ms (operations, MB more)" for n in sizes]
    cells = [(f"`{name}`", *(_cost(latest.get((name, n))) for n in sizes)) for name in names]
    return lines + markdown(("reducer", *head), cells)


def _cost(row: Row | None) -> str:
    if row is None:
        return NOT_MEASURED
    ms = row["median_ms"]
    shown = f"{ms:.1f}" if ms < 10 else f"{ms:,.0f}"
    return f"{shown} ({row['operations']}, {row['extra_mb']:.0f})"
