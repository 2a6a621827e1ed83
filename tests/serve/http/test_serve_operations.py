"""Metrics, quotas, pixels and the end of a server."""

from __future__ import annotations

import asyncio
import io
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")

from PIL import Image
from serve_tools import (
    CHAT,
    MODEL,
    app_of,
    client_of,
    data_url,
    events_of,
    image_part,
    saying,
    serving,
    text,
    user,
)

from mmfast.core.errors import MmfastError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Delta, Finish
from mmfast.serve.guard.media import decoders, load_media

ROWS = [{"stage": "prefill", "ms": 20.0}, {"stage": "decode", "ms": 30.0}]
ANSWER = (Delta("to the"), Delta(" left"), Finish("stop", 70, 3, trace={"rows": ROWS, "queue_ms": 7.0}))  # fmt: skip  # noqa: E501
QUOTAS = ("requests_per_minute", "bytes_per_minute", "tokens_per_minute", "pixels_per_minute")


def replies(app: Any, *documents: Any) -> list[Any]:
    async def go() -> list[Any]:
        async with client_of(app) as client:
            return [await client.post(CHAT, json={"model": MODEL, **each}) for each in documents]

    return asyncio.run(go())


def page(app: Any, path: str = "/metrics", **headers: str) -> Any:
    async def go() -> Any:
        async with client_of(app) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(go())


def test_the_series_of_vllms_dashboards() -> None:
    app = app_of(saying(*ANSWER))
    replies(app, {"messages": user("Hi?")}, {"messages": user("Hi?"), "stream": True})
    found = page(app).text
    label = f'{{model_name="{MODEL}"}}'
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f"vllm:{name}_seconds_count{label} 2.0" in found, name
    for name, total in (("queue", 0.014), ("prefill", 0.04), ("decode", 0.06)):
        assert f"vllm:request_{name}_time_seconds_sum{label} {total}" in found, name
    assert f"vllm:prompt_tokens_total{label} 140.0" in found
    assert f"vllm:generation_tokens_total{label} 6.0" in found
    assert f"vllm:num_requests_running{label} 1.0" in found
    assert f"vllm:num_requests_waiting{label} 2.0" in found
    assert 'vllm:request_success_total{finished_reason="stop"' in found
    assert "mmfast_queue_seconds_count 2.0" in found


def test_metrics_need_the_key_beyond_this_machine() -> None:
    for host, status in (("127.0.0.1", 200), ("0.0.0.0", 401)):
        app = app_of(saying(*ANSWER), host=host, api_keys=("sk-one",))
        assert page(app).status_code == status
        assert page(app, authorization="Bearer sk-one").status_code == 200


def test_a_page_of_routes_without_scripts() -> None:
    found = page(app_of(saying(*ANSWER)), "/docs")
    assert found.status_code == 200 and "/v1/responses" in found.text
    assert "<script" not in found.text and "http" not in found.text


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "10.1.2.3", "::"])
def test_quotas_hold_beyond_this_machine(host: str) -> None:
    local = host in ("127.0.0.1", "::1", "localhost")
    config = ServerConfig(host=host)
    for name in (*QUOTAS, "requests_at_once"):
        assert (config.quota(name) == 0) == local
        assert ServerConfig(host=host, **{name: 3}).quota(name) == 3
        assert ServerConfig(host=host, **{name: 0}).quota(name) == 0


def picture(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


def test_pixels_are_charged_and_shared() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine, pixels_per_minute=1_000_000, request_pixels=1_000_000)
    ask = {"messages": user(*[image_part(picture(1200))] * 4, text("What?"))}
    first, second = replies(app, ask, ask)
    assert first.status_code == 200 and second.status_code == 200
    shapes = {part.shot.pixels.shape for part in engine.requests[0].messages[0].content[:4]}
    assert shapes == {(400, 400, 3)}  # a third: 4 x 400 x 400 is at most a million
    (refused,) = replies(app, ask)  # 1,280,000 of a million
    assert refused.status_code == 429 and "pixels" in refused.json()["error"]["message"]
    alone = {"messages": user(image_part(picture(1000)), text("What?"))}
    replies(app_of(engine, request_pixels=1_000_000), alone)
    pixels = engine.requests[2].messages[0].content[0].shot.pixels
    assert pixels.shape == (1000, 1000, 3)  # alone it has them all


def test_a_reduced_picture_has_a_key_of_its_own() -> None:
    config, url = ServerConfig(), data_url(picture(64), "image/png")

    async def go() -> Any:
        sizes = [await load_media(url, "image", config, most=most) for most in (None, 4096, 1024)]
        return [(each.key, each.shot.pixels.shape) for each in sizes]

    whole, same, small = asyncio.run(go())
    assert whole == same and small[0] != whole[0] and small[1] == (32, 32, 3)


def test_the_queue_of_decoding_is_what_is_advertised() -> None:
    config = ServerConfig(decode_workers=1, decode_queue=20)
    assert decoders(config)._most == 21
    with pytest.raises(MmfastError, match="decode_queue=8 is less than max_media=16"):
        ServerConfig(decode_queue=8)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_drains_and_tells_open_streams_why() -> None:
    limits = {"MMFAST_SHUTDOWN_SECONDS": "4", "MMFAST_MAX_TOKENS": "4000"}
    with serving(**limits) as (process, url):
        ask = {"model": MODEL, "messages": user("Which way?"), "stream": True}
        ask |= {"max_tokens": 4000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}{CHAT}", json=ask, timeout=120) as reply:
            lines = reply.iter_lines()
            for _ in range(6):  # it runs
                next(lines)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            found = events_of("\n\n".join(lines))
        assert found[-1]["error"]["code"] == "stopping" and "[DONE]" not in found
        assert time.monotonic() - began > 1  # there was time to end
        assert process.wait(60) == 0


_ENDLESS = """
import sys, torch
from mmfast.serve.http import service
from mmfast.__main__ import main

def load(config):
    rows = torch.ones(600, 600)
    print("loading", file=sys.stderr, flush=True)
    while True:
        rows = (rows @ rows).clamp(-1, 1)

service.load_engine = load
sys.argv = ["mmfast", "serve", "--port", "0", "--no-demo"]
main()
"""


def test_a_signal_while_the_model_loads_ends_quietly() -> None:
    """Daemon threads die where they next ask for the lock of the interpreter: in torch, badly."""
    command = [sys.executable, "-c", _ENDLESS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while process.stderr.readline().strip() != "loading":
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
    assert process.returncode == 0 and told.splitlines()[-1] == "stopped"
