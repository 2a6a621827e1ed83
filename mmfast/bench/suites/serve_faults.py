"""Benchmark of workers killed under load: lost answers, and the time to recover."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.serve import ChatRecord, chat
from mmfast.models.loading import embedded_path
from mmfast.serve.engine.base import BusyError, Failure, Finish

REPLICAS, LATER, BYSTANDERS, LINGER, EVERY = 2, 8, 4, 1.0, 0.2


@benchmark("serve", "faults")
def faults(tick: Tick) -> list[Row]:
    """Kill a replica of every role on Ray, with the embedded model on the CPU."""
    from mmfast.serve.ray.engine import RayEngine

    parts: dict[str, Any] = dict.fromkeys(("encode", "prefill", "decode"), REPLICAS)
    found: list[Row] = []
    with endless_model() as model:
        for counts in (parts, {"replicas": REPLICAS}):
            engine = RayEngine(str(model), device="cpu", slots=24, linger=LINGER, **counts)
            try:
                for role in engine.replicas:
                    found.append({"engine": "ray", "replicas": REPLICAS, **trial(engine, role)})
                    tick(f"ray: {role}", len(found), len(parts) + 1)
            finally:
                engine.close()
    return found


@contextmanager
def endless_model() -> Iterator[Path]:
    """Copy the embedded model without its end token: its answers are one word."""
    with tempfile.TemporaryDirectory(prefix="mmfast-") as folder:
        path = Path(folder) / "endless"
        path.mkdir()
        for source in embedded_path().iterdir():
            shutil.copyfile(source, path / source.name)
        config = path / "generation_config.json"
        options = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps({**options, "eos_token_id": None}), encoding="utf-8")
        yield path


def trial(
    engine: Any,
    role: str,
    later: int = LATER,
    bystanders: int = BYSTANDERS,
    every: float = EVERY,
    tokens: int = 1500,
    patience: float = 300.0,
) -> Row:
    """Kill one worker of a role while answers run, and count the outcomes."""
    before = engine.health().gauges[f"workers_{role}"]
    long = [ChatRecord(engine, chat(tokens)) for _ in range(bystanders)]
    _await([each.begun for each in long], patience)
    fed: list[ChatRecord] = []
    while not (fed and fed[0].begun.is_set()):  # then every role holds a request
        _feed(engine, fed, every, patience)
    begun = {each.name for each in (*long, *fed) if each.begun.is_set() and not each.over.is_set()}
    victim = engine.workers(long[0].name)[role]  # the worker that served a running answer
    mine = {name for name in begun if engine.workers(name).get(role) == victim}
    # Answers that have begun have passed encode and prefill.
    spared = begun if role in ("encode", "prefill") else begun - mine
    os.kill(victim, signal.SIGKILL)
    killed = time.perf_counter()
    recovered = _recovery(
        lambda: engine.health().gauges[f"workers_{role}"], before, killed, patience
    )
    asked = len(fed)
    while len(fed) < asked + later:
        _feed(engine, fed, every, patience)
    records = [*long, *fed]
    _await([each.over for each in records], patience)
    recovered[0].join()
    lost = {each.name for each in records if _lost(each)}
    answered = [each.at for each in fed[asked:] if isinstance(each.last, Finish)]
    later_lost = lost & {each.name for each in fed[asked:]}
    row = {"role": role, "streams": len(records), "lost": len(lost)}
    row |= {"wrongly_lost": len(lost & spared), "lost_later": len(later_lost)}
    row["completed"] = sum(isinstance(each.last, Finish) for each in records)
    row["other_errors"] = sum(isinstance(e.last, Failure) and not _lost(e) for e in records)
    wait = round(min(answered) - killed, 3) if answered else None
    return row | {"seconds_to_answer": wait, "seconds_to_recover": recovered[1]}


def _feed(engine: Any, fed: list[ChatRecord], every: float, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(every)
        try:
            fed.append(ChatRecord(engine, chat(16)))
            return
        except BusyError:
            continue
    raise TimeoutError(f"the engine took no request in {patience} s")


def _lost(each: ChatRecord) -> bool:
    return isinstance(each.last, Failure) and each.last.kind == "replica_lost"


def _await(events: list[threading.Event], patience: float) -> None:
    until = time.monotonic() + patience
    for event in events:
        if not event.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError(f"an answer did not come in {patience} s")


def _recovery(count: Callable[[], float], full: float, start: float, patience: float) -> list[Any]:
    """Start a thread that waits until workers are fewer and then as many again."""
    found: list[Any] = [None, None]

    def wait() -> None:
        fewer = False
        while time.perf_counter() - start < patience:
            now = count()
            fewer = fewer or now < full
            if fewer and now >= full:
                found[1] = round(time.perf_counter() - start, 3)
                return
            time.sleep(0.02)

    found[0] = threading.Thread(target=wait, daemon=True)
    found[0].start()
    return found
