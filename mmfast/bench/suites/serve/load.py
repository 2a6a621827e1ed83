"""Benchmarks of the server: requests that come at random, predicted beside, and memory."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.serve.chats import ChatRecord, chat, engine
from mmfast.bench.suites.serve.mix import SPECS
from mmfast.bench.timing import frozen, resident_bytes
from mmfast.planner.queueing import poisson, simulate
from mmfast.serve.engine.base import BusyError, Finish, Options, Request
from mmfast.serve.engine.scheduler import Scheduler

MIX = (Options(), *SPECS)  # of the requests, in turn
LOADS, SLOTS, QUEUE, TOKENS = (0.5, 0.8, 1.2), 8, 16, 32


def asked(kind: int, tokens: int = TOKENS) -> Request:
    """Return a request about a new image under one of the specs."""
    return replace(chat(tokens), options=MIX[kind % len(MIX)])


def answered(scheduler: Scheduler, kind: int, tokens: int = TOKENS) -> float:
    """Return the seconds of one request."""
    start = time.perf_counter()
    record = ChatRecord(scheduler, asked(kind, tokens))
    record.over.wait()
    assert isinstance(record.last, Finish), record.last
    return record.at - start


def measured(scheduler: Scheduler, rounds: int) -> tuple[list[float], list[float]]:
    """Return seconds alone by kind of request, and the gain of 1 to `SLOTS` at once."""
    kinds = list(range(len(MIX))) * rounds
    runs = [answered(scheduler, kind) for kind in list(range(len(MIX))) * 2 + kinds]
    alone = [median(runs[2 * len(MIX) + kind :: len(MIX)]) for kind in range(len(MIX))]
    gains, counts = list[float](), (1, 2, 4, SLOTS)
    # Answers of one length would end together, and their prompts come at once.
    lengths = [random.Random(i).randint(1, 2 * TOKENS - 1) for i in range(3 * len(kinds))]
    for many in counts:
        start = time.perf_counter()
        with ThreadPoolExecutor(many) as pool:
            list(pool.map(partial(answered, scheduler), kinds * 3, lengths))
        gains.append(3 * sum(alone[k] for k in kinds) / (time.perf_counter() - start))
    return alone, np.interp(range(1, SLOTS + 1), counts, gains).tolist()


@benchmark("serve", "open")
def open_rows(tick: Tick, count: int = 400, rounds: int = 5) -> list[Row]:
    """Measure requests that come at random at shares of the capacity, and predict them."""
    shared = {"n": count, "tokens": TOKENS, "slots": SLOTS, "queue": QUEUE, "model": "tiny-video"}
    shared |= {"threads": torch.get_num_threads(), "device": "cpu"}
    with closing(engine(slots=SLOTS, queue=QUEUE)) as scheduler, frozen():
        alone, gain = measured(scheduler, rounds)
        capacity, rows = max(gain) / mean(alone), list[Row]()
        for number, load in enumerate(LOADS):
            tick(f"{load:g} of capacity", number, len(LOADS))
            kinds = random.Random(number).choices(range(len(MIX)), k=count)
            times = poisson(load * capacity, count, number)
            told = simulate(times, [alone[kind] for kind in kinds], gain, SLOTS + QUEUE)
            found = _driven(scheduler, times, kinds)
            found |= {f"told_p{q}_ms": 1e3 * told.quantile(q / 100) for q in (50, 95)}
            found |= {"told_busy": told.refused, "told_per_s": told.rate, "gain": max(gain)}
            rows.append({"job": f"{load:g} of capacity", "load": load, **found})
    return [{**row, **shared} for row in rows]


def _driven(scheduler: Scheduler, times: Sequence[float], kinds: Sequence[int]) -> Row:
    """Send requests at their times, whether or not those before are over."""
    records, waits, begun = list[tuple[float, ChatRecord]](), list[float](), time.perf_counter()
    for at, kind in zip(times, kinds, strict=True):
        request = asked(kind)
        time.sleep(max(0.0, begun + at - time.perf_counter()))
        try:
            records.append((begun + at, ChatRecord(scheduler, request)))
        except BusyError as error:
            waits.append(error.retry_after)
    ended = [r.over.wait() and isinstance(r.last, Finish) for _, r in records]
    ms = [1e3 * (record.at - at) for at, record in records]
    row: dict[str, Any] = {"asked_per_s": len(times) / times[-1], "answered": sum(ended)}
    row |= {"p50_ms": float(np.quantile(ms, 0.5)), "p95_ms": float(np.quantile(ms, 0.95))}
    row |= {"per_s": sum(ended) / (max(r.at for _, r in records) - begun)}
    row |= {"busy": len(waits), "retry_after_s": min(waits, default=0.0)}
    return row | {"lost": len(times) - len(waits) - sum(ended)}


@benchmark("serve", "memory")
def memory(tick: Tick, count: int = 2000, steps: int = 20) -> list[Row]:
    """Measure the memory of the process over many requests under all specs."""
    held = list[float]()
    made = engine(slots=SLOTS, queue=QUEUE, memory="64MB")  # a quarter of it keeps prefixes
    with closing(made) as scheduler, ThreadPoolExecutor(SLOTS) as pool:
        for step in range(steps):
            list(pool.map(lambda kind: answered(scheduler, kind, 8), range(count // steps)))
            held.append(resident_bytes() / 1e6)
            tick("requests", (step + 1) * count // steps, count)
    half = held[steps // 2 :]
    slope = float(np.polyfit(np.arange(len(half)) * count / steps / 1000, half, 1)[0])
    row = {"job": f"{count:,} requests", "mb": held[-1], "first_mb": held[0], "mb_per_1000": slope}
    return [{**row, "n": count, "device": "cpu", "model": "tiny-video"}]
