"""Registry of the benchmarks that `mmfast bench --SUITE NAME` runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from mmfast.bench.results import Row, environment
from mmfast.core.errors import MmfastError, unknown
from mmfast.models.loading import device_name

_SERVE = ("chats", "load", "mix", "drafts", "paged", "faults", "realtime", "hostile")
_SPEECH = ("quality", "speed", "drafts", "replies", "soak", "translation", "turns")
# Modules of `mmfast.bench.suites` that hold the benchmarks of each suite.
SUITES = {
    "stream": ("stream", "stream_index", "reuse", "camera"),
    "speech": tuple(f"speech.{name}" for name in _SPEECH),
    "serve": (*(f"serve.{name}" for name in _SERVE), "vllm_load"),
    "kernels": ("kernels", "column_sums", "selection"),
    "decode": ("decode", "drafts", "kvpress_side", "step_selection", "weights", "growing"),
    "prefill": ("sparse_prefill",),
    "encoder": ("scene", "vision"),
    "train": ("training",),
}
Tick = Callable[[str, int, int], None]  # label, steps done, steps in all
Benchmark = Callable[[Tick], Iterable[Row]]  # one that runs for hours yields each row at once
K = TypeVar("K")
F = TypeVar("F", bound=Callable[..., Iterable[Row]])
_KNOWN: dict[str, dict[str, Benchmark]] = {suite: {} for suite in SUITES}


class IncompleteError(MmfastError):
    """Some parts of a benchmark failed; `rows` are those of the others."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


def benchmark(suite: str, name: str) -> Callable[[F], F]:
    """Register a function from a progress callback to rows as one benchmark of a suite."""

    def register(function: F) -> F:
        _KNOWN[suite][name] = function
        return function

    return register


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Raise an MmfastError that names a package which a suite or a benchmark lacks."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MmfastError(
            f'--{what} needs {error.name}, which is not installed: pip install "mmfast[test]"'
        ) from None


def names(suite: str) -> list[str]:
    """Return the names of a suite's benchmarks; an MmfastError where a package is missing."""
    with needing(suite):
        for module in SUITES[suite]:
            importlib.import_module(f"mmfast.bench.suites.{module}")
    return sorted(_KNOWN[suite])


def find(suite: str, name: str) -> Benchmark:
    """Return one benchmark."""
    known = names(suite)
    if name not in known:
        raise MmfastError(unknown(f"{suite} benchmark", name, known))
    return _KNOWN[suite][name]


def named_rows(
    suite: str,
    name: str,
    progress: Tick | None = None,
    peer: str | None = None,
    sink: Callable[[Row], None] = lambda row: None,
    only: Sequence[str] | None = None,
) -> list[Row]:
    """Run one benchmark; return its rows with the environment that repeats them.

    `peer` is a folder with other code to measure beside; an MmfastError where there is no such job.
    `sink` is given every row as soon as the benchmark has it; `only` names the cases to run, of a
    benchmark that is run in parts.
    """
    run: Callable[..., Iterable[Row]] = find(suite, name)
    if peer is not None:
        if "peer" not in inspect.signature(run).parameters:
            raise MmfastError(f"--{suite} {name} has no peer; leave --peer out")
        run = partial(run, peer=peer)
    if only is not None:
        if "only" not in inspect.signature(run).parameters:
            raise MmfastError(f"--{suite} {name} runs as a whole; leave --only out")
        run = partial(run, only=only)
    shared = {"suite": suite, "bench": name, **environment()}
    rows: list[Row] = []

    def keep(found: Iterable[Row]) -> None:
        for row in found:
            rows.append({**shared, **_processor(row), **row})
            sink(rows[-1])

    try:
        with needing(f"{suite} {name}"):
            keep(run(progress or quiet))
    except IncompleteError as error:
        keep(error.rows)
        raise IncompleteError(str(error), rows) from None
    return rows


def _processor(row: Row) -> Row:
    kind = str(row.get("device"))
    return {"processor": device_name(torch.device(kind))} if kind.startswith("cuda") else {}


def over(cases: Iterable[K], rows: Callable[[K], list[Row]], tick: Tick) -> list[Row]:
    """Return the rows of all cases, each announced by its text; errors are as of `collect`."""
    known = list(cases)

    def measured(number: int, case: K) -> list[Row]:
        tick(str(case), number, len(known))
        return rows(case)

    jobs = enumerate(known)
    return collect((str(case), partial(measured, number, case)) for number, case in jobs)


def collect(parts: Iterable[tuple[str, Callable[[], Iterable[Row]]]]) -> list[Row]:
    """Return the rows of all parts, each with a label.

    A part that fails does not take along the rows of the others: IncompleteError, once all have
    run, has those and says which failed and why.
    """
    found, failed = list[Row](), list[str]()
    for label, run in parts:
        try:
            found += run()
        except MmfastError as error:
            failed.append(f"{label}: {error}")
        except Exception as error:  # of a compiler or driver, or a full memory
            lines = str(error).splitlines() or [""]
            failed.append(f"{label}: {type(error).__name__}: {lines[0][:200]}")
    if failed:
        raise IncompleteError("; ".join(failed), found)
    return found


def chosen(only: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    """Return the cases that `only` names, all without it; MmfastError for one that is unknown."""
    for name in only or ():
        if name not in known:
            raise MmfastError(unknown(what, name, known))
    return list(only or known)


def quiet(label: str, done: int, total: int) -> None:
    """Show no progress."""
