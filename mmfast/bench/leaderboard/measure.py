"""Measurement of the cells of a grid, each of which is a row on disk as soon as it is known."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmfast.attach import attach
from mmfast.bench.leaderboard.grid import (
    ANSWERS,
    SPEED,
    STOCK,
    BoardCell,
    BoardGrid,
    Entrant,
    checkpoint,
    known_entrants,
)
from mmfast.bench.results import Row, append, environment, kept_rows
from mmfast.bench.timing import frozen
from mmfast.core.errors import MmfastError
from mmfast.core.spec import parse
from mmfast.models.families.adapter import token_counts
from mmfast.serve.engine.base import (
    Delta,
    Event,
    Failure,
    Media,
    Message,
    Options,
    Request,
    SamplingOptions,
)
from mmfast.tiny.evaluate import BATCH, QuestionBatch, Subject, answered_alone, in_tower
from mmfast.tiny.suites import SUITES, suite, suite_of

SUITE = "leaderboard"  # of every row, at its start
TOGETHER = 8  # requests at once
ALONE = 3  # requests one after the other, in a round
PATIENCE = 300.0  # seconds for one answer
Progress = Callable[[int, int, str], None]
_NUMBERS = itertools.count()


def run_grid(
    grid: BoardGrid,
    path: Path,
    progress: Progress = lambda done, total, label: None,
) -> list[Row]:
    """Measure the cells of a grid that `path` does not hold yet; return the rows of all.

    A cell that fails is kept as a row with an `error` and tried again by the next run.
    """
    rows, cells = list[Row](), grid.cells
    if any(cell.job == SPEED for cell in cells):
        _engine_class()  # what is missing is told before the work
    known = kept_rows(path, SUITE)
    total, shared = sum(map(_work, cells)), environment()
    append(path, [])  # an unwritable place is told before the work
    for group in grid.groups():
        bench: AnswerBench | SpeedBench | None = None
        try:
            for cell in group:
                progress(sum(_work(c) for c in cells[: len(rows)]), total, cell.label)
                row = known.get(cell.key)
                if row is None or "error" in row:
                    bench = bench or _bench(group, rows)
                    row = _measured(cell, bench, shared)
                    append(path, [row])
                rows.append(row)
        finally:
            if isinstance(bench, SpeedBench):
                bench.close()
    progress(total, total, "done")
    return rows


def stored_rows(path: Path) -> list[Row]:
    """Rows of a file that hold for the methods and weights as they are now."""
    known, found = {**known_entrants(), STOCK: Entrant(STOCK)}, list[Row]()
    for row in kept_rows(path, SUITE).values():
        whole = {"job", "media", "method", "budget", "seed", "n"} <= row.keys()
        if whole and row["media"] in SUITES and row["method"] in known:
            who, ask = known[row["method"]], (row["budget"], row["seed"], row["n"])
            if BoardCell(row["job"], row["media"], who, *ask).key == row["key"]:
                found.append(row)
    return found


def _work(cell: BoardCell) -> int:
    """Estimate the work of a cell: pages hold several times the tokens of the other media."""
    heavy = 6 if cell.suite in ("document", "table") else 1
    return heavy * (cell.n if cell.job == ANSWERS else 40 * cell.n)


def _bench(group: Sequence[BoardCell], rows: Sequence[Row]) -> AnswerBench | SpeedBench:
    if group[0].job == SPEED:
        return SpeedBench(group[0])
    stock = next((row for row in rows if _place(row) == _place(head_of(group[0]))), None)
    return AnswerBench(group, None if stock is None else stock["answers"])


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("job", "media", "method", "seed"))


def head_of(cell: BoardCell) -> Row:
    """Return what a row says of its cell."""
    reduce, cache = cell.way
    head: Row = {"suite": SUITE, "key": cell.key, "job": cell.job, "media": cell.suite}
    head |= {"method": cell.entrant.name, "budget": cell.budget, "reduce": reduce, "cache": cache}
    model = suite_of(cell.suite).model
    return head | {"seed": cell.seed, "n": cell.n, "model": model, "weights": checkpoint(model)}


def _measured(cell: BoardCell, bench: AnswerBench | SpeedBench, shared: Row) -> Row:
    start, worked = time.perf_counter(), time.process_time()
    try:
        found = bench.row(cell)
    except Exception as error:  # of a method of another package too: the other cells go on
        if cell.entrant.method is None:
            raise  # without the stock model nothing can be compared
        text = str(error) if isinstance(error, MmfastError) else f"{type(error).__name__}: {error}"
        found = {"error": " ".join(text.split())[:300]}
    found["seconds"] = round(time.perf_counter() - start, 3)
    found["cpu_seconds"] = round(time.process_time() - worked, 3)  # as on a quiet machine
    threads = {"threads": torch.get_num_threads(), "load": _load()}
    return {**head_of(cell), **found, **threads, **shared}


def _load() -> float | None:
    """Tasks that want to run per processor; much above 1 makes times unreliable."""
    if not hasattr(os, "getloadavg"):
        return None
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


class AnswerBench:
    """Questions of one suite and seed, encoded once for all methods behind the encoder."""

    def __init__(self, group: Sequence[BoardCell], stock: Sequence[str] | None) -> None:
        first = group[0]
        self.subject = Subject(asked=suite_of(first.suite))
        self.cases = suite(first.n, first.seed, first.suite)
        self._stock = stock  # answers of the stock model
        self._batches: dict[int, list[QuestionBatch]] = {}
        self._needs = {
            need
            for cell in group
            if (stages := _parsed(cell)) and not in_tower(stages)
            for stage in stages
            for need in stage.method.needs
        }

    def _sized(self, size: int) -> list[QuestionBatch]:
        if size not in self._batches:
            places = range(0, len(self.cases), size)
            self._batches[size] = [
                QuestionBatch(self.subject, self.cases[at : at + size], self._needs)
                for at in places
            ]
        return self._batches[size]

    def row(self, cell: BoardCell) -> Row:
        """Answer all questions under the specs of a cell."""
        reduce, cache = cell.way
        stages = parse(reduce)
        texts, chances, kept = list[str](), list[float](), list[int]()
        held = 0.0
        for batch in self._sized(1 if answered_alone(stages) else BATCH):
            inputs = batch.inputs if in_tower(stages) else batch.encoded
            with attach(self.subject.model, reduce, cache) as trace:
                replies = self.subject.replies(inputs)
            texts, chances = texts + replies.texts, chances + replies.chances
            held += replies.kv_bytes * len(batch.cases)
            counts = token_counts(self.subject.model, self.subject.asked.media, batch.inputs, trace)
            kept += [left for _, left in counts]
        if cell.entrant.method is None:
            self._stock = texts
        assert self._stock is not None  # the stock model is the first of a group
        right = [text == case.answer for text, case in zip(texts, self.cases, strict=True)]
        same = [text == stock for text, stock in zip(texts, self._stock, strict=True)]
        row: Row = {"kinds": [*self.subject.asked.kinds], "right": _bits(right)}
        row |= {"same": _bits(same), "chances": [round(each, 3) for each in chances]}
        row |= {"kept": sum(kept) / cell.n, "kv_bytes": held / cell.n}
        return row | ({"answers": texts} if cell.entrant.method is None else {})


def _parsed(cell: BoardCell) -> tuple[Any, ...]:
    try:
        return tuple(parse(cell.way[0]))
    except MmfastError:  # the cell reports it
        return ()


def _bits(flags: Sequence[bool]) -> str:
    return "".join("01"[flag] for flag in flags)


def _engine_class() -> Any:
    try:
        from mmfast.serve.engine.scheduler import Scheduler
    except ImportError as error:
        raise MmfastError(
            f'times to the first token need {error.name}: pip install "mmfast[serve]", or give '
            "--no-speed"
        ) from None
    return Scheduler


class SpeedBench:
    """The serving engine with the model of a suite, asked about media that it has not seen."""

    def __init__(self, cell: BoardCell) -> None:
        subject = Subject(asked=suite_of(cell.suite))
        self._cases = suite(TOGETHER, cell.seed, cell.suite)
        self._shots = [[subject.shot(file) for file in case.media] for case in self._cases]
        pair = (subject.model, subject.processor)
        self._engine = _engine_class()(pair, name=subject.name, slots=TOGETHER, queue=TOGETHER)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def row(self, cell: BoardCell) -> Row:
        """Time requests alone and eight at once, beside the stock model in the same rounds."""
        stock, mine = Options(), Options(*cell.way)
        for options in (stock, mine):  # the first request of a spec is slower
            self._first_tokens(options, 1, 1)
        found: dict[tuple[bool, int], list[float]] = {}
        with frozen():
            for number in range(cell.n):
                for many in (1, TOGETHER):
                    for plain in (True, False)[:: 1 if number % 2 else -1]:
                        ms = self._first_tokens(stock if plain else mine, ALONE, many)
                        found.setdefault((plain, many), []).append(ms)
        row: Row = {"rounds": cell.n}
        for many in (1, TOGETHER):
            before, after = found[True, many], found[False, many]
            row |= {f"ttft_{many}_ms": median(after), f"stock_ttft_{many}_ms": median(before)}
            gains = [b / a for b, a in zip(before, after, strict=True)]
            row[f"gains_{many}"] = [round(gain, 4) for gain in gains]
        return row

    def _first_tokens(self, options: Options, alone: int, many: int) -> float:
        """Median milliseconds from request to first token: `alone` in turn, or `many` at once."""
        if many == 1:
            return median(self._waited([self._request(options, i)])[0] for i in range(alone))
        return median(self._waited([self._request(options, i) for i in range(many)]))

    def _waited(self, requests: Sequence[Request]) -> list[float]:
        start = time.perf_counter()
        records = [FirstDelta() for _ in requests]
        for record, request in zip(records, requests, strict=True):
            self._engine.submit(request, record)
        for record in records:
            record.wait()
        return [1e3 * (record.at - start) for record in records]

    def _request(self, options: Options, place: int) -> Request:
        number = next(_NUMBERS)  # of new media: nothing that is kept can be used again
        parts: list[str | Media] = [
            Media(shot, f"leaderboard-{os.getpid()}-{number}-{i}")
            for i, shot in enumerate(self._shots[place % len(self._shots)])
        ]
        question = self._cases[place % len(self._cases)].question
        message = Message("user", (*parts, question))
        sampling = SamplingOptions(max_tokens=4)
        return Request(f"leaderboard-{number}", (message,), sampling, options)


class FirstDelta:
    """Receiver of the events of a request that notes when the first piece of the answer came."""

    def __init__(self) -> None:
        self.at = 0.0
        self._over = threading.Event()
        self._failed: str | None = None

    def __call__(self, event: Event) -> None:
        """Receive an event; an answer without a piece counts at its end."""
        self.at = self.at or time.perf_counter()
        if isinstance(event, Failure):
            self._failed = event.message
        if not isinstance(event, Delta):
            self._over.set()

    def wait(self) -> None:
        """Wait for the end of the answer; MmfastError where it failed or takes minutes."""
        if not self._over.wait(PATIENCE):
            raise MmfastError(f"no answer within {PATIENCE:g} seconds")
        if self._failed is not None:
            raise MmfastError(self._failed)
