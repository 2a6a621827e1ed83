"""How long a fresh `mmfast serve` takes to its first answer."""

from __future__ import annotations

import base64
import json
import math
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError

ROUNDS, WAIT = 5, 120.0  # servers started, seconds until one is given up
ASKED = {
    "text": "Hello?",
    "clip": "Which way does the red circle move?",
}


def rows(progress: Tick, rounds: int = ROUNDS) -> list[Row]:
    """A row per first question: seconds from the start of the process.

    `listening_s` is when a client can connect, `answer_s` when the answer to what it asked at
    that moment is there; `cpu_s` is the server's processor time until then, which is what a
    machine without other work would wait for.
    """
    found: dict[str, list[Row]] = {name: [] for name in ASKED}
    for number in range(rounds):
        for name in ASKED:
            found[name].append(_start(name))
        progress("starts", number + 1, rounds)
    return [{"job": f"first {name}", **_summed(each)} for name, each in found.items()]


def _summed(starts: list[Row]) -> Row:
    middle = {key: statistics.median(each[key] for each in starts) for key in starts[0]}
    return {
        **{key: round(value, 3) for key, value in middle.items()},
        "worst_s": round(max(each["answer_s"] for each in starts), 3),
        "n": len(starts),
        "threads": os.cpu_count(),
        "model": "tiny-video",
        "device": "cpu",
    }


def _start(name: str) -> Row:
    """Start a server, ask at once, stop it."""
    command = [sys.executable, "-m", "mmfast", "serve", "--port", "0"]
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _url(process)
            listening = time.perf_counter() - start
            _ask(url, name)
            answer = time.perf_counter() - start
            return {"listening_s": listening, "answer_s": answer, "cpu_s": _cpu(process.pid)}
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    """From the line in which the server says where it listens."""
    said = ""
    for line in process.stderr or ():
        said += line
        if "listening on " in line:
            return line.partition("listening on ")[2].split()[0]
    raise MmfastError(f"the server did not start: {said.strip()[-200:]}")


def _ask(url: str, name: str) -> None:
    content: list[dict[str, Any]] = [{"type": "text", "text": ASKED[name]}]
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
    with urllib.request.urlopen(request, timeout=WAIT) as reply:
        json.load(reply)["choices"][0]["message"]["content"]


def _cpu(pid: int) -> float:
    """Processor seconds of a process so far; NaN where the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
