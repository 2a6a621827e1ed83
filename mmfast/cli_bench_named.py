"""`mmfast bench --SUITE NAME`: measure one named benchmark, print its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmfast.cli_output import print_json, print_rows, progress

# What every row carries to be repeated, and a person does not need to see.
_HIDDEN = {"suite", "bench", "versions", "commit", "date", "processor", "clock", "knobs", "dtype"}


def completer(suite: str) -> Callable[[str], list[str]]:
    """Completes the names of a suite's benchmarks on a command line."""

    def complete(incomplete: str) -> list[str]:
        from mmfast.bench.named import names

        return [name for name in names(suite) if name.startswith(incomplete)]

    return complete


def bench_named(suite: str, name: str, out: Path | None, as_json: bool) -> None:
    """Measure `name` of `suite`, append the rows to `out`, print them."""
    from mmfast.bench.named import named_rows
    from mmfast.bench.results import append

    with progress(name) as tick:
        rows = named_rows(suite, name, lambda label, done, total: tick(done, total, label))
    if out is not None:
        append(out, rows)
    if as_json:
        print_json(rows)
        return
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in _HIDDEN]
    print_rows(keys, [[row.get(key) for key in keys] for row in rows])
