"""`mmfast eval --suite stream`: what memories of a session answer, by age of the fact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def eval_stream(
    reduce: Sequence[str],
    memories: Sequence[str],
    n: int,
    seed: int,
    seconds: float,
    model: str | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the suite for each reducer (none by default) and print a line a memory.

    Streams of more than LONGEST seconds are too long for an unbounded cache, which is left out.
    """
    specs: list[str | None] = [*reduce] or [None]
    from mmfast.bench.results import append, environment, eval_rows
    from mmfast.cli_output import print_json, progress
    from mmfast.tiny.needles import LONGEST, MEMORIES, Setting, run_needles

    environ = environment()
    with progress("eval") as tick:

        def run(spec: str | None) -> dict[str, Any]:
            return run_needles(
                memories or MEMORIES,
                n,
                seed,
                model,
                setting=Setting(seconds),
                reduce=spec,
                unbounded=seconds <= LONGEST,
                progress=lambda memory, done, total: tick(done, total, memory),
            )

        documents = [run(spec) for spec in specs]
    document = {**documents[0], "rows": [row for each in documents for row in each["rows"]]}
    if out is not None:
        append(out, eval_rows(document, environ))
    print_json(document) if as_json else _show(document)


def _show(document: dict[str, Any]) -> None:
    bands = list(dict.fromkeys(band for row in document["rows"] for band in row["by_age"]))
    table = Table()
    for name in ("memory", "reduce", *bands, "of unbounded"):
        table.add_column(name)
    for row in document["rows"]:
        ages = [row["by_age"].get(band) for band in bands]
        cells = [f"{100 * age['accuracy']:.1f} % of {age['n']}" if age else "" for age in ages]
        share = "" if row["relative"] is None else f"{100 * row['relative']:.1f} %"
        table.add_row(row["memory"] or "unbounded", row["reduce"] or "", *cells, share)
    Console().print(table)
