"""`mmfast serve --engine ray` as a process of its own: answers, killed replicas, and its end."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import psutil
import pytest
from engine_requests import eventually
from serve_tools import serving

from mmfast.bench.suites.serve.faults import (
    endless_model,
    ray_server,
    server_trial,
    workers_of,
)

pytest.importorskip("ray", reason="needs Ray: pip install mmfast[ray]")
httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]


def chat(**more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Hello, what is this?"}
    return {"model": "mmfast-tiny-scenes", "messages": [message], **more}


@pytest.mark.parametrize("options", [[], ["--replicas", "1", "--cache", "snapkv:64"]])
def test_it_answers_stays_and_ends_without_rest(options: list[str]) -> None:
    environment = {"RAY_worker_niceness": "0"}
    with serving("--engine", "ray", *options, **environment) as (process, url):
        rest: list[str] = []
        log = threading.Thread(target=lambda: rest.extend(process.stderr or ()), daemon=True)
        log.start()
        first = httpx.post(f"{url}/v1/chat/completions", json=chat(), timeout=300)
        assert first.status_code == 200 and first.json()["usage"]["completion_tokens"] > 0
        time.sleep(10)  # the thread that loaded the engine has ended long ago
        assert process.poll() is None
        health = httpx.get(f"{url}/health", timeout=60)
        assert health.status_code == 200
        again = httpx.post(f"{url}/v1/chat/completions", json=chat(temperature=0), timeout=300)
        message = first.json()["choices"][0]["message"]
        assert again.status_code == 200 and again.json()["choices"][0]["message"] == message
        children = psutil.Process(process.pid).children(recursive=True)
        assert any("ServeReplica" in each.name() for each in children)
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        log.join(30)
    assert code == 0 and "Traceback" not in "".join(rest) and "stopped" in "".join(rest)
    assert not psutil.wait_procs(children, timeout=60)[1]


@pytest.mark.timeout(1800)
def test_a_killed_replica_under_load() -> None:
    """Three times: its streams alone end, and say so; all others are answered, and in time."""
    with endless_model() as model, ray_server(model, 2) as url:
        for _ in range(3):
            eventually(lambda: workers_of(url) == 2, 600)
            row = server_trial(url)
            assert row["burst"] == 2, row  # eight requests at once reach both
            assert 1 <= row["lost"] <= row["streams"] // 2, row
            assert row["wrongly_lost"] == row["lost_later"] == row["other_errors"] == 0, row
            assert row["lost"] + row["completed"] == row["streams"], row
            assert row["other_text"] == 0, row
            assert row["seconds_to_answer"] < 5 and row["seconds_to_recover"] is not None, row
