"""Chat over HTTP: replies, streams, errors, clients that leave. The engine does as it is told."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serve_tools import (
    CHAT,
    MODEL,
    Hum,
    Told,
    app_of,
    client_of,
    data_url,
    events_of,
    get,
    image_part,
    lost,
    png,
    post,
    request,
    saying,
    sound_part,
    text,
    user,
    wav,
)

from mmfast.core.errors import SpecError
from mmfast.serve.engine.base import BusyError, Delta, Failure, Finish, Health, Media
from mmfast.serve.http.events import RequestRun

ROW = {"stage": "encode", "tokens_in": 64, "tokens_out": 64, "ms": 3.0, "peak_bytes": 0}
TRACE = {"visual_tokens": 64, "kept_tokens": 16, "ttft_ms": 12.0, "rows": [ROW]}
ANSWER = (Delta("to the"), Delta(" left"), Finish("stop", 70, 3, 5, TRACE))


def asked(content: Any = "Where to?", **more: Any) -> dict[str, Any]:
    given = content if isinstance(content, list) else user(content)
    return {"model": MODEL, "messages": given, **more}


def test_whole_answer() -> None:
    engine = saying(*ANSWER)
    reply = post(app_of(engine), asked(temperature=0.5, seed=3, stop=["."], max_tokens=9))
    found = reply.json()
    assert reply.status_code == 200 and found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {
        "role": "assistant", "content": "to the left", "refusal": None}  # fmt: skip
    assert found["choices"][0]["finish_reason"] == "stop" and found["model"] == MODEL
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        70,
        3,
        73,
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == 5
    assert usage["prompt_tokens_details"]["image_tokens"] == 64
    assert found["mmfast"] == TRACE
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.seed, sampling.stop) == (0.5, 3, (".",))
    assert sampling.max_tokens == 9 and not engine.cancelled.is_set()


def test_a_stream_is_role_text_reason_usage_done() -> None:
    asking = asked(stream=True, stream_options={"include_usage": True})
    reply = post(app_of(saying(*ANSWER)), asking)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events_of(reply.text)
    assert last == "[DONE]" and len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant" and deltas[-1] == {}
    assert [delta["content"] for delta in deltas[1:-1]] == ["to the", " left"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 73
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["mmfast"] == TRACE


def test_a_stream_without_usage_has_none() -> None:
    *chunks, last = events_of(post(app_of(saying(*ANSWER)), asked(stream=True)).text)
    assert last == "[DONE]" and not [chunk for chunk in chunks if "usage" in chunk]
    assert len(chunks) == 4 and all(chunk["choices"] for chunk in chunks)


def test_a_failure_at_once_has_a_status_and_a_late_one_is_an_event() -> None:
    for stream in (False, True):
        reply = post(app_of(saying(lost())), asked(stream=stream))
        assert reply.status_code == 503 and reply.json()["error"]["code"] == "replica_lost"
        assert reply.json()["error"]["type"] == "server_error"
    reply = post(app_of(saying(Delta("to"), lost())), asked(stream=True))
    found = events_of(reply.text)
    assert reply.status_code == 200 and "[DONE]" not in found
    assert found[-1]["error"]["message"] == "the decode worker was lost"


def test_busy_is_429_with_retry_after() -> None:
    engine = saying(*ANSWER)

    def full(*_: Any) -> None:
        raise BusyError("16 requests run and 32 wait; try again in 3 seconds", 2.2)

    engine.submit = full  # type: ignore[method-assign]
    app = app_of(engine)
    for stream in (False, True):
        reply = post(app, asked(stream=stream))
        assert reply.status_code == 429 and reply.headers["retry-after"] == "3"
        assert reply.json()["error"]["type"] == "rate_limit_error"
    assert app.state.service.metrics.value("mmfast_rejected_total", reason="busy") == 2


def test_an_engine_that_breaks_tells_nothing_of_itself() -> None:
    engine = saying()

    def broken(*_: Any) -> None:
        raise RuntimeError("/root/secret/model.safetensors is broken")

    engine.submit = broken  # type: ignore[method-assign]
    reply = post(app_of(engine), asked())
    assert reply.status_code == 500 and "secret" not in reply.text and "Traceback" not in reply.text
    assert reply.json()["error"]["type"] == "server_error"


WRONG = [
    ({"messages": None}, "messages", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 100}, "n", "invalid_value"),  # more than run and wait
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "invalid_value",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    ({"logprobs": 1}, "logprobs", "invalid_value"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "invalid_value"),
    ({"mm_processor_kwargs": {"size": 9}}, "mm_processor_kwargs", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**6}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 10**6}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": "3"}, "max_tokens", "invalid_value"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"seed": 2**70}, "seed", "invalid_value"),
    ({"stop": [""]}, "stop[0]", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"mmfast": {"redce": "evs:0.5"}}, "mmfast.redce", "unknown_parameter"),
    ({"mmfast": {"priority": 99}}, "mmfast.priority", "invalid_value"),
    ({"mmfast": {"frames": 4000}}, "mmfast.frames", "invalid_value"),
    ({"messages": [{"role": "tol", "content": "x"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "missing_required_parameter",
    ),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": user("  ")}, "messages[0].content", "invalid_value"),
    ({"messages": user(image_part())}, "messages[0].content", "invalid_value"),
    (
        {"messages": user({"type": "file", "file": {}})},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": user({"type": "text", "txt": "a"}, text("b"))},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
]


def test_wrong_requests_say_what_is_wrong() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine)
    for more, param, code in WRONG:
        reply = post(app, asked(**more))
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, code), (
            more,
            error,
        )
        assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert not engine.requests
    near = post(app, asked(mmfast={"redce": "evs:0.5"})).json()["error"]["message"]
    assert "did you mean 'mmfast.reduce'" in near


def test_parameters_that_change_nothing_are_taken() -> None:
    neutral = {
        "n": 1, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [],
        "logit_bias": {}, "response_format": {"type": "text"}, "metadata": {"a": "b"},
        "modalities": ["text"], "store": False, "service_tier": "auto", "tool_choice": "none",
        "stop": None, "seed": None, "temperature": None, "max_tokens": None,
    }  # fmt: skip
    turn = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    talk = [{"role": "system", "content": "Be brief."}, *user("Hi?"), turn, *user("And?")]
    engine = saying(*ANSWER)
    assert post(app_of(engine), asked(talk, **neutral)).status_code == 200
    roles = [message.role for message in engine.requests[0].messages]
    assert roles == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("sent", [b"", b'{"a":', b"[1]", b'"x"', b"\xff\xfe", b"null", b"{}" * 9])
def test_what_is_no_json_object(sent: bytes) -> None:
    async def go() -> Any:
        async with client_of(app_of(saying(*ANSWER))) as client:
            headers = {"content-type": "application/json"}
            return await client.post(CHAT, content=sent, headers=headers)

    reply = asyncio.run(go())
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_options_reach_the_engine_and_its_refusal_the_client() -> None:
    engine = saying(*ANSWER)
    app = app_of(engine)
    more = {"reduce": "evs:0.5", "cache": "snapkv:64", "target_ttft_ms": 300, "priority": 2}
    more["reuse"] = "blend:0.5"
    assert post(app, asked(mmfast=more, user="ann")).status_code == 200
    request = engine.requests[0]
    assert (request.options.reduce, request.options.cache) == ("evs:0.5", "snapkv:64")
    assert request.options.target_ttft_ms == 300 and request.priority == 2
    assert request.options.reuse == "blend:0.5"
    post(app, asked(user="bob"))
    assert engine.requests[1].tenant != request.tenant

    def refuse(*_: Any) -> None:
        raise SpecError("unknown method 'evz'; did you mean 'evs'? choices: evs")

    engine.submit = refuse  # type: ignore[method-assign]
    reply = post(app, asked(mmfast={"reduce": "evz:0.5"}))
    assert reply.status_code == 400 and "did you mean 'evs'" in reply.json()["error"]["message"]


def test_media_come_in_order_and_the_same_have_the_same_key(clip_path: Any) -> None:
    engine = saying(*ANSWER)
    clip = {
        "type": "video_url",
        "video_url": {"url": data_url(clip_path.read_bytes(), "video/mp4")},
    }
    parts = [image_part(), text("and"), clip, image_part(), image_part(png(colour="blue"))]
    reply = post(app_of(engine), asked(user(*parts, text("Same?")), mmfast={"frames": 3}))
    assert reply.status_code == 200, reply.text
    first, word, video, again, other, _ = engine.requests[0].messages[0].content
    assert isinstance(first, Media) and first.shot.pixels.shape == (32, 48, 3) and word == "and"
    assert isinstance(video, Media) and video.shot.kind == "video"
    assert video.shot.pixels.shape[0] == 3
    assert isinstance(again, Media) and isinstance(other, Media)
    assert again.key == first.key != other.key


BAD_MEDIA = [
    "file:///etc/passwd", "/etc/passwd", "http://127.0.0.1:1/x.png", "data:image/png;base64,####",
    "data:image/png;base64,", "data:text/html,<b>", data_url(b"no image at all", "image/png"),
    data_url(png()[:60], "image/png"),
]  # fmt: skip


def test_bad_media_are_named_and_tell_no_path() -> None:
    app = app_of(saying(*ANSWER))
    for url in BAD_MEDIA:
        part = {"type": "image_url", "image_url": {"url": url}}
        reply = post(app, asked(user(text("What?"), part)))
        error = reply.json()["error"]
        assert reply.status_code == 400, (url, error)
        assert error["param"] == "messages[0].content[1].image_url", (url, error)
        assert "/tmp" not in error["message"] and "/usr" not in error["message"]
    many = asked(user(*[image_part()] * 17, text("?")))
    assert post(app, many).json()["error"]["code"] == "too_much"
    long = asked("?" * 300_000)
    assert post(app, long).json()["error"]["code"] == "too_much"


def test_what_is_said_is_asked_as_text() -> None:
    engine, voice = saying(*ANSWER), Hum()
    reply = post(app_of(engine, voice), asked(user(image_part(), sound_part(wav(0.5)))))
    assert reply.status_code == 200, reply.text
    assert engine.requests[0].messages[0].content[1] == "Which way does the red circle move?"
    assert reply.json()["mmfast"]["heard"] == ["Which way does the red circle move?"]
    assert reply.json()["usage"]["transcribed"] == {"sounds": 1, "seconds": 0.5}
    post(app_of(engine, voice), asked(user(text("hm"), sound_part(wav(0.5)[:-999]))))
    assert ["shorter" in note for note in engine.requests[1].messages[0].notes] == [True]
    silent = post(app_of(engine, voice), asked(user(sound_part(wav(0.5, 0.0)))))
    assert silent.status_code == 400 and "no word" in silent.json()["error"]["message"]
    deaf = post(app_of(engine), asked(user(sound_part(wav(0.5)))))
    assert deaf.status_code == 404 and deaf.json()["error"]["code"] == "no_voice"


def waiting() -> Told:
    """Says one word and then nothing."""
    return Told(lambda request, emit: emit(Delta("to")))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_at_once(stream: bool) -> None:
    engine = waiting()
    app = app_of(engine)
    asyncio.run(_leave(app, asked(stream=stream)))
    assert engine.cancelled.wait(10)


def test_who_leaves_as_a_word_comes_has_left() -> None:
    async def main(steps: int) -> bool:
        """Whether a reader that is cancelled so many steps behind an event goes on regardless."""
        run = RequestRun(waiting(), [])
        reading = asyncio.create_task(run.next(5.0))
        await asyncio.sleep(0.01)
        run._inbox.put_nowait((0, Delta("to")))
        for _ in range(steps):
            await asyncio.sleep(0)
        if reading.cancel():
            await asyncio.gather(reading, return_exceptions=True)
            return not reading.cancelled()
        return False

    assert not any(asyncio.run(main(steps)) for steps in range(6))


async def _leave(app: Any, document: Any) -> None:
    """One request, and its connection is lost as soon as the engine has it."""
    body = json.dumps(document).encode()
    sent: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        while not app.state.service._engine.now().requests:  # until it runs
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
        "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "root_path": "",
        "http_version": "1.1", "scheme": "http", "client": ("127.0.0.1", 1), "server": ("t", 80),
        "headers": [(b"host", b"t"), (b"content-type", b"application/json"),
                    (b"content-length", str(len(body)).encode())],
        "state": {},
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), 30)


def test_a_stream_that_waits_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.serve.http import exchange

    monkeypatch.setattr(exchange, "HEARTBEAT", 0.05)
    monkeypatch.setattr(exchange, "PATIENCE", 0.05)
    slow = threading.Event()

    def say(_: Any, emit: Any) -> None:
        slow.wait(0.5)
        for event in ANSWER:
            emit(event)

    reply = post(app_of(Told(say)), asked(stream=True))
    assert ": waiting\n\n" in reply.text and events_of(reply.text)[-1] == "[DONE]"


def test_a_picture_is_named_by_its_uuid_alone() -> None:
    engine = saying(*ANSWER)
    config: dict[str, Any] = {"api_keys": ("sk-one", "sk-two"), "request_pixels": 10_000}
    app = app_of(engine, **config)

    def ask(*parts: Any, key: str = "sk-one", **more: Any) -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return post(app, asked(user(*parts, text("What?")), **more), headers=headers)

    def named(uuid: Any, **more: Any) -> dict[str, Any]:
        return {"type": "image_url", "uuid": uuid, **more}

    assert ask({**image_part(png((8, 6))), "uuid": "a"}).status_code == 200
    assert ask(named("a", image_url=None), named("a")).status_code == 200
    first, second, third = (m for r in engine.requests for m in r.messages[0].content[:-1])
    assert isinstance(first, Media) and first.key == second.key == third.key
    assert (second.shot.pixels == first.shot.pixels).all()
    refused = [ask(named("b")), ask(named("a"), key="sk-two"), ask(named("a"), user="other")]
    for reply in refused:  # other users have pictures of their own
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (400, "unknown_uuid"), error
        assert error["param"] == "messages[0].content[0].image_url", error
        assert "once more" in error["message"]
    for missing in (named(None), {"type": "image_url"}):
        assert ask(missing).json()["error"]["code"] == "missing_required_parameter"
    assert ask({**image_part(png((80, 60))), "uuid": "a"}).status_code == 200  # another picture
    assert ask(named("a")).status_code == 200
    replaced = engine.requests[-1].messages[0].content[0]
    assert isinstance(replaced, Media) and replaced.shot.pixels.shape == (60, 80, 3)
    assert ask(named("a"), named("a")).status_code == 200  # 4800 pixels each of 10,000
    assert ask(*[named("a")] * 3).json()["error"]["code"] == "unknown_uuid"


@pytest.mark.parametrize("live", [{"answer": 2}, {"encode": 1, "prefill": 1, "decode": 3}])
def test_health_counts_replicas(live: dict[str, int]) -> None:
    for dead in (None, *live):
        engine, found = saying(), {**live, **({dead: 0} if dead else {})}
        gauges = {f"workers_{role}": float(count) for role, count in found.items()} | {"x": 0.0}
        engine.health = lambda gauges=gauges: Health(True, 1, 2, gauges)  # type: ignore[misc]
        reply = get(app_of(engine), "/health")
        status = "unready" if dead else "ok"
        assert reply.json() == {"status": status, "running": 1, "waiting": 2, "replicas": found}
        assert reply.status_code == (503 if dead else 200)


def test_models_health_metrics() -> None:
    app = app_of(saying(*ANSWER), Hum())
    names = [model["id"] for model in get(app, "/v1/models").json()["data"]]
    assert names == [MODEL, "mmfast-tiny-speech"]
    assert get(app, f"/v1/models/{MODEL}").json()["object"] == "model"
    missing = get(app, "/v1/models/gpt-4")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert get(app, "/health").json()["status"] == "ok"
    assert get(app, "/ready").json() == {"status": "ok", "running": 1, "waiting": 2}
    post(app, asked())
    page = get(app, "/metrics").text
    for line in (
        'mmfast_tokens_total{when="before"} 64.0',
        'mmfast_tokens_total{when="after"} 16.0',
        'mmfast_text_tokens_total{kind="completion"} 3.0',
        'mmfast_stage_seconds_count{stage="encode"} 1.0',
        "mmfast_ttft_seconds_count 1.0",
        "mmfast_inter_token_seconds_count 1.0",
        'mmfast_engine{name="kv_bytes"} 5.0',
        "mmfast_running 1.0",
        "mmfast_waiting 2.0",
    ):
        assert line in page, line
    assert get(app_of(saying(), metrics=False), "/metrics").status_code == 404


def test_routes_that_are_not_there() -> None:
    app = app_of(saying(*ANSWER))
    for path in ("/", "/v1", "/v1/embeddings", "/etc/passwd", "/v1/models/../../etc/passwd"):
        reply = get(app, path)
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    form = request(app, "POST", "/v1/files", files={"file": b"{}"}, data={"purpose": "batch"})
    assert form.status_code == 404 and "'/v1/files'" in form.json()["error"]["message"]
    wrong = get(app, CHAT)
    assert wrong.status_code == 405 and "GET is not for" in wrong.json()["error"]["message"]


def test_head_is_get_without_the_body() -> None:
    app = app_of(saying(*ANSWER))
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/v1/models/no", CHAT):
        head, got = request(app, "HEAD", path), get(app, path)
        assert head.status_code == got.status_code and head.content == b""
        assert head.headers["content-length"] == got.headers["content-length"], path


def test_a_request_waits_for_an_engine_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.core.errors import ModelError
    from mmfast.serve.http import service

    loading = threading.Event()

    def load(config: Any) -> Any:
        assert loading.wait(30)
        return saying(*ANSWER)

    monkeypatch.setattr(service, "_engine", load)

    async def go(app: Any) -> Any:
        async with client_of(app) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json=asked()))
            await asyncio.sleep(0.05)
            early = await client.get("/ready")
            loading.set()
            return early, await asking

    early, reply = asyncio.run(go(app_of(None)))
    assert early.status_code == 503 and early.json()["status"] == "loading"
    assert reply.status_code == 200

    def fail(config: Any) -> Any:
        raise ModelError("model 'nix' cannot be loaded; give another")

    monkeypatch.setattr(service, "_engine", fail)
    app = app_of(None)
    reply = post(app, asked())
    assert reply.status_code == 503 and "cannot be loaded" in reply.json()["error"]["message"]
    assert get(app, "/ready").json()["status"] == "failed"


def test_cancelled_from_elsewhere_is_the_servers_fault() -> None:
    reply = post(app_of(saying(Failure("cancelled", 499, "cancelled"))), asked())
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "cancelled"


def test_what_is_asked_is_logged_where_the_owner_wants_that_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "mmfast")
    for wanted in (False, True):
        app = app_of(saying(*ANSWER), log_text=wanted)
        assert post(app, asked(user(image_part(), text("A secret?")))).status_code == 200
        fields = str([getattr(record, "fields", None) for record in caplog.records])
        assert ("A secret?" in fields) == ("to the left" in fields) == wanted
        assert "base64" not in fields
