"""Everything that is sent to do harm, against the real server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmfast.bench.suites.serve.hostile import (
    TIMEOUTS,
    HostileRequest,
    ServerUnderTest,
    chat,
    hostile_requests,
    hostile_row,
    serving,
    simulated_internet,
)

MB = 200  # more than before, all processes of the server together
# A second on a machine of its own, which the benchmark measures; others may use this one.
MS = 15_000.0

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is read from /proc"
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUnderTest]:
    with simulated_internet() as port, serving(port, **TIMEOUTS) as found:
        yield found


@pytest.fixture(scope="module")
def bombs() -> list[HostileRequest]:
    return hostile_requests()


@pytest.mark.slow
def test_every_bomb_is_refused(server: ServerUnderTest, bombs: list[HostileRequest]) -> None:
    assert len(bombs) >= 30
    rows = [hostile_row(server, bomb) for bomb in bombs]
    kept = [r for r in rows if 400 <= r["status"] < 500 and r["ms"] < MS and r["mb"] < MB]
    assert kept == rows
    assert server.alive() == 200


def test_many_bombs_at_once_are_refused_as_one(
    server: ServerUnderTest, bombs: list[HostileRequest]
) -> None:
    wanted = ("PNG of 500 MB", "mp4 of 4.4 GB", "animated GIF of 3.6 GB", "JSON of 4 million lists")
    some = [bomb for bomb in bombs if bomb.name in wanted]
    assert len(some) == len(wanted)
    with server.watched() as watch, ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda bomb: bomb.send(server.port), some * 3))
    assert all(400 <= status < 500 for status in found)
    assert watch.grown < MB * 1e6
    assert server.alive() == 200


def test_what_leads_to_good_media_is_answered(server: ServerUnderTest) -> None:
    """The small internet works: what is refused above is refused by the guard."""
    for path in ("picture", "to?http%3A//good.example/picture", "to?/picture"):
        assert chat(server.port, "image", f"http://good.example/{path}") == 200


def test_memory_that_grows_is_seen() -> None:
    """What the figure is worth: a process that takes 300 MB for a moment is seen to."""
    code = "input(); held = bytearray(b'x') * (300 << 20); del held; print('done'); input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        with ServerUnderTest(0, process.pid).watched() as watch:
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"
        print(file=process.stdin, flush=True)
    assert 250e6 < watch.grown < 400e6
