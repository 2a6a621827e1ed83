"""Benchmarks of the server: chats at once, fairness, the start, `mmfast batch`, killed workers."""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
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
from mmfast.models.loading import embedded_path, load
from mmfast.models.prompt import Shot
from mmfast.serve.batch.job import BatchJob
from mmfast.serve.batch.run import BatchOptions, run_batch
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
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.tiny.video.clips import encode
from mmfast.tiny.video.scene import CLIPS, draw, make_scene

_NUMBERS = itertools.count()


def engine(**options: Any) -> Scheduler:
    """Return the embedded model on the CPU without its end token: its answers are one word."""
    model, processor = load(None, "cpu", "float32")
    model.generation_config.eos_token_id = None
    return Scheduler((model, processor), name="tiny-video", **options)


def chat(tokens: int, text: str = "what is it?", image: bool = True, tenant: str = "") -> Request:
    """Return a request about a new image, or without one."""
    number = next(_NUMBERS)
    parts: list[str | Media] = [text]
    if image:
        pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        parts.insert(0, Media(Shot("image", pixels), f"image-{os.getpid()}-{number}"))
    message = Message("user", tuple(parts))
    return Request(f"chat-{number}", (message,), SamplingOptions(max_tokens=tokens), tenant=tenant)


class ChatRecord:
    """Submits a request; records its last event and the time of that."""

    def __init__(self, engine: Any, request: Request) -> None:
        self.name, self.begun, self.over = request.id, threading.Event(), threading.Event()
        self.last: Event | None = None
        self.at = 0.0
        engine.submit(request, self._receive)

    def _receive(self, event: Event) -> None:
        self.begun.set()
        if not isinstance(event, Delta):
            self.last, self.at = event, time.perf_counter()
            self.over.set()


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


CHATS, MANY = 16, 64


@benchmark("serve", "load")
def load_rows(tick: Tick, rounds: int = 5, tokens: int = 32) -> list[Row]:
    """Compare chats at once with one at a time, and measure the longest gap and an overload."""
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
        overload = _overload(scheduler, tokens, MANY)
    shared = {"chats": CHATS, "tokens": tokens, "n": rounds, "model": scheduler.model}
    shared |= {"threads": torch.get_num_threads(), "device": "cpu"}
    gap_row = _gap_row(*zip(*gaps, strict=True))
    return [
        {"job": "one at a time", **shared, **_speed(one, one, tokens)},
        {"job": f"{CHATS} at once", **shared, **_speed(one, many, tokens), **gap_row},
        {"job": f"{MANY} at once", **shared, "chats": MANY, **overload},
    ]


def _answer(scheduler: Scheduler, tokens: int, count: int, together: bool) -> None:
    records = (ChatRecord(scheduler, chat(tokens)) for _ in range(count))
    for record in list(records) if together else records:
        record.over.wait()


def _overload(scheduler: Scheduler, tokens: int, count: int) -> Row:
    records, busy, retry = [], 0, 0.0
    for _ in range(count):
        try:
            records.append(ChatRecord(scheduler, chat(tokens)))
        except BusyError as error:
            busy, retry = busy + 1, error.retry_after
    ended = sum(record.over.wait() and isinstance(record.last, Finish) for record in records)
    return {"answered": ended, "busy": busy, "lost": count - ended - busy, "retry_after_s": retry}


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
                ChatRecord(chunked, chat(_ANSWER, image=False)).over.wait()
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
    running = ChatRecord(scheduler, chat(_ANSWER, image=False))
    running.begun.wait()
    ChatRecord(scheduler, chat(2, " ".join(["red"] * words), image=False)).over.wait()
    running.over.wait()
    return gap_and_chunk(scheduler)


def _turns(scheduler: Scheduler) -> Row:
    reset(scheduler)
    tenants = ["many"] * FROM_MANY + ["few"] * FROM_FEW
    records = [ChatRecord(scheduler, chat(8, tenant=tenant)) for tenant in tenants]
    for record in records:
        record.over.wait()
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
    with tempfile.TemporaryDirectory(prefix="mmfast-") as where:
        folder = Path(where) / "clips"
        folder.mkdir()
        for number in range(count):
            clip = encode(draw(make_scene(CLIPS, 0, number)).frames)
            (folder / f"{number:04d}.mp4").write_bytes(clip)
        found: dict[tuple[str, int], list[Row]] = {way: [] for way in engines}
        for number in range(rounds):
            for way in engines if number % 2 == 0 else reversed(engines):
                found[way].append(_run(folder, Path(where) / "out.parquet", *way))
            tick("rounds", number + 1, rounds)
    middle = {w: sorted(f, key=lambda r: r["clips_per_s"])[len(f) // 2] for w, f in found.items()}
    base = middle[engines[0]]["clips_per_s"]
    shared = {"clips": count, "frames": 8, "n": rounds, "cores": os.cpu_count(), "device": "cpu"}
    return [
        {"job": f"{engine}, {workers} worker{'s' * (workers > 1)}", "engine": engine}
        | {"workers": workers, **row, "speedup": round(row["clips_per_s"] / base, 3), **shared}
        for (engine, workers), row in middle.items()
    ]


def _run(folder: Path, out: Path, engine: str, workers: int) -> Row:
    start, stamps = time.perf_counter(), [(0.0, 0)]

    def tick(done: int, total: int) -> None:
        if done > stamps[-1][1]:
            stamps.append((time.perf_counter() - start, done))

    job = BatchJob(folder, (QUESTION,), device="cpu")
    run_batch(job, out, BatchOptions(engine, workers), tick=tick)
    out.unlink()
    half = next(stamp for stamp in stamps if stamp[1] >= stamps[-1][1] / 2)
    seconds, clips = stamps[-1][0] - half[0], stamps[-1][1] - half[1]
    row = {"clips_per_s": clips / seconds, "start_s": stamps[1][0]}
    row["seconds"] = time.perf_counter() - start
    return {name: round(value, 3) for name, value in row.items()}


_TIMEOUT = 300.0  # seconds to wait for an answer
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
            url = _url(process)
            listening = time.perf_counter() - start
            _ask(url, name)
            answer, cpu = time.perf_counter() - start, process_seconds(process.pid)
            return {"listening_s": listening, "answer_s": answer, "cpu_s": cpu}
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()


def _url(process: subprocess.Popen[str], mark: str = "listening on ") -> str:
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
    document = {"model": "mmfast-tiny-video", "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(document).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as reply:
        json.load(reply)["choices"][0]["message"]["content"]


REPLICAS, LATER, BYSTANDERS, LINGER, EVERY = 2, 8, 4, 1.0, 0.2
KILLS = 3  # of a replica of `mmfast serve`
COUNTS = ["streams", "lost", "wrongly_lost", "lost_later", "completed", "other_errors"]
COUNTS += ["other_text", "asked_again"]


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
                    tick(f"ray: {role}", len(found), len(parts) + 2)
            finally:
                engine.close()
        with ray_server(model, REPLICAS) as url:
            found.append({"engine": "`mmfast serve`", **server_row(url)})
            tick("mmfast serve: answer", len(parts) + 2, len(parts) + 2)
    return found


def server_row(url: str) -> Row:
    """Sum up a few kills of a server's replicas; of seconds the longest."""
    trials = [server_trial(url) for _ in range(KILLS)]
    row = {name: max(each[name] for each in trials) for name in trials[0]}
    return {"kills": KILLS, **row} | {n: sum(each[n] for each in trials) for n in COUNTS}


@contextmanager
def ray_server(model: Path, replicas: int, *options: str) -> Iterator[str]:
    """Start `mmfast serve --engine ray` with copies of the whole engine; give its URL."""
    command = [sys.executable, "-m", "mmfast", "serve", "--engine", "ray", "--port", "0"]
    command += ["--model", str(model), "--replicas", str(replicas), "--device", "cpu"]
    command += ["--name", "endless", "--no-voice", "--no-demo", *options]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}  # Ray writes to both
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            url = _url(process, "ready: ").removesuffix("/v1")
            threading.Thread(target=list, args=(process.stderr,), daemon=True).start()
            yield url
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_TIMEOUT)
            process.kill()


class StreamedChat(threading.Thread):
    """A chat with a server, as a stream read by a thread of its own."""

    def __init__(self, url: str, question: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.ask, self.begun, self.text, self.error = (question, tokens), threading.Event(), "", ""
        self.process, self.again, self.ended, self.at = 0, 0, False, 0.0
        self.retry_after: str | None = None
        message = {"role": "user", "content": question}
        document = {"model": "endless", "messages": [message], "stream": True, "temperature": 0}
        data = json.dumps({**document, "max_tokens": tokens}).encode()
        kind = {"Content-Type": "application/json"}
        self._request = urllib.request.Request(f"{url}/v1/chat/completions", data, kind)
        self.asked = time.perf_counter()
        self.start()

    def run(self) -> None:
        """Read the stream to its end."""
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT) as reply:
                for line in reply:
                    self._take(line.decode().removeprefix("data: ").strip())
        except urllib.error.HTTPError as error:
            self.error, self.retry_after = error.read().decode(), error.headers["Retry-After"]
        except OSError as error:
            self.error = f"{type(error).__name__}: {error}"
        self.at = time.perf_counter()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.ended = True
        elif data.startswith("{"):
            document = json.loads(data)
            if "error" in document:
                self.error = data
            for choice in document.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
            trace = document.get("mmfast")
            if trace:
                self.process, self.again = trace["workers"]["answer"], trace["lost_replicas"]
            if self.text:
                self.begun.set()


def server_trial(
    url: str, bystanders: int = 6, later: int = 2 * LATER, every: float = EVERY, tokens: int = 600
) -> Row:
    """Kill one of two replicas of a server under streams that come at a fixed rate."""
    asks = [(f"what is {name}?", count) for name in "ab" for count in (tokens, 16)]
    alone = {ask: _over(StreamedChat(url, *ask)).text for ask in asks}
    full = workers_of(url)
    burst = [_over(each) for each in [StreamedChat(url, *asks[1]) for _ in range(8)]]
    victim = burst[0].process
    chats = [StreamedChat(url, *asks[number % 2 * 2]) for number in range(bystanders)]
    _await([each.begun for each in chats], _TIMEOUT)
    for number in range(later + LATER):
        if number == LATER:
            on_it = [each for each in chats if each.begun.is_set() and each.is_alive()]
            os.kill(victim, signal.SIGKILL)
            killed, asked = time.perf_counter(), len(chats)
            recovered = _recovery(lambda: workers_of(url), full, killed, _TIMEOUT)
        chats.append(StreamedChat(url, *asks[number % 2 * 2 + 1]))
        time.sleep(every)
    for each in chats:
        _over(each)
    recovered[0].join()
    lost = [each for each in chats if "replica_lost" in each.error]
    ended, after = [each for each in chats if each.ended], chats[asked:]
    row: Row = {"role": "answer", "replicas": int(full), "streams": len(chats), "lost": len(lost)}
    row["wrongly_lost"] = sum(f"process {victim})" not in e.error or e not in on_it for e in lost)
    row |= {"lost_later": sum(each in lost for each in after), "completed": len(ended)}
    row["other_errors"] = len(chats) - len(ended) - len(lost)
    row["other_text"] = sum(each.text != alone[each.ask] for each in ended)
    row |= {"asked_again": sum(e.again > 0 for e in ended), "burst": len({*map(_process, burst)})}
    row["seconds_to_answer"] = round(min(e.at for e in after if e.ended) - killed, 3)
    row["slowest_later_s"] = round(max(each.at - each.asked for each in after), 3)
    return row | {"seconds_to_recover": recovered[1]}


def _over(each: StreamedChat) -> StreamedChat:
    each.join(_TIMEOUT)
    return each


def _process(each: StreamedChat) -> int:
    return each.process


def workers_of(url: str) -> float:
    """Return the number of whole engines that a server reports."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT) as reply:
        found = re.search(r'name="workers_answer"\} ([\d.]+)', reply.read().decode())
    return float(found[1]) if found else 0.0


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
    row["asked_again"] = sum(
        isinstance(e.last, Finish) and e.last.trace["lost_replicas"] > 0 for e in records
    )
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
