"""Benchmarks with a name: a module `<suite>_<name>.py` beside this each, with `rows(tick)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmfast.bench.results import Row as Row
from mmfast.bench.results import environment
from mmfast.core.errors import MmfastError, unknown
from mmfast.models.loading import device_name

SUITES = ("stream", "speech", "serve", "kernels", "decode", "encoder")
Tick = Callable[[str, int, int], None]


def names(suite: str) -> list[str]:
    """What `mmfast bench --SUITE` takes."""
    files = Path(__file__).parent.glob(f"{suite}_*.py")
    found = [f.stem for f in files if "\ndef rows(" in f.read_text(encoding="utf-8")]
    return sorted(name[len(suite) + 1 :].replace("_", "-") for name in found)


def module_of(suite: str, name: str) -> Any:
    """The module of one benchmark.

    Raises:
        MmfastError: There is none of that name; names the choices and the nearest.
    """
    if name not in names(suite):
        raise MmfastError(unknown(f"{suite} benchmark", name, names(suite)))
    return importlib.import_module(f"mmfast.bench.{suite}_{name.replace('-', '_')}")


def named_rows(suite: str, name: str, progress: Tick | None = None) -> list[Row]:
    """Measure one benchmark: its rows, with what is needed to repeat them.

    Args:
        suite: Of `SUITES`.
        name: Of `names(suite)`.
        progress: Called with a label, what is done and how much there is.

    Raises:
        MmfastError: There is none of that name; names the choices and the nearest.
    """
    module = module_of(suite, name)
    shared = {"suite": suite, "bench": name, **environment()}
    return [{**shared, **_where(row), **row} for row in module.rows(progress or quiet)]


def _where(row: Row) -> Row:
    """The processor that a row is about, where that is not this machine's."""
    kind = str(row.get("device"))
    return {"processor": device_name(torch.device(kind))} if kind.startswith("cuda") else {}


def quiet(label: str, done: int, total: int) -> None:
    """Shows no progress."""
