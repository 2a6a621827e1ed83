"""`mmfast bench --compare OLD.jsonl NEW.jsonl`: what changed between two runs."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from mmfast.cli_output import print_json, print_rows
from mmfast.core.errors import MmfastError


def bench_compare(
    files: tuple[Path, Path], fail_above: float | None, out: Path | None, as_json: bool
) -> None:
    """Print old, new and ratio of every row; exit 1 only where `fail_above` asks for it.

    Raises:
        MmfastError: A file is missing or holds no rows, or `fail_above` is negative.
    """
    from mmfast.bench.compare import compare
    from mmfast.bench.results import load

    if out is not None:
        raise MmfastError("--compare measures nothing, so --out has no rows; leave one of them out")
    if fail_above is not None and not fail_above >= 0:
        raise MmfastError(f"--fail-above {fail_above} is no slow-down; give per cent, 0 or more")
    found = compare(*(load(file) for file in files))
    beyond = found.beyond(fail_above) if fail_above is not None else ()
    if as_json:
        print_json({"ok": not beyond, "fail_above": fail_above, **found.to_dict()})
    else:
        cells = [
            (pair.name, pair.metric, pair.old, pair.new, f"{pair.new / pair.old:.3f}", pair.verdict)
            for pair in found.pairs
        ]
        print_rows(("row", "metric", "old", "new", "new / old", ""), cells)
        _tell(found.notes, found.only_old, found.only_new)
    if beyond:
        raise typer.Exit(1)


def _tell(notes: tuple[str, ...], only_old: tuple[str, ...], only_new: tuple[str, ...]) -> None:
    """What stands beside the table."""
    console = Console(stderr=True)
    for note in notes:
        console.print(f"differs: {note}", style="yellow", highlight=False, markup=False)
    for label, names in (("first", only_old), ("second", only_new)):
        for name in names:
            text = f"only in the {label} file: {name}"
            console.print(text, style="dim", highlight=False, markup=False)
