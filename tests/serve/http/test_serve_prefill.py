"""Sparse prefill over HTTP: as `pipeline(…, prefill=…)` alone, beside other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("ray")

from scheduling import Ear, clip, talk
from serve_tools import CHAT, MODEL, app_of, client_of, data_url, text, user

import mmfast
from mmfast.core.errors import SpecError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import Finish
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.http.service import load_engine
from mmfast.serve.ray.deployments import AnswerReplica, ReplicaSettings
from mmfast.serve.ray.engine import RayEngine

CLIP = Path("assets/clips/four-shapes.mp4")
QUESTION = "How many shapes are there?"
FRAMES = 8
SPECS = ("minference:0.1?least=16&block=8", "hip:0.2?least=16&block=8")
ALL = "pbs:1.0?least=1"


@pytest.fixture(scope="module")
def sparse() -> Iterator[Scheduler]:
    made = load_engine(ServerConfig(prefill=SPECS[0], slots=4, name=MODEL))
    assert isinstance(made, Scheduler)
    yield made
    made.close()


@pytest.fixture
def apart(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests that are not read in the batch, from now on."""
    begun, runner = list[str](), engine._runner.sequential
    start = runner.start
    monkeypatch.setattr(runner, "start", lambda own: (begun.append(own.id), start(own)))
    return begun


def asked(**options: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": data_url(CLIP.read_bytes(), "video/mp4")}}
    content = user(part, text(QUESTION))
    more = {"mmfast": {"frames": FRAMES, **options}, "logprobs": True, "max_tokens": 12}
    return {"model": MODEL, "messages": content, **more}


def answers(engine: Any, *documents: dict[str, Any], path: str = CHAT) -> list[Any]:
    """Replies to requests that are sent at once."""

    async def go() -> list[Any]:
        async with client_of(app_of(engine)) as client:
            posts = [client.post(path, json=each, timeout=300) for each in documents]
            return await asyncio.gather(*posts)

    return asyncio.run(go())


def kept(rows: Any) -> list[tuple[Any, ...]]:
    """What queries could read, and what they read."""
    found = [row if isinstance(row, dict) else vars(row) for row in rows]
    names = ("tokens_in", "tokens_out")
    return [tuple(row[name] for name in names) for row in found if row["stage"] == "sparse"]


def told(reply: Any) -> tuple[str, list[float]]:
    """Words of a reply, and the log-probabilities of its tokens."""
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    chances = [each["logprob"] for each in choice["logprobs"]["content"]]
    return choice["message"]["content"], chances


def alone(engine: Scheduler, **options: Any) -> Any:
    pipe = mmfast.pipeline("video-qa", engine.pair, frames=FRAMES, **options)
    return pipe(str(CLIP), QUESTION, max_new_tokens=12)


def test_a_request_reads_what_a_pipeline_reads(engine: Any) -> None:
    """Beside requests with other specs and none, each gets the answer that it gets alone."""
    ways: list[dict[str, Any]] = [
        {},
        *({"prefill": spec} for spec in SPECS),
        {"prefill": SPECS[0], "reduce": "evs:0.5", "cache": "snapkv:24"},
        {"reduce": "evs:0.5", "cache": "snapkv:24"},
    ]
    replies = answers(engine, *(asked(**way) for way in ways))
    for way, reply in zip(ways, replies, strict=True):
        mine = alone(engine, **way)
        assert told(reply)[0] == mine.text, way
        rows = kept(reply.json()["mmfast"]["rows"])
        assert rows == kept(mine.trace.rows) and len(rows) == ("prefill" in way), way
        assert all(0 < read < held for held, read in rows)
    dense, *others = (told(reply)[1] for reply in replies[:3])
    assert all(dense != each for each in others)  # skipped keys are felt
    assert engine._runner.nbytes == 0


def test_the_server_has_a_default_that_a_request_replaces(sparse: Any) -> None:
    default, none, other = answers(sparse, asked(), asked(prefill=ALL), asked(prefill=SPECS[1]))
    first, last = (kept(reply.json()["mmfast"]["rows"]) for reply in (default, other))
    assert first == kept(alone(sparse, prefill=SPECS[0]).trace.rows)
    assert last == kept(alone(sparse, prefill=SPECS[1]).trace.rows) != first
    assert not kept(none.json()["mmfast"]["rows"])
    assert told(none)[0] == alone(sparse).text


def test_a_prompt_shorter_than_the_least_stays_in_the_batch(engine: Any, apart: list[str]) -> None:
    """Nothing would be chosen, so it is read with others; so is one of which all is read."""
    whole, *others = answers(engine, asked(), asked(prefill="flexprefill:0.9"), asked(prefill=ALL))
    for words, chances in map(told, others):
        assert words == told(whole)[0] and chances == pytest.approx(told(whole)[1], abs=1e-4)
    assert not apart
    told(answers(engine, asked(prefill=SPECS[0]))[0])
    assert len(apart) == 1


def test_completions_take_it(engine: Any, apart: list[str]) -> None:
    document = {"model": MODEL, "prompt": "the red circle moves " * 40, "max_tokens": 4}
    for spec, count in ((ALL, 0), (SPECS[0], 1)):
        given = document | {"mmfast": {"prefill": spec}}
        (reply,) = answers(engine, given, path="/v1/completions")
        assert reply.status_code == 200 and len(apart) == count, reply.text


def test_wrong_specs_are_one_line(engine: Any) -> None:
    wrong = ("minferenc:0.1", "minference:5", "hip+pbs")
    for reply in answers(engine, *(asked(prefill=spec) for spec in wrong)):
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and "\n" not in message, message
    with pytest.raises(SpecError, match="minference"):
        load_engine(ServerConfig(prefill="minferenc"))


def test_parts_on_ray_refuse_it() -> None:
    """Before a cluster is started: prompts are read in chunks there."""
    with pytest.raises(SpecError, match="one piece; start the server with --replicas"):
        RayEngine(None, prefill_spec=SPECS[0])


def test_a_whole_replica_has_the_default_of_its_server() -> None:
    replica = AnswerReplica(ReplicaSettings(threads=0, slots=1, prefill=SPECS[1]))
    try:
        ear = Ear(replica._engine, talk("one", [[clip(1, 8, (48, 48)), QUESTION]]))
        end = ear.wait()
        assert isinstance(end, Finish) and len(kept(end.trace["rows"])) == 1
    finally:
        replica._engine.close()
