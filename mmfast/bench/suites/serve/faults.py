"""Benchmark of killed workers: a replica of every role on Ray, and of a server."""

from __future__ import annotations

import json
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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.suites.serve.chats import TIMEOUT, ChatRecord, chat, url_of
from mmfast.models.loading import embedded_path
from mmfast.serve.engine.base import BusyError, Failure, Finish

REPLICAS, LATER, BYSTANDERS, LINGER, EVERY = 2, 8, 4, 1.0, 0.2
KILLS = 3  # of a replica of `mmfast serve`
COUNTS = "streams lost wrongly_lost lost_later completed other_errors other_text asked_again"


@benchmark("serve", "faults")
def faults(tick: Tick) -> list[Row]:
    """Kill a replica of every role on Ray, with the embedded model on the CPU."""
    from mmfast.serve.ray.engine import RayEngine

    parts: dict[str, Any] = dict.fromkeys(("encode", "prefill", "decode"), REPLICAS)
    found: list[Row] = []
    with endless_model() as model:
        for counts in (parts, {"replicas": REPLICAS}):
            options: dict[str, Any] = {"device": "cpu", "slots": 24, "linger": LINGER, **counts}
            with closing(RayEngine(str(model), **options)) as engine:
                for role in engine.replicas:
                    found.append({"engine": "ray", "replicas": REPLICAS, **trial(engine, role)})
                    tick(f"ray: {role}", len(found), len(parts) + 2)
        with ray_server(model, REPLICAS) as url:
            found.append({"engine": "`mmfast serve`", **server_row(url)})
            tick("mmfast serve: answer", len(parts) + 2, len(parts) + 2)
    return found


def server_row(url: str) -> Row:
    """Sum up a few kills of a server's replicas; of seconds the longest."""
    trials = [server_trial(url) for _ in range(KILLS)]
    row = {name: max(each[name] for each in trials) for name in trials[0]} | {"kills": KILLS}
    return row | {name: sum(each[name] for each in trials) for name in COUNTS.split()}


@contextmanager
def ray_server(model: Path, replicas: int, *options: str) -> Iterator[str]:
    """Start `mmfast serve --engine ray` with copies of the whole engine; give its URL."""
    command = [sys.executable, "-m", "mmfast", "serve", "--engine", "ray", "--port", "0"]
    command += ["--model", str(model), "--replicas", str(replicas), "--device", "cpu"]
    command += ["--name", "endless", "--no-voice", "--no-demo", *options]
    pipes: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}  # Ray writes to both
    with subprocess.Popen(command, text=True, **pipes) as process:
        url = url_of(process, "ready: ").removesuffix("/v1")
        log = threading.Thread(target=list, args=(process.stderr,), daemon=True)
        log.start()
        try:
            yield url
        finally:
            process.terminate()
            log.join(TIMEOUT)


class StreamedChat(threading.Thread):
    """A chat with a server, as a stream read by a thread of its own."""

    def __init__(self, url: str, question: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self.ask, self.begun, self.text, self.error = (question, tokens), threading.Event(), "", ""
        self.process, self.again, self.ended, self.at = 0, 0, False, 0.0
        document: Row = {"model": "endless", "stream": True, "temperature": 0, "max_tokens": tokens}
        document["messages"] = [{"role": "user", "content": question}]
        data = json.dumps(document).encode()
        self._request = urllib.request.Request(f"{url}/v1/chat/completions", data)
        self._request.add_header("Content-Type", "application/json")
        self.asked = time.perf_counter()
        self.start()

    def run(self) -> None:
        """Read the stream to its end."""
        try:
            with urllib.request.urlopen(self._request, timeout=TIMEOUT) as reply:
                for line in reply:
                    self._take(line.decode().removeprefix("data: ").strip())
        except OSError as error:
            self.error = str(getattr(error, "read", error.__repr__)())
        self.at = time.perf_counter()

    def over(self) -> StreamedChat:
        """Wait for the end."""
        self.join(TIMEOUT)
        return self

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.ended = True
        elif data.startswith("{"):
            document = json.loads(data)
            if "error" in document:
                self.error = data
            for choice in document.get("choices", ()):
                self.text += choice["delta"].get("content") or ""
            if trace := document.get("mmfast"):
                self.process, self.again = trace["workers"]["answer"], trace["lost_replicas"]
            if self.text:
                self.begun.set()


def server_trial(
    url: str, bystanders: int = 6, later: int = 2 * LATER, every: float = EVERY, tokens: int = 600
) -> Row:
    """Kill one of two replicas of a server under streams that come at a fixed rate."""
    asks = [(f"what is {name}?", count) for name in "ab" for count in (tokens, 16)]
    alone = {ask: StreamedChat(url, *ask).over().text for ask in asks}
    full = workers_of(url)
    burst = [each.over() for each in [StreamedChat(url, *asks[1]) for _ in range(8)]]
    victim = burst[0].process
    chats = [StreamedChat(url, *asks[number % 2 * 2]) for number in range(bystanders)]
    _await([each.begun for each in chats], TIMEOUT)
    for number in range(later + LATER):
        if number == LATER:
            on_it = [each for each in chats if each.begun.is_set() and each.is_alive()]
            os.kill(victim, signal.SIGKILL)
            killed, asked = time.perf_counter(), len(chats)
            recovered = _recovery(lambda: workers_of(url), full, killed, TIMEOUT)
        chats.append(StreamedChat(url, *asks[number % 2 * 2 + 1]))
        time.sleep(every)
    lost = [each for each in chats if "replica_lost" in each.over().error]
    recovered[0].join()
    ended, after = [each for each in chats if each.ended], chats[asked:]
    row: Row = {"role": "answer", "replicas": int(full), "streams": len(chats), "lost": len(lost)}
    row["wrongly_lost"] = sum(f"process {victim})" not in e.error or e not in on_it for e in lost)
    row |= {"lost_later": sum(each in lost for each in after), "completed": len(ended)}
    row["other_errors"] = len(chats) - len(ended) - len(lost)
    row["other_text"] = sum(each.text != alone[each.ask] for each in ended)
    row |= {
        "asked_again": sum(e.again > 0 for e in ended),
        "burst": len({e.process for e in burst}),
    }
    row["seconds_to_answer"] = round(min(e.at for e in after if e.ended) - killed, 3)
    row["slowest_later_s"] = round(max(each.at - each.asked for each in after), 3)
    return row | {"seconds_to_recover": recovered[1]}


def workers_of(url: str) -> float:
    """Return the number of whole engines that a server reports."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT) as reply:
        found = re.search(r'name="workers_answer"\} ([\d.]+)', reply.read().decode())
    return float(found[1]) if found else 0.0


@contextmanager
def endless_model() -> Iterator[Path]:
    """Copy the embedded model without its end token: its answers are one word."""
    with tempfile.TemporaryDirectory(prefix="mmfast-") as folder:
        path = Path(folder) / "endless"
        shutil.copytree(embedded_path("tiny-video"), path)
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
