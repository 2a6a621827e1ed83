"""The guard in front of an application, on a real server and over real sockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from guard_tools import AUTH, KEY, Guarded, application, guarded
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from mmfast.serve.guard import body as intake
from mmfast.serve.guard.errors import ApiError

PLAIN: dict[str, Any] = {"trust_env": False, "verify": False, "timeout": 30}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Guarded]:
    with guarded(
        api_keys=(KEY, "another"),
        header_seconds=1.0,
        body_seconds=1.0,
        max_body_bytes=1 << 20,
        realtime_message_bytes=1000,
    ) as found:
        yield found


def _post(server: Guarded, path: str = "/v1/x", **more: Any) -> httpx.Response:
    more["headers"] = {**AUTH, **more.get("headers", {})}
    return httpx.post(server.url + path, **PLAIN, **more)


def _get(server: Guarded, path: str, headers: Any = None) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, **PLAIN)


def _error(reply: httpx.Response) -> dict[str, Any]:
    assert reply.headers["x-request-id"]
    found = reply.json()["error"]
    assert set(found) == {"message", "type", "code", "param"}
    return found


def test_requests_pass_and_have_an_id(server: Guarded) -> None:
    reply = _post(server, json={"a": 1})
    assert reply.status_code == 200 and reply.text == "7"
    assert reply.headers["x-request-id"].startswith("req_")
    assert (
        _get(server, "/v1/x", {**AUTH, "X-Request-Id": "mine-1"}).headers["x-request-id"]
        == "mine-1"
    )
    for odd in ("a b", "x" * 65, "ä".encode("latin-1"), "<script>"):
        assert (
            _get(server, "/v1/x", {**AUTH, "X-Request-Id": odd}).headers["x-request-id"][:4]
            == "req_"
        )


def test_keys_are_asked_for(server: Guarded) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert _get(server, path).status_code == 200
    for path in ("/v1/x", "/docs", "/health/", "/healthx", "/ready/../v1/x", "//health"):
        assert _get(server, path).status_code == 401, path
    for headers in (
        {"Authorization": "Bearer x"},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
    ):
        reply = _get(server, "/v1/x", headers)
        assert reply.status_code == 401 and _error(reply)["type"] == "authentication_error"
        assert reply.headers["www-authenticate"] == "Bearer" and KEY not in reply.text
    assert _get(server, "/demo", {}).headers["www-authenticate"] == "Basic"
    assert _get(server, "/v1/x", {"Authorization": "Bearer another"}).status_code == 200
    assert httpx.get(server.url + "/demo", auth=("me", KEY), **PLAIN).status_code == 200


def test_bodies_are_counted(server: Guarded) -> None:
    start = time.monotonic()
    said = _post(server, content=bytes(2 << 20), headers=JSON)
    assert said.status_code == 413 and _error(said)["code"] == "body_too_large"

    def endless() -> Iterator[bytes]:
        while time.monotonic() < start + 30:
            yield b" " * (1 << 16)

    unsaid = _post(server, content=endless(), headers=JSON)
    assert unsaid.status_code == 413 and _error(unsaid)["code"] == "body_too_large"
    assert "body" in server.rejected
    assert _post(server, content=b" " * (1 << 20), headers=JSON).status_code == 200


def test_a_body_without_a_length_is_counted_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "UNDECLARED", 1000)
    with guarded(max_body_bytes=4000) as own:
        for body, status in (
            (bytes(3000), 200),
            (iter([bytes(900)]), 200),
            (iter([bytes(3000)]), 413),
        ):
            reply = httpx.post(own.url + "/v1/x", content=body, headers=JSON, **PLAIN)
            assert reply.status_code == status


def test_a_guard_that_trusts_the_length_lets_more_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake.BodyReceiver, "_count", lambda self, piece: None)
    with guarded(max_body_bytes=1000) as planted:
        reply = httpx.post(
            planted.url + "/v1/x", content=iter([bytes(5000)]), headers=JSON, **PLAIN
        )
        assert reply.status_code == 200 and reply.text == "5000", "the test above would see it"


def test_json_only_and_not_too_deep(server: Guarded) -> None:
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "x/json"}):
        assert _post(server, content=b"{}", headers=headers).status_code == 415
    zipped = _post(server, content=b"{}", headers={**JSON, "content-encoding": "gzip"})
    assert zipped.status_code == 415
    reply = _post(server, "/v1/audio/transcriptions", content=b"{}", headers=JSON)
    assert reply.status_code == 415 and "send multipart/form-data" in reply.text
    assert _post(server, content=b"[" * 33, headers=JSON).json()["error"]["code"] == "too_deep"
    assert _post(server, content=b"[" * 32, headers=JSON).status_code == 200
    assert _post(server, "/other", content=b"{}").status_code == 200


def test_headers_are_counted(server: Guarded) -> None:
    many = {f"x-{i}": "a" for i in range(150)}
    assert _error(_get(server, "/health", many))["code"] == "headers_too_large"
    assert _get(server, "/health", {"x-long": "a" * 36_000}).status_code == 431
    lines = b"".join(b"x-%d: a\r\n" % i for i in range(10_000))
    assert b" 431 " in _raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
    assert b" 431 " in _raw(server, b"GET /health HTTP/1.1\r\nHost: x\r\nx: " + b"a" * 300_000)
    assert b" 400 " in _raw(server, b"\x16\x03\x01nonsense\r\n\r\n")


def _raw(server: Guarded, data: bytes) -> bytes:
    with server.connect() as sock:
        with contextlib.suppress(OSError):  # it does not read on
            sock.sendall(data)
        return sock.recv(4096).split(b"\r\n")[0]


def test_slow_clients_are_let_go(server: Guarded) -> None:
    head = f"POST /v1/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n".encode()
    head += b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    socks = {
        "nothing": server.connect(),
        "headers": server.connect(b"GET /health HTTP/1.1\r\n"),
        "body": server.connect(head + b"{"),
        "second": server.connect(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"),
    }
    assert b" 200 " in socks["second"].recv(4096)
    socks["second"].sendall(b"GET /he")
    start = time.monotonic()
    while time.monotonic() < start + 0.6:
        time.sleep(0.1)
        socks["headers"].sendall(b"x: y\r\n")
        socks["body"].sendall(b" ")
    for name, sock in socks.items():
        got = sock.recv(4096)
        assert b" 408 " in got.split(b"\r\n")[0], (name, got)
        while got:
            got = sock.recv(4096)
        sock.close()
    assert 0.3 < time.monotonic() - start < 20


def test_many_slow_clients_hold_nobody_up(server: Guarded) -> None:
    slow = [server.connect(b"GET /v1/x HT") for _ in range(60)]
    start = time.monotonic()
    assert _get(server, "/v1/x", AUTH).status_code == 200
    assert time.monotonic() - start < 10
    for sock in slow:
        assert b" 408 " in sock.recv(4096)
        sock.close()


def test_streams_are_not_gathered(server: Guarded) -> None:
    with httpx.stream("GET", server.url + "/v1/stream", headers=AUTH, **PLAIN) as reply:
        times = [time.monotonic() for _ in reply.iter_raw()]
    assert len(times) >= 3 and times[2] - times[0] > 0.2


def test_failures_are_answered(server: Guarded) -> None:
    reply = _post(server, "/v1/fail", json={})
    assert reply.status_code == 500 and "ssh" not in reply.text
    assert _error(reply)["type"] == "server_error"


def _url(server: Guarded) -> str:
    return f"ws://127.0.0.1:{server.port}/v1/realtime"


def _socket(server: Guarded, **options: Any) -> Any:
    return connect(_url(server), proxy=None, **options)


def test_sockets_pass_and_are_refused(server: Guarded) -> None:
    for options in (
        {"additional_headers": AUTH},
        {"subprotocols": ["realtime", f"openai-insecure-api-key.{KEY}"]},
    ):
        with _socket(server, **options) as socket:
            socket.send("hello")
            assert socket.recv() == "hello"
            assert socket.response.headers["x-request-id"]
    with pytest.raises(InvalidStatus) as found:
        _socket(server)
    assert found.value.response.status_code == 401
    assert b"authentication_error" in bytes(found.value.response.body)
    with pytest.raises(InvalidStatus) as found:
        _socket(server, additional_headers=AUTH, origin="https://evil.example")
    assert found.value.response.status_code == 403


def test_sockets_end_on_what_is_too_large_and_on_failures(server: Guarded) -> None:
    for text, code in (("x" * 1001, 1009), ("fail", 1011)):
        with _socket(server, additional_headers=AUTH) as socket:
            socket.send(text)
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=20)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == code


def test_quotas_answer_with_when_to_come_back() -> None:
    with guarded(requests_per_minute=3, tokens_per_minute=1000) as server:
        codes = [_get(server, "/v1/x").status_code for _ in range(4)]
        assert codes == [200, 200, 200, 429]
        reply = _get(server, "/v1/x")
        assert (
            int(reply.headers["retry-after"]) >= 15 and _error(reply)["type"] == "rate_limit_error"
        )
        with pytest.raises(InvalidStatus) as found:
            _socket(server)
        assert found.value.response.status_code == 429
        assert _get(server, "/health").status_code == 200
        assert server.rejected == ["rate"] * 3
    with guarded(tokens_per_minute=1000) as server:
        assert _get(server, "/v1/spend?1500").status_code == 200
        assert "tokens" in _error(_get(server, "/v1/x"))["message"]
    with guarded(bytes_per_minute=1000) as server:
        assert _post(server, content=bytes(900), headers=JSON).status_code == 200
        assert _post(server, content=bytes(900), headers=JSON).status_code == 200
        assert _post(server, content=b"1", headers=JSON).status_code == 429


def test_so_many_at_once() -> None:
    with guarded(requests_at_once=1) as server:
        with _socket(server) as socket:
            socket.send("x")
            assert socket.recv() == "x"
            assert _error(_get(server, "/v1/x"))["code"] == "concurrency"
        deadline = time.monotonic() + 20
        while _get(server, "/v1/x").status_code != 200:
            assert time.monotonic() < deadline
        assert _post(server, "/v1/fail", json={}).status_code == 500
        assert _get(server, "/v1/x").status_code == 200, "a failure gives its place back"


def test_bodies_of_all_are_bounded_together() -> None:
    with guarded(max_body_bytes=4000, bodies_bytes=6000) as server:
        head = b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with server.connect(head + b"Content-Length: 4000\r\n\r\n" + bytes(3999)) as sock:
            deadline = time.monotonic() + 20
            while _post(server, content=bytes(3000), headers=JSON).status_code != 429:
                assert time.monotonic() < deadline
            sock.sendall(b" ")
            assert b" 200 " in sock.recv(4096)
        assert _post(server, content=bytes(3000), headers=JSON).status_code == 200


def test_a_client_that_stops_reading_is_let_go() -> None:
    ended: list[BaseException] = []

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await application(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send(
                    {"type": "http.response.body", "body": bytes(1 << 20), "more_body": True}
                )
        except ConnectionError as error:
            ended.append(error)
            raise

    with guarded(flood, send_seconds=0.5) as server, server.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 30
        while not ended and time.monotonic() < deadline:
            time.sleep(0.05)
    assert ended


def test_other_sites_only_where_they_are_named() -> None:
    evil = {"Origin": "https://evil.example"}
    ask = {**evil, "Access-Control-Request-Method": "POST"}
    with guarded(api_keys=(KEY,)) as server:
        reply = _get(server, "/v1/x", {**AUTH, **evil})
        assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
        assert httpx.options(server.url, headers=ask, **PLAIN).status_code in (401, 403)
        own = {"Origin": server.url}
        assert _get(server, "/v1/x", {**AUTH, **own}).status_code == 200
    with guarded(api_keys=(KEY,), origins=("https://friend.example",)) as server:
        friend = {"Origin": "https://friend.example"}
        asked = httpx.options(server.url, headers={**ask, **friend}, **PLAIN)
        assert asked.status_code == 200
        reply = _get(server, "/v1/x", friend)
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == "https://friend.example"
        assert _get(server, "/v1/x", {**AUTH, **friend}).status_code == 200
        assert _get(server, "/v1/x", {**AUTH, **evil}).status_code == 403


def test_errors_of_the_application_in_its_own_reading(server: Guarded) -> None:
    """An application that takes the guard's refusal for one of its own does not get to say so."""

    async def careless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await application(scope, receive, send)
            return
        try:
            while (await receive()).get("more_body"):
                pass
            status = 200
        except ApiError:
            status = 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"mine"})

    with guarded(careless, max_body_bytes=1000) as own:
        reply = httpx.post(own.url + "/v1/x", content=iter([bytes(5000)]), headers=JSON, **PLAIN)
        assert reply.status_code == 413 and _error(reply)["code"] == "body_too_large"
