"""Benchmark of decoding steps on the cache of pipelines, which grows in place.

Pipelines on packed weights let heads that share keys read them once, too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mmfast.bench import timing
from mmfast.bench.cases import Case, build
from mmfast.bench.registry import Tick, benchmark, quiet
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.suites.step_selection import filled, steps
from mmfast.models.cache_name import CACHE
from mmfast.models.decoder.grouped import grouped
from mmfast.models.kv.room import growing_cache

PRESET = "llava-onevision-0.5b"
SIZES = ((1, 1024), (1, 4096), (1, 16384), (8, 1024))  # answers at once, entries of each
ROUNDS = 5
STOCK, OURS, ROWS = "stock", "growing", "growing, keys read once for heads that share them"


@benchmark("decode", "growing")
def growing(tick: Tick) -> list[Row]:
    """Time steps on both caches, filled with the same random entries."""
    return growing_rows(PRESET, SIZES, ROUNDS, tick)


def growing_rows(
    preset: str, sizes: tuple[tuple[int, int], ...], rounds: int, tick: Tick = quiet
) -> list[Row]:
    """Measure caches of each size on one shape."""
    case = build(preset, ("llm", "decode"), 1, torch.device("cpu"), torch.bfloat16)
    found: list[Row] = []
    with torch.inference_mode(), timing.one_thread(), timing.frozen():
        for number, (batch, tokens) in enumerate(sizes):
            tick(f"{batch} x {tokens} entries", number, len(sizes))
            found += _rows(case, preset, batch, tokens, rounds)
    return found


def _rows(case: Case, preset: str, batch: int, tokens: int, rounds: int) -> list[Row]:
    own, other = (growing_cache(case.model, {})[CACHE] for _ in range(2))
    caches = {STOCK: None, timing.AGAIN: None, OURS: own}
    ways = {
        name: partial(steps, case, filled(case, tokens, batch, cache))
        for name, cache in caches.items()
    }
    ways[ROWS] = partial(_steps_by_rows, case, filled(case, tokens, batch, other))
    for run in ways.values():  # the room of the cache is made once
        run()
    times = timing.PairedTimes.of(timing.interleave(ways, rounds))
    shared: Row = {"preset": preset, "device": "cpu", "dtype": dtype_name(torch.bfloat16)}
    shared |= {"tokens": tokens, "batch": batch, **timing.ON_ONE_THREAD}
    return [{**shared, **times.row(name)} for name in (STOCK, OURS, ROWS)]


def _steps_by_rows(case: Case, cache: Any) -> timing.Sample:
    with grouped(case.model, steps=True):
        return steps(case, cache)
