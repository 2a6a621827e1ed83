"""Workers killed under load: which answers end, which go on, and how soon all is as before."""

from __future__ import annotations

import itertools
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

import numpy as np

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.models.loading import embedded_path
from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import (
    BusyError,
    Delta,
    Event,
    Failure,
    Finish,
    Media,
    Message,
    Request,
    SamplingOptions,
)

REPLICAS, LATER, BYSTANDERS, LINGER, EVERY = 2, 8, 4, 1.0, 0.2
_NUMBERS = itertools.count()


def rows(progress: Tick) -> list[Row]:
    """A row per engine and role, with the embedded model on the CPU."""
    from mmfast.serve.engine.processes.engine import process_engine
    from mmfast.serve.ray.engine import RayEngine

    engines: dict[str, tuple[Any, tuple[str, ...]]] = {
        "processes": (process_engine, ("encode", "decode")),
        "ray": (RayEngine, ("encode", "prefill", "decode")),
    }
    found, done = [], 0
    for name, (make, roles) in engines.items():
        with endless() as model:
            given = dict.fromkeys(roles, REPLICAS)
            engine = make(str(model), device="cpu", slots=24, linger=LINGER, **given)
            try:
                for role in roles:
                    found.append({"engine": name, "replicas": REPLICAS, **trial(engine, role)})
                    done += 1
                    progress(f"{name}: {role}", done, 5)
            finally:
                engine.close()
    return found


@contextmanager
def endless() -> Iterator[Path]:
    """The embedded model without its end token, for it says no more than a word."""
    with tempfile.TemporaryDirectory(prefix="mmfast-") as folder:
        path = Path(folder) / "endless"
        path.mkdir()
        for source in embedded_path().iterdir():
            shutil.copyfile(source, path / source.name)
        config = path / "generation_config.json"
        told = json.loads(config.read_text(encoding="utf-8"))
        config.write_text(json.dumps({**told, "eos_token_id": None}), encoding="utf-8")
        yield path


class FaultRecord:
    """One answer.

    Args:
        engine: Answers.
        tokens: Length of the answer.
    """

    def __init__(self, engine: Any, tokens: int) -> None:
        number = next(_NUMBERS)
        pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        media = Media(Shot("image", pixels), f"fault-{os.getpid()}-{number}")
        self.name = f"fault-{number}"
        self.begun, self.over = threading.Event(), threading.Event()
        self.last: Event | None = None
        self.at = 0.0
        message = Message("user", (media, "what is it?"))
        engine.submit(Request(self.name, (message,), SamplingOptions(tokens)), self._hear)

    def _hear(self, event: Event) -> None:
        self.begun.set()
        if not isinstance(event, Delta):
            self.last, self.at = event, time.perf_counter()
            self.over.set()


def trial(
    engine: Any,
    role: str,
    later: int = LATER,
    bystanders: int = BYSTANDERS,
    every: float = EVERY,
    tokens: int = 1500,
    patience: float = 300.0,
) -> Row:
    """Kill one worker of a role while answers run, and look what becomes of all of them.

    Args:
        engine: `process_engine` or `RayEngine`, whose encoding and prefill
            linger, so that there is always a request in them.
        role: Of the worker.
        later: Answers that are asked for after the kill.
        bystanders: Long answers that are being written meanwhile.
        every: Seconds between two requests.
        tokens: Length of a long answer.
        patience: Seconds to wait for anything.
    """
    before = engine.health().gauges[f"workers_{role}"]
    long = [FaultRecord(engine, tokens) for _ in range(bystanders)]
    _await([each.begun for each in long], patience)
    fed: list[FaultRecord] = []
    while not (fed and fed[0].begun.is_set()):  # from now on there is one in every role
        _feed(engine, fed, every, patience)
    begun = {each.name for each in (*long, *fed) if each.begun.is_set() and not each.over.is_set()}
    victim = _victim(engine, role, long)
    mine = {name for name in begun if engine.workers(name).get(role) == victim}
    # What is being written has left encode and prefill behind.
    spared = begun - mine if role == "decode" else begun
    os.kill(victim, signal.SIGKILL)
    killed = time.perf_counter()
    recovered = _watch(lambda: engine.health().gauges[f"workers_{role}"], before, killed, patience)
    asked = len(fed)
    while len(fed) < asked + later:
        _feed(engine, fed, every, patience)
    everyone = [*long, *fed]
    _await([each.over for each in everyone], patience)
    recovered[0].join()
    lost = {each.name for each in everyone if _lost(each)}
    answered = [each.at for each in fed[asked:] if isinstance(each.last, Finish)]
    return {
        "role": role,
        "streams": len(everyone),
        "lost": len(lost),
        "completed": sum(isinstance(each.last, Finish) for each in everyone),
        "wrongly_lost": len(lost & spared),
        "lost_later": len(lost & {each.name for each in fed[asked:]}),
        "other_errors": sum(isinstance(e.last, Failure) and not _lost(e) for e in everyone),
        "seconds_to_answer": round(min(answered) - killed, 3) if answered else None,
        "seconds_to_recover": recovered[1],
    }


def _feed(engine: Any, fed: list[FaultRecord], every: float, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(every)
        try:
            fed.append(FaultRecord(engine, 16))
            return
        except BusyError:
            continue
    raise TimeoutError(f"the engine took no request in {patience} s")


def _victim(engine: Any, role: str, long: list[FaultRecord]) -> int:
    """The worker of a role that had to do with a running answer, or has most to do."""
    known = engine.workers(long[0].name)
    return int(known[role] if role in known else engine.pids(role)[0])


def _lost(each: FaultRecord) -> bool:
    return isinstance(each.last, Failure) and each.last.kind == "replica_lost"


def _await(events: list[threading.Event], patience: float) -> None:
    until = time.monotonic() + patience
    for event in events:
        if not event.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError(f"an answer did not come in {patience} s")


def _watch(count: Callable[[], float], full: float, start: float, patience: float) -> list[Any]:
    """A thread that waits until workers are fewer and then as many again; and the seconds."""
    found: list[Any] = [None, None]

    def look() -> None:
        fewer = False
        while time.perf_counter() - start < patience:
            now = count()
            fewer = fewer or now < full
            if fewer and now >= full:
                found[1] = round(time.perf_counter() - start, 3)
                return
            time.sleep(0.02)

    found[0] = threading.Thread(target=look, daemon=True)
    found[0].start()
    return found
