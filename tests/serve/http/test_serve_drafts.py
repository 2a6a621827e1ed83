"""Draft and verify over HTTP: the answers of a server without it, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("ray")

from serve_tools import CHAT, MODEL, app_of, client_of, data_url, text, user

from mmfast.cli import main
from mmfast.compressors.base import save
from mmfast.core.errors import MmfastError, SpecError
from mmfast.models.decoder.early_exit import new_adapter
from mmfast.models.loading import load
from mmfast.serve.config import ServerConfig, resolve
from mmfast.serve.engine.scheduler import Scheduler
from mmfast.serve.http.service import load_engine
from mmfast.serve.ray.engine import RayEngine, check_parts
from mmfast.vllm.launch import command

CLIP = Path("assets/clips/four-shapes.mp4")
SPEC = "self:0.3?adapt=false&least=0"


@pytest.fixture(scope="module")
def drafting() -> Iterator[Scheduler]:
    made = load_engine(ServerConfig(decode=SPEC, slots=4, name=MODEL))
    assert isinstance(made, Scheduler)
    yield made
    made.close()


def asked(decode: str | None = None, **more: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": data_url(CLIP.read_bytes(), "video/mp4")}}
    ours = {"frames": 2, **({"decode": decode} if decode else {})}
    content = user(part, text("How many shapes are there?"))
    return {"model": MODEL, "messages": content, "mmfast": ours, "max_tokens": 6, **more}


def posted(engine: Any, path: str, *documents: dict[str, Any]) -> list[Any]:
    """Replies to requests that are sent at once, and the page of metrics behind them."""

    async def go() -> list[Any]:
        async with client_of(app_of(engine)) as client:
            posts = [client.post(path, json=each, timeout=300) for each in documents]
            return [*await asyncio.gather(*posts), await client.get("/metrics")]

    return asyncio.run(go())


def told(reply: Any) -> str:
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["choices"][0]["message"]["content"]
    return found


def test_streams_and_whole_replies_are_those_without_drafts(drafting: Scheduler) -> None:
    """The server's own spec, one of a request, none; counts in usage and metrics."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    documents = [asked("none"), asked(), asked("recycle?adapt=false"), asked(**options)]
    plain, own, other, stream, metrics = posted(drafting, CHAT, *documents)
    assert told(own) == told(other) == told(plain)
    lines = [line[6:] for line in stream.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(deltas) == told(plain)
    assert "completion_tokens_details" not in plain.json()["usage"]
    details = [reply["usage"]["completion_tokens_details"] for reply in (own.json(), chunks[-1])]
    assert details[0] == details[1] and sum(details[0].values()) > 0
    (row,) = [row for row in own.json()["mmfast"]["rows"] if row["stage"] == "draft"]
    assert row["tokens_out"] == details[0]["accepted_prediction_tokens"]
    assert "vllm:spec_decode_num_draft_tokens_total" in metrics.text
    assert "vllm:spec_decode_num_accepted_tokens_total" in metrics.text


@pytest.mark.slow
def test_grammars_several_answers_completions_and_responses(drafting: Scheduler) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    ways: list[dict[str, Any]] = [{"response_format": form}, {"n": 2, "temperature": 1, "seed": 4}]
    pairs = [asked(spec, **way) for way in ways for spec in ("none", SPEC)]
    *replies, _ = posted(drafting, CHAT, *pairs)
    said = [[c["message"]["content"] for c in reply.json()["choices"]] for reply in replies]
    assert said[0] == said[1] and said[2] == said[3] and len(said[3]) == 2
    words = {"model": MODEL, "prompt": "the red circle moves " * 4, "max_tokens": 6}
    both = [words | {"mmfast": {"decode": spec}} for spec in ("none", "lookup?adapt=false")]
    one, other, _ = posted(drafting, "/v1/completions", *both)
    assert one.json()["choices"][0]["text"] == other.json()["choices"][0]["text"]
    asks = [
        {"model": MODEL, "input": "hello", "mmfast": {"decode": s}} for s in ("none", "recycle")
    ]
    one, other, _ = posted(drafting, "/v1/responses", *asks)
    assert one.json()["output"][0]["content"] == other.json()["output"][0]["content"]


def test_wrong_specs_are_one_line(drafting: Scheduler) -> None:
    for spec, said in {"lokup": "lookup", "draft:x": "second prompt", "self": "self:0.1"}.items():
        reply, _ = posted(drafting, CHAT, asked(spec))
        message = reply.json()["error"]["message"]
        assert reply.status_code == 400 and said in message and "\n" not in message


@pytest.mark.parametrize("kind", ["draft", "exit"])
def test_a_model_or_an_exit_that_the_server_was_started_with(kind: str, tmp_path: Path) -> None:
    """Its answers are the plain ones; another file and other words are refused in one line."""
    model, where = load(None, "cpu", "float32")[0], tmp_path / "exit.safetensors"
    if kind == "draft":
        where = tmp_path
        model.save_pretrained(where)  # the model itself, which drafts what it will say
    else:
        save(new_adapter(model, model.config.get_text_config().num_hidden_layers - 1), where)
    spec = f"{kind}:{where}?adapt=false&least=0&most=2"
    made = load_engine(ServerConfig(decode=spec, slots=4, name=MODEL))
    try:
        documents = [
            asked("none", max_tokens=8, ignore_eos=True),
            asked(max_tokens=8, ignore_eos=True),
        ]
        *replies, other, _ = posted(made, CHAT, *documents, asked(f"{kind}:/else/where"))
        assert told(replies[0]) == told(replies[1])
        details = replies[1].json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 0
        assert details["rejected_prediction_tokens"] == 0 or kind == "exit"
        message = other.json()["error"]["message"]
        assert other.status_code == 400 and "start it with --decode" in message
        assert "\n" not in message
    finally:
        made.close()


def test_options_and_engines_take_it_or_refuse_it(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('decode = "recycle"\n')
    assert resolve({}, str(file)).decode == "recycle"
    assert resolve({"decode": "lookup"}, str(file)).decode == "lookup"
    with pytest.raises(SpecError, match="start the server with --replicas"):
        RayEngine(None, decode_spec="recycle")
    check_parts(None, None, None, "none")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["serve", "--decode", "none", "--dry-run"])
    with pytest.raises(SpecError, match="learns from"):
        RayEngine(None, decode_spec="draft:x?learn=1e-4", replicas=1)
    with pytest.raises(MmfastError, match="--decode has no effect on --engine vllm"):
        command(ServerConfig(model="org/model", engine="vllm", decode="recycle"))
