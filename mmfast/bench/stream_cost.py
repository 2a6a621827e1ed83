"""What watching a stream costs and saves, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.named_tables import Cells, Table, named_tables
from mmfast.bench.results import Row


def stream_cost(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --stream`; of a job the latest row."""
    return named_tables(rows, "stream", _TABLES, ("job", "preset", "knobs", "fps"))


def _timed(row: Row) -> Cells:
    what = f"`{row['job']}`" if row["method"] else row["job"]
    saved = f"{100 * row['saved']:.1f} %" if row["method"] else ""
    return (row["preset"], row["note"], what, f"{row['median_ms']:.0f}", saved)


def _quality(row: Row) -> Cells:
    knobs = ", ".join(f"{key}={value}" for key, value in row["knobs"].items())
    worst = (f"{row[key]:.4f}" for key in ("cosine", "cosine_worst_frame", "cosine_worst_token"))
    return (knobs, f"{row['fps']:g}", f"{100 * row['computed']:.0f} %", *worst)


def _reader(row: Row) -> Cells:
    wall, cpu = f"{row['speedup']:.2f}x", f"{row['cpu_speedup']:.2f}x"
    return (row["job"], f"{row['median_ms']:.0f}", wall, f"{row['cpu_median_ms']:.0f}", cpu)


def _bounded(row: Row) -> Cells:
    return (
        f"`{row['memory']}`, `{row['reduce']}`",
        f"{row['n']:,}",
        f"{row['held_mb']:.1f} ({100 * row['held_growth']:+.2f} %)",
        f"{row['resident_mb']:.0f} ({100 * row['growth']:+.2f} %)",
        f"{row['early_ms']:.1f}",
        f"{row['late_ms']:.1f} ({100 * row['slowdown']:+.1f} %)",
    )


_TABLES: dict[str, Table] = {
    "frame-cache": (
        "Encoder that recomputes a quarter of the patches",
        ("shape", "what", "", "ms a call", "saved"),
        _timed,
    ),
    "frame-cache-quality": (
        "Its features against the stock tower's, cosine, embedded clips",
        ("knobs", "frames/s", "patches computed", "mean", "worst frame", "worst token"),
        _quality,
    ),
    "prefill": (
        "Prefill of frames as they come",
        ("shape", "what", "", "ms", "saved"),
        _timed,
    ),
    "reader": (
        "Reading 60 s of 720p, GOP 250, at 1 frame/s, identical frames",
        ("reader", "ms", "faster", "processor ms", "less work"),
        _reader,
    ),
    "bounded": (
        "An endless stream; growth since frame 2,000, time per frame against frames 1,000 to 2,000",
        ("memory", "frames", "session MB", "process MB", "ms a frame, then", "ms a frame, last"),
        _bounded,
    ),
}
