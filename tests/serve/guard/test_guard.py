"""What the guard refuses by itself: errors, keys, quotas, JSON, URLs of data, logs."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MediaError, ModelError, SpecError
from mmfast.serve.config import ServerConfig
from mmfast.serve.engine.base import BusyError
from mmfast.serve.guard import logs
from mmfast.serve.guard.body import JsonDepth, loads
from mmfast.serve.guard.caller import CallerLimits, CallerQuotas, Keys, from_elsewhere, given_key
from mmfast.serve.guard.errors import ApiError, api_error, body, reply, scrub
from mmfast.serve.guard.fetch import check_claim, parse_data_url


def test_errors_have_one_shape() -> None:
    cases = [
        (SpecError("unknown method"), 400, "invalid_request_error"),
        (MediaError("broken"), 400, "invalid_request_error"),
        (ModelError("cannot"), 400, "invalid_request_error"),
        (BusyError("full", 2.3), 429, "rate_limit_error"),
        (ApiError(401, "no"), 401, "authentication_error"),
        (ApiError(404, "no"), 404, "not_found_error"),
        (RuntimeError("x"), 500, "server_error"),
    ]
    for error, status, kind in cases:
        assert api_error(error).status == status
        assert body(error)["error"]["type"] == kind
        assert set(body(error)["error"]) == {"message", "type", "code", "param"}
    assert (b"retry-after", b"3") in reply(BusyError("full", 2.3))[1]


def test_what_went_wrong_inside_is_not_told() -> None:
    for error in (RuntimeError("password 123"), KeyError("/root/x"), RecursionError()):
        text = body(error)["error"]["message"]
        assert "password" not in text and "/root" not in text and "request's id" in text


def test_no_path_of_the_server_is_told() -> None:
    here = str(__import__("pathlib").Path(__file__).resolve())
    for path in (here, "/tmp/x", "/etc/passwd", "/proc/self/fd/5", "/usr/lib/python3/a.py"):
        told = scrub(f"file '{path}' is not there")
        assert told == "file '<path>' is not there", path
    for kept in ("see /v1/models and https://a.example/tmp/x", "3/4 of a/b", "image/png"):
        assert scrub(kept) == kept
    assert scrub("too long: cut it, or raise Limits(frames=...)") == "too long: cut it"
    assert "\n" not in scrub("a\nb") and len(scrub("x" * 9999)) <= 500


def test_keys() -> None:
    hashed = "sha256:" + hashlib.sha256(b"second").hexdigest()
    keys = Keys(("first", hashed))
    assert keys and not Keys(())
    first, second = keys.owner(b"first"), keys.owner(b"second")
    assert first and second and first != second and "first" not in first
    for wrong in (b"", b"third", b"firs", b"first ", None, hashed.encode()):
        assert keys.owner(wrong) is None
    assert "first" not in str(vars(keys))


def test_where_a_key_is_looked_for() -> None:
    basic = base64.b64encode(b"anyone:k").decode()
    sent = [("Bearer k", b"k"), ("bearer  k ", b"k"), (f"Basic {basic}", b"k"), ("Digest k", None)]
    for value, key in sent:
        assert given_key([(b"authorization", value.encode())], False) == key
    assert (
        given_key([(b"authorization", b"Bearer k"), (b"authorization", b"Bearer j")], True) is None
    )
    protocols = [(b"sec-websocket-protocol", b"realtime, openai-insecure-api-key.k")]
    assert given_key(protocols, True) == b"k"
    assert given_key(protocols, False) is None
    assert given_key([(b"authorization", b"Basic ###")], False) is None


def _browser(origin: str, host: str) -> list[tuple[bytes, bytes]]:
    return [(b"origin", origin.encode()), (b"host", host.encode())]


def test_pages_of_other_sites_are_told_apart() -> None:
    for local, mine in ((True, "localhost:8000"), (True, "127.0.0.1:8000"), (False, "a.example")):
        assert not from_elsewhere([], (), local), "no browser"
        assert not from_elsewhere(_browser(f"http://{mine}", mine), (), local)
        assert from_elsewhere(_browser("https://evil.example", mine), (), local)
        assert from_elsewhere(_browser("null", mine), (), local)
        assert not from_elsewhere(
            _browser("https://ok.example", mine), ("https://ok.example/",), local
        )
    rebound = _browser("http://evil.example:8000", "evil.example:8000")
    assert from_elsewhere(rebound, (), True), "a name that was made to lead here"
    assert not from_elsewhere(rebound, (), False)
    assert not from_elsewhere(_browser("https://a.example", "a.example:443"), (), False)


def test_quotas_refill_and_say_when() -> None:
    now = [0.0]
    quotas = CallerQuotas(CallerLimits(requests=6, tokens=60), lambda: now[0])
    for _ in range(6):
        quotas.enter("a")
    with pytest.raises(ApiError) as found:
        quotas.enter("a")
    assert found.value.status == 429 and found.value.headers["Retry-After"] == "10"
    quotas.enter("b")  # another one is not meant
    now[0] += 10.01
    quotas.enter("a")
    with pytest.raises(ApiError):
        quotas.enter("a")
    quotas.spend("b", "tokens", 180)  # two minutes more than a minute's worth
    now[0] += 60
    assert quotas.check("b", "tokens") is not None
    with pytest.raises(ApiError, match="tokens"):
        quotas.enter("b")
    now[0] += 62
    quotas.enter("b")


def test_quotas_at_once_and_of_many() -> None:
    quotas = CallerQuotas(CallerLimits(running=2))
    quotas.enter("a")
    quotas.enter("a")
    with pytest.raises(ApiError, match="2 requests"):
        quotas.enter("a")
    quotas.leave("a")
    quotas.enter("a")
    for i in range(20_000):
        quotas.enter(f"ip:{i}")
        quotas.leave(f"ip:{i}")
    assert len(quotas._callers) <= 10_000
    with pytest.raises(ApiError):
        quotas.enter("a")  # those that run are not forgotten


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


_JSON = st.recursive(
    st.none() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=60)
@given(_JSON, st.integers(0, 6), st.booleans(), st.data())
def test_depth_is_what_a_parser_finds(value: Any, most: int, plain: bool, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=plain).encode("utf-8", "surrogatepass")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    counter, deep = JsonDepth(most), False
    try:
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            counter.feed(text[start:end])
    except ApiError:
        deep = True
    assert deep == (_depth(value) > most)


def test_depth_is_the_same_wherever_a_text_is_cut() -> None:
    text = json.dumps({'a"\\': ['\\"[[{', "\\\\", '"']}).encode()
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = (text[:first], text[first:second], text[second:])
            counter = JsonDepth(2)
            for piece in pieces:
                counter.feed(piece)
            with pytest.raises(ApiError):
                shallow = JsonDepth(1)
                for piece in pieces:
                    shallow.feed(piece)


def test_json_that_would_fell_a_parser() -> None:
    for text, code in (
        (b"[" * 100_000, "too_deep"),
        (b'{"a":' * 100_000, "too_deep"),
        (b"[" + b"[]," * 205_000 + b"[]]", "too_many_values"),
        (b'["' + b'","' * 205_000 + b'"]', "too_many_values"),
        (b"nonsense", "invalid_json"),
        ("\ud800", "invalid_json"),
        (b"1" * 5000, "invalid_json"),
    ):
        with pytest.raises(ApiError) as found:
            loads(text, 32)
        assert found.value.code == code
    long = '{"a": "' + '\\"[' * 100_000 + '"}'
    assert len(loads(long, 1)["a"]) == 200_000


def test_data_urls_are_strict() -> None:
    assert parse_data_url("data:image/PNG;base64,AAAA", 99) == ("image/png", b"\0\0\0")
    assert parse_data_url("data:image/png;charset=utf-8;base64,AAAA", 99)[1] == b"\0\0\0"
    assert parse_data_url("data:;base64,AAAA", 3) == ("", b"\0\0\0")
    bad = ["data:", "data:image/png,AAAA", "data:image/png;base64", "DATA:image/png;base64 ,AAAA"]
    bad += [
        f"data:image/png;base64,{t}" for t in ("", "A", "AA", "AAA", "AA\nAA", "AA==AA==", "ÄAAA")
    ]
    bad += ["data:image/png;base64,AAAA%3D", "data:image/png;base64,A-_A", "data:../x;base64,AAAA"]
    for url in bad:
        with pytest.raises(ApiError) as found:
            parse_data_url(url, 99)
        assert found.value.status == 400, url
    with pytest.raises(ApiError) as found:
        parse_data_url("data:;base64," + "A" * 1000, 700)
    assert found.value.status == 413


def test_what_media_claim_must_be_true() -> None:
    for claimed, kind, wanted in (
        ("image/png", "png", "image"),
        ("", "png", "image"),
        ("application/octet-stream", "mp4", "video"),
        ("image/gif", "gif", "video"),
        ("video/x-unheard-of", "mkv", "video"),
        ("audio/mpeg", "mp3", "sound"),
    ):
        check_claim(claimed, kind, wanted)
    for claimed, kind, wanted in (
        ("image/png", "jpeg", "image"),
        ("video/mp4", "", "video"),
        ("text/html", "png", "image"),
        ("video/mp4", "mp4", "image"),
        ("audio/wav", "wav", "video"),
        ("image/png", "png", "sound"),
    ):
        with pytest.raises(ApiError):
            check_claim(claimed, kind, wanted)


@pytest.fixture
def logged() -> Any:
    """The log of a server, as text."""

    def start(**options: Any) -> io.StringIO:
        handler = logs.set_up(ServerConfig(**options))
        handler.setStream(out := io.StringIO())
        return out

    loggers = [logging.getLogger(name) for name in ("mmfast", "uvicorn", "uvicorn.error")]
    before = [(each, list(each.handlers), each.level, each.propagate) for each in loggers]
    yield start
    for each, handlers, level, propagate in before:
        each.handlers[:], each.propagate = handlers, propagate
        each.setLevel(level)


def test_logs_as_json_have_no_keys_and_no_forged_lines(logged: Any) -> None:
    out = logged(json_logs=True, api_keys=("sesame-open",))
    logging.getLogger("mmfast.serve").warning("given sesame-open")
    logs.request(False, "GET", "/v1/x\n2026 ok", 200, {"id": "r1", "ms": 1.5, "tokens": None})
    try:
        raise RuntimeError("sesame-open")
    except RuntimeError:
        logging.getLogger("mmfast.serve").exception("failed")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert len(lines) == 3 and "sesame" not in out.getvalue()
    assert lines[1]["status"] == 200 and lines[1]["id"] == "r1" and "tokens" not in lines[1]
    assert "RuntimeError" in lines[2]["trace"]


def test_logs_for_people(logged: Any) -> None:
    out = logged()
    logs.request(False, "GET", "/a\nb\x1b[2J", 404, {"id": "r1"})
    logs.request(True, "GET", "/health", 200, {"id": "r2"})
    (line,) = out.getvalue().splitlines()
    assert "404" in line and "id=r1" in line and "\x1b" not in line
    assert logs.text("what I asked", ServerConfig()) == "<12 letters>"
    assert logs.text("a\nb", ServerConfig(log_text=True)) == "a\\nb"
