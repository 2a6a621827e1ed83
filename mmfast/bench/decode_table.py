"""What `mmfast bench --decode NAME` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.named_tables import Cells, Table, named_tables
from mmfast.bench.results import Row
from mmfast.bench.sections import NOT_MEASURED


def decode_tables(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --decode`; of a job the latest row."""
    mine = [row for row in rows if row["bench"] in _TABLES]
    return named_tables(mine, "decode", _TABLES, _KEYS)


def _hooks(row: Row) -> Cells:
    share = f"{100 * row['overhead']:+.1f} %"
    quiet = abs(row["overhead"]) <= row["noise"]
    return (
        f"{row['preset']}, {row['device']}",
        f"`{row['job']}`".replace("|", "\\|"),  # a bar would end the cell
        row["work"] if row["work"] != "none" else "",
        f"{row['twin_ms']:.1f}",
        "=" if quiet else share,
        f"{row['overhead_us']:+.0f}",
        f"{100 * row['noise']:.1f} %, {row['noise_us']:.0f}",
    )


def _compiled(row: Row) -> Cells:
    again = f"{row['recompiles']} / {row['recompiles_attached_anew']}"
    return (
        f"{row['preset']}, {row['device']}",
        f"`{row['reduce']}`" if row["reduce"] else "stock",
        f"{row['eager_ms']:.2f}",
        f"{row['compiled_ms']:.2f}",
        f"{row['speedup']:.2f}x",
        f"{row['graphs']} / {row['breaks']} / {again}",
        "yes" if row["same_tokens"] else "no",
        f"{row['compile_s']:.0f}",
    )


def _frame(row: Row) -> Cells:
    ms, goal = row["median_ms"], row.get("goal_ms")
    shape = (row["preset"], row["device"] if ms is not None else "", str(row["batch"]), row["job"])
    goal_ms = "" if goal is None else f"{goal:.1f}"
    if ms is None:
        return (*shape, NOT_MEASURED, "", f"{row['mb'] / 1e3:.1f} GB", goal_ms, "")
    floor = f"{row['floor_ms']:.2f} ms"
    same = f"{100 * row['same_codes']:.0f} %"
    return (*shape, f"{ms:.2f}", f"{row['p99_ms']:.2f}", floor, goal_ms, same)


_KEYS = ("preset", "device", "job", "reduce", "batch")
_TABLES: dict[str, Table] = {
    "hooks": (
        "What attach() adds to a decode step, beside a stock cache of the same lengths",
        ("shape", "attached", "work of its own", "step, ms", "added", "us", "A/A noise, us"),
        _hooks,
    ),
    "compiled": (
        "Compiled decoding on a static cache behind a reduced prompt",
        (
            "shape",
            "attached",
            "eager, ms",
            "compiled, ms",
            "gain",
            "graphs / breaks / compiled again / attached anew",
            "same tokens",
            "first step, s",
        ),
        _compiled,
    ),
    "moshi-frame": (
        "A frame of Moshi (80 ms of sound in and out), beside the floor by bytes",
        (
            "shape",
            "device",
            "batch",
            "way",
            "median, ms",
            "p99, ms",
            "floor by bytes",
            "goal, ms",
            "same codes",
        ),
        _frame,
    ),
}
