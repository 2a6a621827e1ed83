"""Benchmarks of the server's engine: a module `serve_<name>.py` beside this each, with `rows`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmfast.bench.results import environment
from mmfast.core.errors import MmfastError, unknown

Row = dict[str, Any]
Tick = Callable[[str, int, int], None]
_PREFIX = "serve_"


def names() -> list[str]:
    """What `mmfast bench --serve` takes: modules `serve_<name>` that have `rows`."""
    files = Path(__file__).parent.glob(f"{_PREFIX}*.py")
    found = [f.stem for f in files if "\ndef rows(" in f.read_text(encoding="utf-8")]
    return sorted(name[len(_PREFIX) :].replace("_", "-") for name in found)


def serve_rows(name: str, progress: Tick | None = None) -> list[Row]:
    """Measure one benchmark: its rows, with what is needed to repeat them.

    Args:
        name: Of `names`.
        progress: Called with a label, what is done and how much there is.

    Raises:
        MmfastError: There is none of that name; names the choices and the nearest.
    """
    if name not in names():
        raise MmfastError(unknown("serve benchmark", name, names()))
    module = importlib.import_module(f"mmfast.bench.{_PREFIX}{name.replace('-', '_')}")
    shared = {"suite": "serve", "bench": name, **environment()}
    tick = progress or (lambda label, done, total: None)
    return [{**shared, **row} for row in module.rows(tick)]
