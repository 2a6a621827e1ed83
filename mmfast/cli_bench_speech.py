"""`mmfast bench --speech NAME`: measure a benchmark of speech and print its rows."""

from __future__ import annotations

from pathlib import Path

from mmfast.bench.results import append
from mmfast.bench.speech import speech_rows
from mmfast.cli_output import print_json, print_rows, progress

# What every row carries to be repeated, and a person does not need to see.
_HIDDEN = {"suite", "bench", "versions", "commit", "date", "processor", "clock", "knobs", "dtype"}


def bench_speech(name: str, out: Path | None, as_json: bool) -> None:
    """Measure, append the rows to `out`, print them."""
    with progress(name) as tick:
        rows = speech_rows(name, lambda label, done, total: tick(done, total, label))
    if out is not None:
        append(out, rows)
    if as_json:
        print_json(rows)
        return
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in _HIDDEN]
    print_rows(keys, [[row.get(key) for key in keys] for row in rows])
