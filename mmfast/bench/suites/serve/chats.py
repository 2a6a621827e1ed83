"""Benchmarks of the server: chats at once, fairness, the start, `mmfast batch`."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import frozen, paired, process_seconds
from mmfast.core.errors import MmfastError
from mmfast.models.loading import load
from mmfast.models.prompt import Shot
from mmfast.serve.batch.job import BatchJob
from mmfast.serve.engine.base import (
    Delta,
    Event,
    Finish,
    Media,
    Message,
    Request,
    SamplingOptions,
)
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.scene import CLIPS, draw, make_scene

_NUMBERS = itertools.count()


def engine(**options: Any) -> Scheduler:
    """Return the embedded model on the CPU without its end token: its answers are one word."""
    model, processor = load("tiny-video", "cpu", "float32")
    model.generation_config.eos_token_id = None
    return Scheduler((model, processor), name="tiny-video", **options)


def chat(
    tokens: int,
    text: str = "what is it?",
    pictures: int = 1,
    tenant: str = "",
    size: tuple[int, int] = (96, 96),
) -> Request:
    """Return a request about new pictures of `size`, height and width, or without one."""
    number = next(_NUMBERS)
    parts: list[str | Media] = [text]
    for i in range(pictures):
        pixels = np.random.default_rng((number, i)).integers(0, 256, (*size, 3), dtype=np.uint8)
        parts.insert(0, Media(Shot("image", pixels), f"image-{os.getpid()}-{number}-{i}"))
    message = Message("user", tuple(parts))
    return Request(f"chat-{number}", (message,), SamplingOptions(max_tokens=tokens), tenant=tenant)


class ChatRecord:
    """Submits a request; records its text, its last event and the time of that."""

    def __init__(self, engine: Any, request: Request) -> None:
        self.name, self.begun, self.over = request.id, threading.Event(), threading.Event()
        self.last: Event | None = None
        self.text, self.at = "", 0.0
        engine.submit(request, self._receive)

    def _receive(self, event: Event) -> None:
        self.begun.set()
        if isinstance(event, Delta):
            self.text += event.text
        else:
            self.last, self.at = event, time.perf_counter()
            self.over.set()


def answered(engine: Any, requests: Iterable[Request], together: bool = True) -> list[ChatRecord]:
    """Submit requests at once or in turn and wait for the answers; MmfastError where one fails."""
    records = list[ChatRecord]()
    for request in requests:
        records.append(ChatRecord(engine, request))
        if not together:
            records[-1].over.wait()
    for record in records:
        record.over.wait()
        if not isinstance(record.last, Finish):
            raise MmfastError(f"a request of the benchmark failed: {record.last}")
    return records


class TimeSpent(NamedTuple):
    """Seconds of the wall clock and of the processor."""

    wall: float
    cpu: float


def spent(job: Callable[[], object]) -> TimeSpent:
    """Run `job` and measure both clocks."""
    wall, cpu = time.perf_counter(), time.process_time()
    job()
    return TimeSpent(time.perf_counter() - wall, time.process_time() - cpu)


def gap_and_chunk(scheduler: Scheduler, share: float = 0.75) -> tuple[TimeSpent, TimeSpent]:
    """Return the longest gap between two decoding steps, and the median of whole chunks."""
    batch = scheduler._runner.batch
    assert batch is not None
    gaps = [TimeSpent(*gap) for gap in tuple(batch.gaps)]
    least = share * batch.prefiller.chunk
    chunks = [TimeSpent(*both) for n, *both in tuple(batch.passes) if n >= least]
    return _by(max, gaps), _by(median, chunks)


def _by(summary: Any, values: Sequence[TimeSpent]) -> TimeSpent:
    missing = [TimeSpent(math.nan, math.nan)]
    return TimeSpent(*map(summary, zip(*(values or missing), strict=True)))


def reset(scheduler: Scheduler) -> None:
    """Clear the recorded times and all cached results."""
    batch = scheduler._runner.batch
    assert batch is not None
    batch.gaps.clear()
    batch.passes.clear()
    batch.prefixes.shrink(0)
    scheduler._runner.encoder.kept.shrink(0)


def _gap_row(gaps: Sequence[TimeSpent], chunks: Sequence[TimeSpent]) -> Row:
    found: Row = {}
    for clock, prefix in enumerate(("", "cpu_")):
        mine, theirs = ([each[clock] for each in kind] for kind in (gaps, chunks))
        found[f"{prefix}gap_ms"] = 1e3 * median(mine)
        found[f"{prefix}chunk_ms"] = 1e3 * median(theirs)
        found[f"{prefix}gap_chunks"] = paired(mine, theirs)
    return found


CHATS = 16


@benchmark("serve", "load")
def load_rows(tick: Tick, rounds: int = 5, tokens: int = 32) -> list[Row]:
    """Compare chats at once with one at a time, and measure the longest gap."""
    with closing(engine(slots=CHATS)) as scheduler:
        one: list[TimeSpent] = []
        many: list[TimeSpent] = []
        gaps: list[tuple[TimeSpent, TimeSpent]] = []
        with frozen():
            _answer(scheduler, tokens, 2, together=False)  # warm-up
            _answer(scheduler, tokens, CHATS, together=True)
            for number in range(rounds):
                for together in (False, True) if number % 2 else (True, False):
                    reset(scheduler)
                    job = partial(_answer, scheduler, tokens, CHATS, together)
                    (many if together else one).append(spent(job))
                    gaps += [gap_and_chunk(scheduler)] if together else []
                tick(f"{CHATS} chats", number + 1, rounds)
    shared = {"chats": CHATS, "tokens": tokens, "n": rounds, "model": scheduler.model}
    shared |= {"threads": torch.get_num_threads(), "device": "cpu"}
    gap_row = _gap_row(*zip(*gaps, strict=True))
    return [
        {"job": "one at a time", **shared, **_speed(one, one, tokens)},
        {"job": f"{CHATS} at once", **shared, **_speed(one, many, tokens), **gap_row},
    ]


def _answer(scheduler: Scheduler, tokens: int, count: int, together: bool) -> None:
    answered(scheduler, (chat(tokens) for _ in range(count)), together)


def _speed(base: Sequence[TimeSpent], mine: Sequence[TimeSpent], tokens: int) -> Row:
    wall = median(each.wall for each in mine)
    cpu = median(each.cpu for each in mine)
    gains = [paired([b[i] for b in base], [m[i] for m in mine]) for i in range(2)]
    row = {"tokens_per_s": CHATS * tokens / wall, "seconds": wall, "cpu_seconds": cpu}
    return {**row, "speedup": gains[0], "cpu_speedup": gains[1]}


FROM_MANY, FROM_FEW = 24, 4  # requests of two tenants
_ANSWER = 160  # tokens of the answer that a long prompt interrupts


@benchmark("serve", "fairness")
def fairness(tick: Tick, rounds: int = 5, words: int = 2000) -> list[Row]:
    """Measure gaps in an answer during a long prompt, and the turns of two tenants."""
    chunks = {"chunks of 256": 256, "in one piece": 4096}
    engines = {name: engine(chunk=chunk, slots=4) for name, chunk in chunks.items()}
    chunked = engines["chunks of 256"]
    found: dict[str, list[tuple[TimeSpent, TimeSpent]]] = {name: [] for name in engines}
    alone: list[TimeSpent] = []
    try:
        with frozen():
            for number in range(rounds + 1):  # the first round is a warm-up
                for name in engines if number % 2 else reversed(engines):
                    reset(engines[name])
                    found[name].append(_during_prompt(engines[name], words))
                reset(chunked)
                ChatRecord(chunked, chat(_ANSWER, pictures=0)).over.wait()
                alone.append(gap_and_chunk(chunked)[0])
                tick(f"{words} tokens", number, rounds)
            turns = _turns(chunked)
    finally:
        for scheduler in engines.values():
            scheduler.close()
    shared = {"n": rounds, "threads": torch.get_num_threads(), "model": "tiny-video"}
    base = [chunk for _, chunk in found["chunks of 256"]][1:]
    gaps = {f"a prompt of {words} tokens, {name}": [g for g, _ in m] for name, m in found.items()}
    table = {"no prompt": alone, **gaps}
    return [
        *({"job": job, **shared, **_gap_row(mine[1:], base)} for job, mine in table.items()),
        {"job": "two tenants", **shared, **turns},
    ]


def _during_prompt(scheduler: Scheduler, words: int) -> tuple[TimeSpent, TimeSpent]:
    """Submit a long prompt during an answer; return the longest gap in it, and a chunk."""
    running = ChatRecord(scheduler, chat(_ANSWER, pictures=0))
    running.begun.wait()
    ChatRecord(scheduler, chat(2, " ".join(["red"] * words), pictures=0)).over.wait()
    running.over.wait()
    return gap_and_chunk(scheduler)


def _turns(scheduler: Scheduler) -> Row:
    reset(scheduler)
    tenants = ["many"] * FROM_MANY + ["few"] * FROM_FEW
    records = answered(scheduler, [chat(8, tenant=tenant) for tenant in tenants])
    order = sorted(records, key=lambda record: record.at)
    places = sorted(order.index(record) + 1 for record in records[FROM_MANY:])
    return {"of": len(order), "asked_last": FROM_FEW, "places": places, "last_place": max(places)}


FILES, QUESTION = 240, "How many shapes are there?"
ENGINES = (("inproc", 1), ("ray", 1), ("ray", 2))  # engine and workers


@benchmark("serve", "batch")
def batch(
    tick: Tick, engines: Sequence[tuple[str, int]] = ENGINES, count: int = FILES, rounds: int = 3
) -> list[Row]:
    """Measure clips per second of `mmfast batch`, in one process and on Ray, with warm workers."""
    from mmfast.serve.batch import run  # needs pyarrow

    with tempfile.TemporaryDirectory(prefix="mmfast-") as where:
        folder = Path(where) / "clips"
        folder.mkdir()
        for number in range(count):
            clip = encode(draw(make_scene(CLIPS, 0, number)).frames)
            (folder / f"{number:04d}.mp4").write_bytes(clip)
        found: dict[tuple[str, int], list[Row]] = {way: [] for way in engines}
        for number in range(rounds):
            for way in engines if number % 2 == 0 else reversed(engines):
                found[way].append(_run(run, folder, Path(where) / "out.parquet", *way))
            tick("rounds", number + 1, rounds)
    middle = {w: sorted(f, key=lambda r: r["clips_per_s"])[len(f) // 2] for w, f in found.items()}
    base = middle[engines[0]]["clips_per_s"]
    shared = {"clips": count, "frames": 8, "n": rounds, "cores": os.cpu_count(), "device": "cpu"}
    return [
        {"job": f"{engine}, {workers} worker{'s' * (workers > 1)}", "engine": engine}
        | {"workers": workers, **row, "speedup": round(row["clips_per_s"] / base, 3), **shared}
        for (engine, workers), row in middle.items()
    ]


def _run(run: Any, folder: Path, out: Path, engine: str, workers: int) -> Row:
    start, stamps = time.perf_counter(), [(0.0, 0)]

    def tick(done: int, total: int) -> None:
        if done > stamps[-1][1]:
            stamps.append((time.perf_counter() - start, done))

    job = BatchJob(folder, (QUESTION,), device="cpu")
    run.run_batch(job, out, run.BatchOptions(engine, workers), tick=tick)
    out.unlink()
    half = next(stamp for stamp in stamps if stamp[1] >= stamps[-1][1] / 2)
    seconds, clips = stamps[-1][0] - half[0], stamps[-1][1] - half[1]
    row = {"clips_per_s": clips / seconds, "start_s": stamps[1][0]}
    row["seconds"] = time.perf_counter() - start
    return {name: round(value, 3) for name, value in row.items()}


TIMEOUT = 300.0  # seconds to wait for an answer
FIRST_QUESTIONS = {"text": "Hello?", "clip": "Which way does the red circle move?"}


@benchmark("serve", "start")
def start(tick: Tick, rounds: int = 5) -> list[Row]:
    """Measure a fresh `mmfast serve` up to its first answer."""
    found: dict[str, list[Row]] = {name: [] for name in FIRST_QUESTIONS}
    for number in range(rounds):
        for name, starts in found.items():
            starts.append(_start(name))
        tick("starts", number + 1, rounds)
    shared = {"n": rounds, "threads": os.cpu_count(), "model": "tiny-video", "device": "cpu"}
    return [
        {"job": f"first {name}"}
        | {key: round(median(each[key] for each in starts), 3) for key in starts[0]}
        | {"worst_s": round(max(each["answer_s"] for each in starts), 3), **shared}
        for name, starts in found.items()
    ]


def _start(name: str) -> Row:
    command = [sys.executable, "-m", "mmfast", "serve", "--port", "0"]
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = url_of(process)
            listening = time.perf_counter() - start
            _ask(url, name)
            answer, cpu = time.perf_counter() - start, process_seconds(process.pid)
            return {"listening_s": listening, "answer_s": answer, "cpu_s": cpu}
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()


def url_of(process: subprocess.Popen[str], mark: str = "listening on ") -> str:
    """Return the address that a server names in its log, behind a mark."""
    log = ""
    for line in process.stderr or ():
        log += line
        if mark in line:
            return line.partition(mark)[2].split()[0]
    raise MmfastError(f"the server did not start: {log.strip()[-200:]}")


def _ask(url: str, name: str) -> None:
    content: list[dict[str, Any]] = [{"type": "text", "text": FIRST_QUESTIONS[name]}]
    if name == "clip":
        clip = Path(str(files("mmfast.assets").joinpath("clips/red-circle.mp4"))).read_bytes()
        data = "data:video/mp4;base64," + base64.b64encode(clip).decode()
        content.insert(0, {"type": "video_url", "video_url": {"url": data}})
    document = {"model": "mmfast-tiny-scenes", "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(document).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        json.load(reply)["choices"][0]["message"]["content"]
