"""The server under those who ask too much: bounds, errors, keys, and signals of what it starts."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serve_tools import CHAT, MODEL, Hum, app_of, client_of, running, saying, sound_part, user, wav

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Delta, Failure, Finish
from mmfast.serve.guard import fetch as fetching
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.fetch import fetch
from mmfast.serve.http import schema, service
from mmfast.serve.http.events import failed

ANSWER = (Delta("left"), Finish("stop", 3, 1))


def asked(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": user("which way?"), **more}


async def posted(app: Any, *bodies: Any, **headers: str) -> list[Any]:
    async with client_of(app) as client:
        given = [b if isinstance(b, bytes) else json.dumps(b).encode() for b in bodies]
        heads = {"content-type": "application/json", **headers}
        return await asyncio.gather(*(client.post(CHAT, content=b, headers=heads) for b in given))


# --- large bodies -------------------------------------------------------------------------------


def test_a_large_body_is_parsed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    large = schema.large

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return large(body)

    monkeypatch.setattr(schema, "large", watched)
    app = app_of(saying(*ANSWER), max_text=10**6)
    long = asked(messages=user("x" * schema.LARGE))
    broken = b'{"model": "' + b"x" * schema.LARGE
    small, big, wrong = asyncio.run(posted(app, asked(), long, broken))
    assert (small.status_code, big.status_code, wrong.status_code) == (200, 200, 400)
    assert "no JSON" in wrong.json()["error"]["message"]
    assert len(threads) == 2 and threading.main_thread().name not in threads
    deep = b'{"model": ' + b"[" * 40 + b" " * schema.LARGE
    (reply,) = asyncio.run(posted(app, deep))
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "too_deep"


def test_a_large_body_does_not_grow() -> None:
    """One letter that needs four bytes makes none of all the others."""
    body = ('{"a": "😀", "data": "' + "A" * (8 << 20) + '"}').encode()
    tracemalloc.start()
    try:
        found = schema.large(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == json.loads(body) and peak < 3 * len(body)


# --- who waits ----------------------------------------------------------------------------------


def test_recordings_that_wait_for_a_voice_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HEARD", 3)
    go = threading.Event()

    class Slow(Hum):
        def transcribe(self, pcm: Any, rate: int = 16_000) -> str:
            assert go.wait(30)
            return self.heard

    app = app_of(saying(*ANSWER), Slow())
    body = asked(messages=user(sound_part(wav())))

    async def main() -> list[Any]:
        replies = asyncio.ensure_future(posted(app, *[body] * 8))
        until = time.monotonic() + 30
        while app.state.service._listening < 3:
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert app.state.service._listening == 3
        go.set()
        return await replies

    replies = asyncio.run(main())
    assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 5
    busy = next(reply for reply in replies if reply.status_code == 429)
    assert busy.json()["error"]["code"] == "recordings" and int(busy.headers["retry-after"]) >= 5
    assert app.state.service._listening == 0


def test_names_that_nobody_resolves_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in threads of their own, and not for long."""
    go, names = threading.Event(), set[str]()

    def never(host: str, *_: Any, **__: Any) -> Any:
        names.add(threading.current_thread().name.rpartition("_")[0])
        go.wait(30)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(fetching, "_LOOK_UP", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    config = ServerConfig(remote_hosts=("*",), remote_seconds=20.0)

    async def main() -> list[str]:
        tasks = [fetch(f"https://n{i}.example.com/a.png", config) for i in range(12)]
        found = asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 5.0) == "free"
        return [e.code for e in await found if isinstance(e, ApiError) and e.code]

    start = time.monotonic()
    try:
        assert asyncio.run(main()) == ["fetch_timeout"] * 12
        assert names == {"mmfast-names"} and time.monotonic() - start < 15
    finally:
        go.set()


# --- what is said of it -------------------------------------------------------------------------


def test_an_unforeseen_error_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = saying(*ANSWER)

    def broken(*_: Any) -> None:
        raise RuntimeError("a path: /etc/secret")

    engine.submit = broken  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "mmfast"):
        (reply,) = asyncio.run(posted(app_of(engine), asked()))
    assert reply.status_code == 500 and "secret" not in reply.text
    found = [r for r in caplog.records if r.name == "mmfast.serve" and r.levelno >= logging.ERROR]
    assert len(found) == 1 and reply.headers["x-request-id"] in found[0].getMessage()


def test_an_error_of_the_guard_itself_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the server that runs the application, to which it is raised."""
    import httpx

    from mmfast.serve.guard.shield import Shield

    def broken(*_: Any) -> None:
        raise RuntimeError("a path: /etc/secret")

    monkeypatch.setattr(Shield, "_admit", broken)
    with caplog.at_level(logging.ERROR), running(app_of(saying(*ANSWER))) as url:
        for name in ("mmfast", "uvicorn", "uvicorn.error"):
            monkeypatch.setattr(logging.getLogger(name), "propagate", True)
        reply = httpx.get(f"{url}/v1/models")
    assert reply.status_code == 500 and "secret" not in reply.text
    traces = [r for r in caplog.records if r.exc_info and "secret" in str(r.exc_info[1])]
    assert len(traces) == 1


def test_a_session_without_a_voice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from realtime_tools import HumService, Wire, fast

    async def main() -> None:
        service = HumService()
        service._load = lambda: 1 // 0  # type: ignore[assignment,return-value]
        wire = Wire(service)
        await wire.task
        assert wire.messages[0]["status"] == 503

    with caplog.at_level(logging.ERROR, "mmfast"):
        fast(main())
    assert len([r for r in caplog.records if r.exc_info]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_the_models_error_and_a_full_machine_have_their_own(stream: bool) -> None:
    def of(failure: Failure) -> Any:
        return asyncio.run(posted(app_of(saying(failure)), asked(stream=stream)))[0]

    reply = of(Failure("the model failed on this request", 500, "model_error"))
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "model_error")
    reply = of(Failure("shared memory is full", 503, "busy"))
    assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
    assert failed(Failure("x", 503, "replica_lost")).status == 503


@pytest.mark.parametrize(
    "key", ["sha256:zz", "sha256:", "sha256:" + "a" * 63, "sha256:" + "g" * 64]
)
def test_a_hash_that_is_none_is_refused_at_once(key: str) -> None:
    with pytest.raises(MmfastError, match="64 hexadecimal digits") as error:
        ServerConfig(api_keys=(key,))
    assert "\n" not in str(error.value) and (len(key) == 7 or key not in str(error.value))


def test_a_hash_of_a_key_is_taken() -> None:
    import hashlib

    from mmfast.serve.guard.caller import Keys

    config = ServerConfig(api_keys=("sha256:" + hashlib.sha256(b"key").hexdigest().upper(),))
    assert Keys(config.api_keys).owner(b"key") and not Keys(config.api_keys).owner(b"kex")


def test_users_of_a_key_are_apart_in_results_and_together_in_turns() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine, api_keys=("one", "two"))
    for key, name in (("one", "ann"), ("one", "bob"), ("two", "ann")):
        asyncio.run(posted(app, asked(user=name), authorization=f"Bearer {key}"))
    ann, bob, other = engine.requests
    assert len({ann.tenant, bob.tenant, other.tenant}) == 3
    assert ann.payer == bob.payer != other.payer and "ann" not in ann.payer


# --- the process that decodes -------------------------------------------------------------------


def test_a_decoding_process_signals_nobody_else(tmp_path: Path) -> None:
    """By no call: neither a thread of another process, nor its limits; itself it may."""
    script = textwrap.dedent("""
        import ctypes, os, platform, resource, sys
        from mmfast.serve.guard.sandbox import confine
        numbers = {"x86_64": (200, 234, 129, 297), "aarch64": (130, 131, 138, 240)}
        tkill, tgkill, queue, tqueue = numbers[platform.machine()]
        libc, other = ctypes.CDLL(None, use_errno=True), os.getppid()
        took = confine()
        def call(*given):
            ctypes.set_errno(0)
            info = ctypes.create_string_buffer(128)
            done = libc.syscall(*given, *([info] if given[0] in (queue, tqueue) else []))
            return ctypes.get_errno() if done else 0
        def limits(pid):
            try:
                return bool(resource.prlimit(pid, resource.RLIMIT_NOFILE))
            except PermissionError:
                return False
        me = os.getpid()
        found = [call(tkill, other, 0), call(tgkill, other, other, 0), call(queue, other, 0),
                 call(tqueue, other, other, 0), call(tgkill, me, me, 0)]
        print(repr((took, found, limits(other), limits(me), limits(0))))
    """)
    root = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        timeout=120,
        check=True,
    )
    took, found, theirs, mine, zero = ast.literal_eval(done.stdout.decode())
    if not took:
        pytest.skip("this system has no seccomp filters")
    assert found == [1, 1, 1, 1, 0] and not theirs and mine and zero
