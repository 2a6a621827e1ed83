"""A long prompt beside a running answer, and a tenant of many requests beside one of few."""

from __future__ import annotations

import queue
import statistics

import torch

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.serve_chats import ChatRecord, TimeSpent, chat, engine, forget, gap_and_chunk
from mmfast.bench.timing import frozen
from mmfast.serve.engine.base import Delta, Event
from mmfast.serve.engine.scheduler import Scheduler

WORDS, TOKENS, ROUNDS = 2000, 160, 5
MANY, FEW = 24, 4  # requests of two tenants


def rows(progress: Tick, rounds: int = ROUNDS, words: int = WORDS) -> list[Row]:
    """Rows of the embedded model, on as many threads as torch uses."""
    ways = {"chunks of 256": 256, "in one piece": 4096}
    engines = {name: engine(chunk=chunk, slots=4) for name, chunk in ways.items()}
    found: dict[str, list[tuple[TimeSpent, TimeSpent]]] = {name: [] for name in ways}
    quiet: list[TimeSpent] = []
    try:
        with frozen():
            for number in range(rounds + 1):  # the first one is to get warm
                for name in ways if number % 2 else reversed(ways):
                    forget(engines[name])
                    found[name].append(_beside(engines[name], words))
                forget(engines["chunks of 256"])
                quiet.append(_alone(engines["chunks of 256"]))
                progress(f"{words} tokens", number, rounds)
            turns = _turns(engines["chunks of 256"])
    finally:
        for scheduler in engines.values():
            scheduler.close()
    shared = {"n": rounds, "threads": torch.get_num_threads(), "model": "tiny-video"}
    chunks = [chunk for _, chunk in found["chunks of 256"]]
    gaps = {f"a prompt of {words} tokens, {name}": [g for g, _ in m] for name, m in found.items()}
    table = {"no prompt": quiet, **gaps}
    return [
        *({"job": job, **shared, **_row(mine[1:], chunks[1:])} for job, mine in table.items()),
        {"job": "two tenants", **shared, **turns},
    ]


def _beside(scheduler: Scheduler, words: int) -> tuple[TimeSpent, TimeSpent]:
    """A long prompt comes while an answer runs: the longest gap in it, and a chunk."""
    running = ChatRecord(scheduler, chat(TOKENS, image=False))
    running.first()
    long = ChatRecord(scheduler, chat(2, " ".join(["red"] * words), image=False))
    long.end()
    running.end()
    return gap_and_chunk(scheduler)


def _alone(scheduler: Scheduler) -> TimeSpent:
    ChatRecord(scheduler, chat(TOKENS, image=False)).end()
    return gap_and_chunk(scheduler)[0]


def _row(gaps: list[TimeSpent], chunks: list[TimeSpent]) -> Row:
    both = list(zip(gaps, chunks, strict=True))
    return {
        "gap_ms": 1e3 * statistics.median(gap.wall for gap in gaps),
        "chunk_ms": 1e3 * statistics.median(chunk.wall for chunk in chunks),
        "gap_chunks": statistics.median(gap.wall / chunk.wall for gap, chunk in both),
        "cpu_gap_ms": 1e3 * statistics.median(gap.cpu for gap in gaps),
        "cpu_chunk_ms": 1e3 * statistics.median(chunk.cpu for chunk in chunks),
        "cpu_gap_chunks": statistics.median(gap.cpu / chunk.cpu for gap, chunk in both),
    }


def _turns(scheduler: Scheduler) -> Row:
    """One tenant asks a lot, then another asks little: in which place the latter are answered."""
    forget(scheduler)
    over: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(tenant: str) -> None:
        def hear(event: Event) -> None:
            if not isinstance(event, Delta):
                over.put(tenant)

        scheduler.submit(chat(8, tenant=tenant), hear)

    for tenant in ["many"] * MANY + ["few"] * FEW:
        ask(tenant)
    order = [over.get() for _ in range(MANY + FEW)]
    places = [i + 1 for i, tenant in enumerate(order) if tenant == "few"]
    return {"of": MANY + FEW, "asked_last": FEW, "places": places, "last_place": max(places)}
