"""`mmfast bench --stream NAME`, `--speech NAME`, `--serve NAME`: measure, print the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmfast.bench.results import Row, append
from mmfast.cli_output import print_json, print_rows, progress

# What every row carries to be repeated, and a person does not need to see.
_HIDDEN = {"suite", "bench", "versions", "commit", "date", "processor", "clock", "knobs", "dtype"}


def bench_stream(name: str, out: Path | None, as_json: bool) -> None:
    """A benchmark of streams."""
    from mmfast.bench.stream import stream_rows

    _show(lambda: stream_rows(name), out, as_json)


def bench_speech(name: str, out: Path | None, as_json: bool) -> None:
    """A benchmark of speech."""
    from mmfast.bench.speech import speech_rows

    def measure() -> list[Row]:
        with progress(name) as tick:
            return speech_rows(name, lambda label, done, total: tick(done, total, label))

    _show(measure, out, as_json)


def bench_serve(name: str, out: Path | None, as_json: bool) -> None:
    """A benchmark of the server's engine."""
    from mmfast.bench.serve import serve_rows

    def measure() -> list[Row]:
        with progress(name) as tick:
            return serve_rows(name, lambda label, done, total: tick(done, total, label))

    _show(measure, out, as_json)


def _show(measure: Callable[[], list[Row]], out: Path | None, as_json: bool) -> None:
    """Measure, append the rows to `out`, print them."""
    rows = measure()
    if out is not None:
        append(out, rows)
    if as_json:
        print_json(rows)
        return
    keys = [key for key in dict.fromkeys(k for row in rows for k in row) if key not in _HIDDEN]
    print_rows(keys, [[row.get(key) for key in keys] for row in rows])
