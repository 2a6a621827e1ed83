"""Servers on this machine for tests, an engine that does as told, and a voice that hums."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from mmfast.core.errors import SpecError
from mmfast.core.speech import Sound
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Event, Failure, Health, Request

MODEL = "mmfast-tiny-scenes"
ROOT = Path(__file__).resolve().parents[3]
CHAT = "/v1/chat/completions"


class Told:
    """An engine that answers with the events it is given.

    Args:
        say: Called with the request and what takes events, in a thread.
    """

    def __init__(self, say: Callable[[Request, Callable[[Event], None]], None]) -> None:
        self.model, self._say = MODEL, say
        self.requests: list[Request] = []
        self.cancelled, self.closed = threading.Event(), threading.Event()

    def submit(self, request: Request, emit: Callable[[Event], None]) -> None:
        self.requests.append(request)
        threading.Thread(target=self._say, args=(request, emit), daemon=True).start()

    def cancel(self, request_id: str) -> None:
        self.cancelled.set()

    def health(self) -> Health:
        return Health(True, running=1, waiting=2, gauges={"kv_bytes": 5.0})

    def close(self) -> None:
        self.closed.set()


def saying(*events: Event) -> Told:
    """An engine with the same answer to everything."""

    def say(_: Request, emit: Callable[[Event], None]) -> None:
        for event in events:
            emit(event)

    return Told(say)


class Hum:
    """Speaks in hums of a tenth of a second a word, and hears what it is told."""

    sample_rate = 16_000
    voices = ("low", "high")

    def __init__(self, heard: str = "which way does the red circle move") -> None:
        self.heard, self.said, self.options = heard, "", dict[str, Any]()
        self.go_on, self.pieces = threading.Event(), 0
        self.go_on.set()

    def speak(self, text: str, **options: Any) -> Iterator[Sound]:
        if options.get("rate", 165) > 225:
            raise SpecError(f"rate={options['rate']} is out of reach; choose one of 140, 165, 195")
        self.said, self.options = text, options
        return self._hum(text)

    def _hum(self, text: str) -> Iterator[Sound]:
        time = torch.arange(1600) / 16_000
        for word in text.split():
            assert self.go_on.wait(30)
            self.pieces += 1
            yield Sound(0.4 * torch.sin(2 * math.pi * 400 * time), 16_000, text=word)

    def transcribe(self, pcm: torch.Tensor, rate: int = 16_000) -> str:
        return self.heard if float(pcm.abs().max()) > 0.01 else ""


def app_of(executor: Any, voice: Any = None, **options: Any) -> Any:
    from mmfast.serve.http.app import create_app

    options.setdefault("demo", False)
    options.setdefault("voice", voice is not None)
    return create_app(ServerConfig(**options), executor, voice)


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@contextmanager
def running(app: Any, config: ServerConfig | None = None) -> Iterator[str]:
    """The server on a free port; gives its URL."""
    from mmfast.serve.http.run import Server, bind, url_of

    config = config or app.state.service.config
    listening = bind("127.0.0.1", 0)
    listening.listen(256)
    server = Server(app, config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield url_of(listening)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()
        assert not thread.is_alive(), "the server does not stop"


def started(process: subprocess.Popen[str]) -> str:
    """Wait until `mmfast serve` is ready and return its address; its log may be read on."""
    lines: list[str] = []
    for line in process.stderr or ():
        lines.append(line)
        if line.startswith("  curl"):
            break
    url = re.search(r"http://127.0.0.1:\d+", "".join(lines))
    assert url and lines[-1].startswith("  curl"), lines
    return url[0]


def python_with(variable: str, packages: Sequence[str], folder: Path) -> Path:
    """The interpreter of the environment that a variable names, or of one made of packages."""
    if named := os.environ.get(variable):
        found = Path(named) / "bin" / "python"
        if not found.exists():
            pytest.fail(f"{variable}={named} has no bin/python")
        return found
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    for tool in (["pip", "install", "-q", "uv"], ["uv", "pip", "install", "-q", *packages]):
        call = [found, "-m", *tool]
        call[5:5] = ["--python", str(found)] * (tool[0] == "uv")
        done = subprocess.run(call, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-200:]}")
    return found


def post(app: Any, document: Any, path: str = CHAT, **options: Any) -> Any:
    async def go() -> Any:
        async with client_of(app) as client:
            return await client.post(path, json=document, **options)

    return asyncio.run(go())


def get(app: Any, path: str) -> Any:
    return request(app, "GET", path)


def request(app: Any, method: str, path: str, **options: Any) -> Any:
    async def go() -> Any:
        async with client_of(app) as client:
            return await client.request(method, path, **options)

    return asyncio.run(go())


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`mmfast serve` as a process of its own, and its address once it is ready."""
    command = [sys.executable, "-m", "mmfast", "serve", "--port", "0", "--no-demo", "--no-voice"]
    process = subprocess.Popen(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MMFAST_DEVICE": "cpu", **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, started(process)
    finally:
        process.terminate()
        try:
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()  # else it stays behind the failed test
            raise


def user(*content: Any) -> list[dict[str, Any]]:
    given = content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)
    return [{"role": "user", "content": given}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(size: tuple[int, int] = (48, 32), colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def image_part(data: bytes | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data or png(), "image/png")}}


def sound_part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(data).decode(), "format": kind},
    }


def wav(seconds: float = 0.5, loud: float = 0.3) -> bytes:
    from mmfast.frontends.audio.wav import write_wav

    file, time = io.BytesIO(), torch.arange(int(16_000 * seconds)) / 16_000
    write_wav(file, loud * torch.sin(2 * math.pi * 300 * time), 16_000)
    return file.getvalue()


def events_of(body: str) -> list[Any]:
    """Documents of a stream; `[DONE]` as text, comments left out."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
    return found


def lost() -> Failure:
    return Failure("the decode worker was lost", 503, "replica_lost")
