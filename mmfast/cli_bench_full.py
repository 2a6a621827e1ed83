"""`mmfast bench --full` and `--break-even`."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from mmfast.cli_output import print_bench_rows, print_json, print_rows, progress


def bench_full(
    device: str | None, preset: str | None, minutes: float, out: Path | None, as_json: bool
) -> None:
    """Everything for one device; rows reach `out` step by step."""
    from mmfast.bench.full import run_full
    from mmfast.bench.results import Row, append

    console = Console(stderr=True)

    def sink(rows: list[Row]) -> None:
        if out is not None and rows:
            append(out, rows)

    def tell(text: str) -> None:
        console.print(text, style="dim", highlight=False, markup=False)

    with progress("full") as tick:
        document = run_full(device, preset, minutes, tick, sink, tell)
    if as_json:
        print_json(document)
    else:
        print_bench_rows([row for row in document["rows"] if row["suite"] == "bench"])
        keys = ("label", "state", "seconds", "rows")
        print_rows(keys, [[step[key] for key in keys] for step in document["steps"]])
    if not document["ok"]:
        raise typer.Exit(1)


def bench_break_even(
    preset: str, threads: int | None, device: str | None, out: Path | None, as_json: bool
) -> None:
    """From how many tokens, and for how many answers at once, reducing pays."""
    from mmfast.bench.breakeven import run_break_even
    from mmfast.bench.results import append

    with progress("break-even") as tick:
        rows = run_break_even(preset, threads, device, tick)
    if out is not None:
        append(out, rows)
    if as_json:
        return print_json(rows)
    keys = ("bench", "stage", "reduce", "tokens", "batch", "stock_ms", "median_ms", "speedup")
    names = ("by", "stage", "reduce", "tokens", "batch", "stock ms", "ms", "speed-up", "pays")
    print_rows(names, [[*(row[key] for key in keys), _pays(row["pays"])] for row in rows])


def _pays(value: bool | None) -> str:
    return "=" if value is None else "yes" if value else "no"
