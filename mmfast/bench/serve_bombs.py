"""What it takes to refuse what is sent to do harm: status, time, memory of the whole server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mmfast.bench import bombs
from mmfast.bench.bomb_clients import Bomb, all_bombs, chat, elsewhere
from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.serve.guard.data_url import encode

# How long the server is patient here; by default 10 and 30 seconds.
PATIENCE = {"header_seconds": 1.0, "body_seconds": 3.0}
_ROOT = Path(__file__).resolve().parents[2]


def rows(progress: Tick) -> list[Row]:
    """A row for each bomb."""
    found = all_bombs()
    out = []
    with elsewhere() as port, serving(port, **PATIENCE) as server:
        for number, bomb in enumerate(found):
            out.append(measure(server, bomb))
            progress(bomb.name, number + 1, len(found))
        if server.alive() != 200:
            raise RuntimeError("the server is not what it was")
    return out


def measure(server: Bombed, bomb: Bomb) -> Row:
    """Fire one."""
    with server.watched() as watch:
        start = time.perf_counter()
        status = bomb.fire(server.port)
        ms = (time.perf_counter() - start) * 1e3
    allowed = 1e3 * PATIENCE.get(bomb.waits, 0.0)
    return {
        "job": bomb.name,
        "sent_bytes": bomb.sent,
        "status": status,
        "ms": round(ms - allowed, 1),
        "allowed_ms": allowed,
        "cpu_ms": round(1e3 * watch.worked),
        "mb": round(watch.grown / 1e6, 1),
        "load": round(os.getloadavg()[0] / (os.cpu_count() or 1), 1),  # others' work, too
        "device": "cpu",
    }


@dataclass(frozen=True)
class Bombed:
    """A server in a process of its own."""

    port: int
    pid: int

    def alive(self) -> int:
        """The status of a harmless request about a picture."""
        return chat(self.port, "image", encode(bombs.picture(), "image/png"))

    @contextlib.contextmanager
    def watched(self) -> Iterator[MemoryWatch]:
        """Measure the memory of the server and all its processes."""
        watch = MemoryWatch(self.pid)
        thread = Thread(target=watch.run)
        thread.start()
        try:
            yield watch
        finally:
            watch.stop.set()
            thread.join()


class MemoryWatch:
    """How much more memory a process and all below it have than at first, and what they worked.

    Shared pages count once (PSS), sampled; of the process itself also its own peak.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid, self.stop = pid, Event()
        with contextlib.suppress(OSError):  # the peak from here on
            Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
        self._first, self._first_peak = self._tree(), _status_of(pid, "VmHWM:")
        self._most = 0
        self._clocks = {each: _seconds(each) for each in _below(pid)}
        self._before = sum(self._clocks.values())

    def run(self) -> None:
        """Sample until stopped."""
        while not self.stop.wait(0.002):
            self._most = max(self._most, self._tree() - self._first)
            self._clocks |= {each: _seconds(each) for each in _below(self._pid)}

    @property
    def worked(self) -> float:
        """Seconds of processor time, of forks until they were last seen."""
        self._clocks[self._pid] = _seconds(self._pid)
        return sum(self._clocks.values()) - self._before

    @property
    def grown(self) -> int:
        """Bytes."""
        return max(self._most, _status_of(self._pid, "VmHWM:") - self._first_peak, 0)

    def _tree(self) -> int:
        return sum(map(_pss, _below(self._pid)))


def _below(pid: int) -> list[int]:
    """A process and its children, and theirs."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children = (task / "children").read_text(encoding="ascii").split()
            found += [each for child in children for each in _below(int(child))]
    return found


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _seconds(pid: int) -> float:
    """Processor time so far."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _status_of(pid: int, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) << 10
    return 0


@contextlib.contextmanager
def serving(internet: int, **options: Any) -> Iterator[Bombed]:
    """Run the real server, warm, behind it an engine without a model.

    Args:
        internet: Port that all other hosts are.
        options: Of `ServerConfig`.
    """
    hosts = {"remote_hosts": ["*"], **options}
    command = [sys.executable, "-m", "mmfast.bench.bomb_server", str(internet), json.dumps(hosts)]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = Bombed(int(process.stdout.readline()), process.pid)
            clip = encode(bombs.picture("GIF"), "image/gif")
            for kind in ("image", "video"):  # so that what is loaded once is loaded
                chat(found.port, kind, clip)
            yield found
        finally:
            process.terminate()
