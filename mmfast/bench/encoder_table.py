"""What `mmfast bench --encoder NAME` measured, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.named_tables import Cells, Table, named_tables
from mmfast.bench.results import Row


def encoder_tables(rows: Sequence[Row]) -> list[str]:
    """A table per benchmark of `mmfast bench --encoder`; of a job the latest row."""
    return named_tables(rows, "encoder", _TABLES, ("job", "shape", "tower", "device", "dtype"))


def _gain(row: Row) -> str:
    if row["speedup"] == 1.0:
        return "1"
    return "=" if abs(row["speedup"] - 1) <= row["noise"] else f"{row['speedup']:.2f}x"


def _part(row: Row) -> str:
    return f"{row['tower']}, {row['layers']} of {row['of_layers']} blocks, {row['device']}"


def _job(row: Row) -> str:
    return f"`{row['job']}`" if "@" in row["job"] else row["job"]


def _attention(row: Row) -> Cells:
    what = f"{row['shape']}, {row['segments']} segments of {row['tokens']:,} tokens"
    return (f"{what}, {row['device']}", row["job"], f"{row['median_ms']:.1f}", _gain(row))


def _batch(row: Row) -> Cells:
    ms = f"{row['median_ms'] / row['frames']:.0f}"
    return (_part(row), row["job"], ms, _gain(row), f"{row['peak_mb']:.0f}")


def _patch(row: Row) -> Cells:
    shape = f"{row['shape']}, {row['device']}"
    return (shape, row["dtype"], row["job"], f"{row['median_ms']:.1f}", _gain(row))


def _merge(row: Row) -> Cells:
    share = f"{100 * row['merging_ms'] / row['median_ms']:.1f} %" if row["reduce"] else ""
    ideal = f"{row['ideal']:.2f}x" if row["reduce"] else ""
    return (_part(row), _job(row), f"{row['median_ms']:.0f}", _gain(row), ideal, share)


def _modes(row: Row) -> Cells:
    first = f"{row['first_call_s']:.0f}" if "first_call_s" in row else ""
    return (_part(row), row["job"], f"{row['median_ms']:.0f}", _gain(row), first)


_TABLES: dict[str, Table] = {
    "merge": (
        "Merging inside the tower; ideal by FLOPs of the blocks",
        ("tower", "stage", "ms", "faster", "ideal", "of it to choose and merge"),
        _merge,
    ),
    "compile": (
        'Whole tower with `encoder="fast"` and `"compile"`',
        ("tower", "mode", "ms", "faster", "first call, s"),
        _modes,
    ),
    "patch": (
        "Patch embedding by a matrix product",
        ("patches", "numbers", "way", "ms", "faster"),
        _patch,
    ),
    "attention": (
        "Attention of one block over packed segments",
        ("segments", "way", "ms", "faster"),
        _attention,
    ),
    "batch": (
        "Frames a call",
        ("tower", "way", "ms a frame", "faster", "peak MB"),
        _batch,
    ),
}
