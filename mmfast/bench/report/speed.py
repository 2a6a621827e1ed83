"""One measured shape as a Markdown table: speed beside the ideal, and what choosing cost."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.bench.results import Row

STAGE_NAMES = {
    "vit": "vision tower",
    "llm": "prefill behind the encoder",
    "decode": "one decoding step",
    "ttft": "time to first token",
    "selection": "choosing and compacting inside the run",
}
_HEAD = (
    *("reduce", "kept", "ms (p20 to p80)", "speed-up", "ideal", "of ideal", "of oracle"),
    *("selection ms", "peak MB", "of ceiling", "over SDPA"),
)
_SELECTION_HEAD = (
    *("reduce", "kept", "in the run, ms (p20 to p80)", "of it compacting, ms", "alone, ms"),
    "share of the run",
)


def bench_group(rows: Sequence[Row]) -> list[str]:
    """The lines of one shape, device and stage; columns that no row fills are left out."""
    one = rows[-1]
    chosen = one["stage"] == "selection"
    cells = [_selection_cells(row) if chosen else _cells(row) for row in rows]
    head = _SELECTION_HEAD if chosen else _HEAD
    used = [i for i in range(len(head)) if any(row[i] for row in cells)]
    lines = [_title(one), "", f"| {' | '.join(head[i] for i in used)} |", "|---" * len(used) + "|"]
    return lines + [f"| {' | '.join(row[i] for i in used)} |" for row in cells]


def _title(one: Row) -> str:
    where = one["processor"] + (f", {one['threads']} threads" if one["device"] == "cpu" else "")
    clock = f", {one['clock']}" if "clock" in one else ""
    name = STAGE_NAMES[one["stage"]]
    if one["stage"] == "selection":
        name += f" ({STAGE_NAMES[one['share_of']]})"
    return (
        f"**{one['preset']}, {name}**: {one['frames']} frames, "
        f"{one['tokens']} visual tokens, {where}{clock}, {one['dtype']}, {one['n']} rounds, "
        f"noise {100 * one['noise']:.1f} %, torch {one['versions']['torch']}, {one['date']}, "
        f"commit `{one['commit'] or 'none'}`{ceilings_of(one)}."
    )


def ceilings_of(row: Row) -> str:
    """What the machine could do at best, where the row says so."""
    best = row.get("ceilings")
    if not best:
        return ""
    return (
        f"; ceilings: copy {best['copy_gb_s']:.3g} GB/s, "
        f"matrix product {best['matmul_tflop_s']:.3g} TFLOP/s"
    )


def _cells(row: Row) -> list[str]:
    reduced = bool(row["reduce"])
    gain = "=" if row["equal"] else f"{row['speedup']:.2f}x"
    oracle, over = row["of_oracle"], row.get("scoring_over")
    ceiling = row.get("of_ceiling")
    return [
        f"`{row['reduce']}`" if reduced else "stock",
        str(row["kept"]),
        _spread(row),
        gain if reduced else "1",
        f"{row['ideal']:.2f}x" if reduced else "1",
        f"{row['of_ideal']:.2f}" if reduced else "",
        "" if oracle is None or not reduced else f"{oracle:.2f}",
        f"{row['selection_ms']:.1f}" if reduced else "",
        f"{row['peak_mb']:.0f}",
        "" if ceiling is None else f"{ceiling:.2f}",
        "" if over is None else f"{100 * over:+.1f} %",
    ]


def _selection_cells(row: Row) -> list[str]:
    compact = row["compact_ms"]
    return [
        f"`{row['reduce']}`",
        str(row["kept"]),
        _spread(row),
        "" if compact is None else f"{compact:.1f}",
        f"{row['selection_ms']:.1f}",
        f"{100 * row['share']:.2f} %",
    ]


def _spread(row: Row) -> str:
    digits = 0 if row["median_ms"] >= 100 else 1
    low, middle, high = (f"{row[key]:.{digits}f}" for key in ("p20_ms", "median_ms", "p80_ms"))
    return f"{middle} ({low} to {high})"
