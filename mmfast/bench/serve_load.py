"""Chats at once against one at a time, the longest gap in a running answer, and too many."""

from __future__ import annotations

import statistics

import torch

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.serve_chats import (
    ChatRecord,
    TimeSpent,
    all_ended,
    chat,
    engine,
    forget,
    gap_and_chunk,
)
from mmfast.bench.timing import frozen, paired
from mmfast.serve.engine.base import BusyError, Finish
from mmfast.serve.engine.scheduler import Scheduler

CHATS, TOKENS, ROUNDS, MANY = 16, 32, 5, 64


def rows(progress: Tick, rounds: int = ROUNDS, tokens: int = TOKENS) -> list[Row]:
    """Rows of the embedded model, on as many threads as torch uses."""
    scheduler = engine(slots=CHATS)
    try:
        return _rows(scheduler, progress, rounds, tokens)
    finally:
        scheduler.close()


def _rows(scheduler: Scheduler, progress: Tick, rounds: int, tokens: int) -> list[Row]:
    one: list[TimeSpent] = []
    many: list[TimeSpent] = []
    gaps: list[tuple[TimeSpent, TimeSpent]] = []
    with frozen():
        one_by_one(scheduler, tokens, 2)
        at_once(scheduler, tokens, CHATS)
        for number in range(rounds):
            for way in (0, 1) if number % 2 else (1, 0):
                forget(scheduler)
                if way:
                    many.append(at_once(scheduler, tokens, CHATS))
                    gaps.append(gap_and_chunk(scheduler))
                else:
                    one.append(one_by_one(scheduler, tokens, CHATS))
            progress(f"{CHATS} chats", number + 1, rounds)
    shared = {
        "chats": CHATS,
        "tokens": tokens,
        "n": rounds,
        "threads": torch.get_num_threads(),
        "model": scheduler.model,
        "device": "cpu",
    }
    return [
        {"job": "one at a time", **shared, **_speed(one, one, tokens)},
        {"job": f"{CHATS} at once", **shared, **_speed(one, many, tokens), **_gaps(gaps)},
        {"job": f"{MANY} at once", **shared, "chats": MANY, **crowd(scheduler, tokens, MANY)},
    ]


def one_by_one(scheduler: Scheduler, tokens: int, count: int) -> TimeSpent:
    """What `count` chats take, each asked when the one before is over."""
    start = TimeSpent.now()
    for _ in range(count):
        ChatRecord(scheduler, chat(tokens)).end()
    return TimeSpent.now().since(start)


def at_once(scheduler: Scheduler, tokens: int, count: int) -> TimeSpent:
    """What `count` chats take that are asked together."""
    start = TimeSpent.now()
    all_ended([ChatRecord(scheduler, chat(tokens)) for _ in range(count)])
    return TimeSpent.now().since(start)


def crowd(scheduler: Scheduler, tokens: int, count: int) -> Row:
    """What becomes of more chats than there is room for."""
    heard, busy, retry = [], 0, 0.0
    for _ in range(count):
        try:
            heard.append(ChatRecord(scheduler, chat(tokens)))
        except BusyError as error:
            busy, retry = busy + 1, error.retry_after
    ended = sum(isinstance(event, Finish) for event in all_ended(heard))
    return {
        "answered": ended,
        "busy": busy,
        "lost": count - ended - busy,
        "retry_after_s": retry,
    }


def _speed(base: list[TimeSpent], mine: list[TimeSpent], tokens: int) -> Row:
    wall = statistics.median(each.wall for each in mine)
    return {
        "tokens_per_s": CHATS * tokens / wall,
        "seconds": wall,
        "cpu_seconds": statistics.median(each.cpu for each in mine),
        "speedup": paired([b.wall for b in base], [m.wall for m in mine]),
        "cpu_speedup": paired([b.cpu for b in base], [m.cpu for m in mine]),
    }


def _gaps(found: list[tuple[TimeSpent, TimeSpent]]) -> Row:
    return {
        "chunk_ms": 1e3 * statistics.median(chunk.wall for _, chunk in found),
        "gap_ms": 1e3 * statistics.median(gap.wall for gap, _ in found),
        "gap_chunks": statistics.median(gap.wall / chunk.wall for gap, chunk in found),
        "cpu_chunk_ms": 1e3 * statistics.median(chunk.cpu for _, chunk in found),
        "cpu_gap_ms": 1e3 * statistics.median(gap.cpu for gap, _ in found),
        "cpu_gap_chunks": statistics.median(gap.cpu / chunk.cpu for gap, chunk in found),
    }
