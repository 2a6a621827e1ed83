"""Requests made up from the server's own OpenAPI document: never a 5xx, always what it promises.

A fixed number of them by default; `pytest tests/serve/http/test_serve_fuzz.py --fuzz-minutes 5 -s`
goes on for so long, other ones every round, and prints how many there were.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from serve_tools import MODEL, Hum, app_of, data_url, png, running, sound_part, wav

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.body import UNDECLARED

CLIP = (Path(__file__).resolve().parents[3] / "assets/clips/red-circle.mp4").read_bytes()
REDUCE = ["evs:0.5", "divprune:4", "fastv@llm3:0.5", "tome@vit:0.5", "evs:0.25+pyramiddrop"]
CACHE = ["snapkv:16", "sink:4+window:16", "quant:8"]
BAD_URLS = ["file:///etc/passwd", "http://169.254.169.254/", "data:image/png;base64,iVBORw0KGgo="]
CASES = 20  # of each operation and mode, unless minutes are given


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from mmfast.serve.engine.scheduler import Scheduler

    engine = Scheduler(None, slots=4, queue=64, name=MODEL)
    with running(app_of(engine, Hum(), max_tokens=32, default_tokens=8)) as where:
        yield where
    engine.close()


def checks(mode: GenerationMode) -> list[Any]:
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    names = ["not_a_server_error", "status_code_conformance", "content_type_conformance"]
    names += ["response_schema_conformance"]
    if mode is GenerationMode.NEGATIVE:
        names.append("negative_data_rejection")
    return CHECKS.get_by_names(names)


def send(operation: Any, mode: GenerationMode, cases: int, number: int, seen: Counter[str]) -> None:
    """So many requests to one operation."""
    wanted = checks(mode)

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        better(case.body, mode)
        reply = case.call(timeout=60)
        seen[f"{operation.label} {reply.status_code}"] += 1
        # A body over the limit is refused before anybody looks at its schema, and rightly with 413.
        known = [check for check in wanted if check.__name__ == "negative_data_rejection"]
        if reply.status_code != 413 or not assert_too_large(reply):
            known = []
        case.validate_response(reply, checks=[check for check in wanted if check not in known])

    one()


def assert_too_large(reply: Any) -> bool:
    """A body that was refused for its size was over the limit, or said that it is."""
    sent, limit = reply.request, ServerConfig().max_body_bytes
    told = str(sent.headers.get("content-length", ""))
    if "transfer-encoding" in {name.lower() for name in sent.headers}:
        limit = UNDECLARED
    size = max(len(sent.body or b""), int(told) if told.isdigit() else 0)
    assert size > limit, f"413 for {size:,} bytes, {limit:,} are allowed: {reply.text[:300]}"
    return True


def better(body: Any, mode: GenerationMode) -> None:
    """What no schema can say: a model that is here, media that are some, specs that are any.

    One in eight of each stays as it was made up; so does everything that is to be refused.
    """
    if not isinstance(body, dict):
        return
    dice = random.Random(json.dumps(body, sort_keys=True, default=str))
    speech = "voice" in body
    name = body.get("model")
    if isinstance(name, str) and 0 < len(name) <= 256 and dice.random() < 0.875:
        body["model"] = "tts-1" if speech else MODEL
    if mode is GenerationMode.NEGATIVE:
        return
    if speech:
        body["voice"] = dice.choice(["alloy", "low", body["voice"]])
        body["input"] = dice.choice(["Say it.", body["input"]])[:200]
    elif "messages" in body:
        _chat(body, dice)


def _chat(body: dict[str, Any], dice: random.Random) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) and dice.random() < 0.875:
            body[name] = body[name] % 32 + 1
    if not body.get("stream"):
        body.pop("stream_options", None)
    given = body.get("mmfast") or {}
    for name, known in (("reduce", REDUCE), ("cache", CACHE)):
        if given.get(name) and dice.random() < 0.875:
            given[name] = dice.choice(known)
    if given.get("frames"):
        given["frames"] = given["frames"] % 9 + 1
        given.pop("fps", None)
    for message in body["messages"]:
        if isinstance(message.get("content"), list):
            for part in message["content"][:16]:
                _part(part, dice)
            del message["content"][16:]
    if body["messages"][-1]["role"] != "user" and dice.random() < 0.875:
        body["messages"].append({"role": "user", "content": "What is it?"})


def _part(part: dict[str, Any], dice: random.Random) -> None:
    if dice.random() < 0.125:
        return
    if part["type"] == "image_url" and part.get("image_url"):
        part["image_url"]["url"] = dice.choice([data_url(png(), "image/png"), *BAD_URLS])
    elif part["type"] == "video_url":
        part["video_url"]["url"] = dice.choice([data_url(CLIP, "video/mp4"), *BAD_URLS])
    elif part["type"] == "input_audio":
        part["input_audio"] = sound_part(wav())["input_audio"]


def test_a_413_has_a_reason() -> None:
    """What is let pass above is a body over the limit, and no other one."""
    limit = ServerConfig().max_body_bytes

    def reply(size: int, **headers: str) -> Any:
        sent = SimpleNamespace(headers=headers, body=bytes(size))
        return SimpleNamespace(request=sent, text="too large")

    for small in (reply(100), reply(100, **{"content-length": str(limit)}), reply(0)):
        with pytest.raises(AssertionError, match="413 for"):
            assert_too_large(small)
    assert assert_too_large(reply(100, **{"content-length": str(limit + 1)}))
    assert assert_too_large(reply(limit + 1))
    assert assert_too_large(reply(UNDECLARED + 1, **{"Transfer-Encoding": "chunked"}))


def test_no_request_is_the_servers_fault(url: str, request: pytest.FixtureRequest) -> None:
    minutes = float(request.config.getoption("--fuzz-minutes"))
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {each.path for each in operations} >= {"/v1/chat/completions", "/v1/audio/speech"}
    seen, end = Counter[str](), time.monotonic() + 60 * minutes
    for number in count():
        for each in operations:
            for mode in list(GenerationMode) if has_input(each) else [GenerationMode.POSITIVE]:
                send(each, mode, CASES if has_input(each) else 2, number, seen)
        if time.monotonic() >= end:
            break
    print("\n" + "\n".join(f"{n:6} {what}" for what, n in sorted(seen.items())))
    print(f"{seen.total()} requests, none the server's fault")
    assert not [what for what in seen if what.split()[-1].startswith("5")]
    assert seen["POST /v1/chat/completions 200"] > 0 and seen["POST /v1/audio/speech 200"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("MMFAST_OPENAI_SPEC"), reason="MMFAST_OPENAI_SPEC not set")
@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses"])
def test_openais_own_specification(url: str, path: str) -> None:
    """Requests made up from OpenAI's published document (`openapi.json`); its types of replies."""
    document = json.loads(Path(os.environ["MMFAST_OPENAI_SPEC"]).read_text())
    kept = {"post": document["paths"][path]["post"]}
    document |= {"paths": {path: kept}, "servers": [{"url": f"{url}/v1"}]}
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"{url}/v1")
    operation, seen = schema[path]["POST"], Counter[str]()
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    wanted = CHECKS.get_by_names(["not_a_server_error", "response_schema_conformance"])

    @seed(1)
    @settings(
        max_examples=CASES,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def one(case: Any) -> None:
        if not isinstance(case.body, dict):
            return
        case.body |= {"model": MODEL, "stream": False}
        case.body = {k: v for k, v in case.body.items() if v is not None and k in PLAIN}
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if name in case.body:
                case.body[name] = 8
        case.body["messages"] = [{"role": "user", "content": "Hi?"}]
        case.body["prompt"] = "Hi?"
        case.body["input"] = "Hi?"
        needed = {"/chat/completions": "messages", "/completions": "prompt", "/responses": "input"}
        for name in needed.values():
            if name != needed[path]:
                del case.body[name]
        reply = case.call(timeout=60)
        seen[str(reply.status_code)] += 1
        if reply.status_code == 200:
            case.validate_response(reply, checks=wanted)
        else:
            assert reply.status_code == 400, reply.text

    one()
    print(path, dict(seen))
    assert seen["200"] > 0


# What is taken from a made-up request: the rest of it hits no two servers alike.
PLAIN = {"model", "stream", "temperature", "top_p", "n", "max_tokens", "max_completion_tokens"}
PLAIN |= {"max_output_tokens", "presence_penalty", "frequency_penalty", "logprobs", "seed", "stop"}
PLAIN |= {"top_logprobs", "user", "metadata", "store", "logit_bias", "service_tier", "verbosity"}
PLAIN |= {"reasoning_effort", "parallel_tool_calls", "instructions", "truncation", "echo"}


def has_input(operation: Any) -> bool:
    return operation.method == "post"
