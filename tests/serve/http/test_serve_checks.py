"""`auto?check=…` over HTTP: the server's own, one of a request, streamed, and in the metrics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from engine_requests import eventually
from planner_rows import settle
from serve_tools import CHAT, MODEL, app_of, client_of, data_url, text, user

from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.http.service import load_engine

CLIP = Path("assets/clips/four-shapes.mp4")
CHECK = "auto?check=0.8"


def asked(**more: Any) -> dict[str, Any]:
    options = more.pop("mmfast", {})
    part = {"type": "video_url", "video_url": {"url": data_url(CLIP.read_bytes(), "video/mp4")}}
    known = {"model": MODEL, "messages": user(part, text("How many shapes are there?"))}
    return {**known, "mmfast": {"frames": 8, **options}, "max_tokens": 8, **more}


def posted(engine: Any, *documents: dict[str, Any]) -> list[Any]:
    async def go() -> list[Any]:
        async with client_of(app_of(engine)) as client:
            posts = [await client.post(CHAT, json=each, timeout=300) for each in documents]
            held = engine._runner.checks
            await asyncio.to_thread(eventually, lambda: not held.busy)
            return [*posts, await client.get("/metrics")]

    return asyncio.run(go())


def test_answers_of_a_server_are_checked() -> None:
    made = load_engine(ServerConfig(reduce=CHECK, slots=4, name=MODEL))
    assert isinstance(made, Scheduler)
    settle(made._runner.planner, "divprune", (0.5,))
    drawn = {"temperature": 0.9, "seed": 1}
    try:
        *replies, metrics = posted(
            made,
            asked(),
            asked(stream=True),
            asked(mmfast={"reduce": "divprune:0.5"}),
            asked(**drawn),
            asked(mmfast={"reduce": CHECK}, **drawn),
            asked(mmfast={"check": True}),
        )
    finally:
        made.close()
    plain, streamed, named, warm, refused, unknown = replies
    body = plain.json()
    answer = body["choices"][0]["message"]["content"]
    assert "self-check: behind this answer" in body["mmfast"]["notes"]
    events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
    chunks = [choice for each in map(json.loads, events) for choice in each["choices"]]
    assert "".join(each["delta"].get("content") or "" for each in chunks) == answer
    assert named.json()["choices"][0]["message"]["content"] == answer
    assert any("does not check" in note for note in warm.json()["mmfast"]["notes"])
    assert refused.status_code == 400 and "drop the check" in refused.json()["error"]["message"]
    assert unknown.status_code == 400 and "check" in unknown.json()["error"]["message"]
    found = {
        line.partition(" ")[0]: float(line.partition(" ")[2])
        for line in metrics.text.splitlines()
        if line.startswith("mmfast_engine{")
    }
    assert found['mmfast_engine{name="checked_answers"}'] == 2
    tokens = found['mmfast_engine{name="checked_tokens"}']
    assert tokens == 2 * body["usage"]["completion_tokens"]
    assert 0 <= found['mmfast_engine{name="standing_tokens"}'] <= tokens
