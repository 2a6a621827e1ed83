"""Media from other hosts: which URLs, which addresses, how far, how long, how much."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from guard_tools import PUBLIC, Elsewhere, moved, ok

from mmfast.bench.suites.serve import hostile as bombs
from mmfast.serve.config import ServerConfig
from mmfast.serve.guard import fetch as module
from mmfast.serve.guard.errors import ApiError
from mmfast.serve.guard.fetch import check_url, fetch, is_public
from mmfast.serve.guard.media import load_media

PRIVATE = (
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "192.0.0.1"),
    *("169.254.169.254", "100.64.0.1", "100.100.100.200", "198.18.0.1", "203.0.113.1"),
    *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
    *("192.88.99.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254"),
    *("fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:8.8.8.8", "nonsense"),
    *("::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::8.8.8.8", "64:ff9b:1::1", "2001:db8::1"),
    *("2002:7f00:1::", "2002:808:808::", "2001:0:7f00:1::"),
)
HOSTS = ("good.example", ".cdn.example", "odd.example:8443", "8.8.8.8")


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


def test_public_addresses() -> None:
    assert all(map(is_public, (PUBLIC, "8.8.8.8", "2606:2800:21f:cb07:6820:80da:af6b:8b2c")))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://good.example/x",
        "gopher://good.example/x",
        "//good.example/x",
        "http:///x",
        "http://",
        "https://evil.example/x",
        "https://good.example.evil.example/x",
        "https://cdn.example.evil.example/",
        "https://evilgood.example/",
        "https://xcdn.example/",
        "https://good.example:8080/x",
        "https://odd.example/x",
        "https://good.example:99999/",
        "https://user@good.example/x",
        "https://good.example@evil.example/",
        "https://good.example:pass@evil.example/",
        "https://good.example\\@evil.example/",
        "https://evil.example\\.good.example/",
        "https://good.example\t/",
        "https://good.example\n.evil.example/",
        "https://good.example /",
        "https://g\u00f6od.example/",
        "https://\u2488\u2488.example/",
        "https://" + "a" * 3000,
    ],
)
def test_urls_that_are_not_allowed(url: str) -> None:
    with pytest.raises(ApiError) as found:
        check_url(url, HOSTS)
    assert found.value.status == 400


@pytest.mark.parametrize(
    "host",
    [
        *(
            "2130706433",
            "0177.0.0.1",
            "0x7f.0.0.1",
            "0x7f000001",
            "127.1",
            "127.0.1",
            "017700000001",
        ),
        *("0x7f.1", "127.0.0.01", "08.8.8.8", "[::ffff:127.0.0.1%25eth0]", "[0:0:0:0:0:0:0:1]"),
        *("[::ffff:7f00:1", "-a.example", "a..example", "a_b.example", "1.2.3.4.5", "example.0x1"),
    ],
)
def test_unusual_spellings_are_refused_even_where_every_host_is_allowed(host: str) -> None:
    with pytest.raises(ApiError):
        check_url(f"http://{host}/", ("*",))


def test_urls_that_are_allowed() -> None:
    for url, host, port, path in (
        ("https://good.example/a.png?b=c#d", "good.example", 443, "/a.png?b=c"),
        ("http://GOOD.example.", "good.example", 80, "/"),
        ("https://a.cdn.example/x", "a.cdn.example", 443, "/x"),
        ("https://odd.example:8443/x", "odd.example", 8443, "/x"),
        ("http://8.8.8.8/x", "8.8.8.8", 80, "/x"),
    ):
        target = check_url(url, HOSTS)
        assert (target.host, target.port, target.path) == (host, port, path)
    assert check_url("http://[2606:2800::1]:81/", ("*", "2606:2800::1:81")).host_header


def _fetch(net: Elsewhere, url: str, **options: Any) -> tuple[str, bytes]:
    options.setdefault("remote_hosts", (".example",))

    async def run() -> tuple[str, bytes]:
        async with net.serving():
            return await fetch(url, ServerConfig(**options), network=net.network)

    return asyncio.run(run())


def _refused(net: Elsewhere, url: str, **options: Any) -> ApiError:
    with pytest.raises(ApiError) as found:
        _fetch(net, url, **options)
    assert 400 <= found.value.status < 500
    assert "127.0.0.1" not in found.value.message and "10.0" not in found.value.message
    return found.value


def test_media_come_from_the_address_that_was_checked() -> None:
    net = Elsewhere({"good.example": [[PUBLIC, "8.8.8.8"]]})
    net.pages["/a.png?x=1"] = ok(b"data")
    assert _fetch(net, "http://good.example/a.png?x=1") == ("image/png", b"data")
    assert net.connected == [PUBLIC] and net.asked == ["good.example"]
    request = net.requests[0].lower()
    assert b"\r\nhost: good.example\r\n" in request and b"identity" in request
    assert b"cookie" not in request and b"authorization" not in request


def test_other_hosts_are_off_unless_named() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    assert _refused(net, "http://good.example/", remote_hosts=()).code == "remote_media_off"
    assert _refused(net, "http://good.example/", remote_hosts=("a.example",)).code
    assert net.asked == [] and net.connected == []


def test_a_name_with_one_private_address_is_refused() -> None:
    for addresses in (["127.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:127.0.0.1"], []):
        net = Elsewhere({"bad.example": [addresses]})
        _refused(net, "http://bad.example/")
        assert net.connected == []


def test_a_name_that_changes_is_asked_once() -> None:
    net = Elsewhere({"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    net.pages["/"] = ok(b"data")
    assert _fetch(net, "http://rebind.example/")[1] == b"data"
    assert net.connected == [PUBLIC] and len(net.asked) == 1
    again = Elsewhere({"rebind.example": [[PUBLIC], ["127.0.0.1"]]})
    again.pages["/"] = moved("/two")
    _refused(again, "http://rebind.example/")
    assert again.connected == [PUBLIC], "the second answer is checked anew"


TRAPS = [
    "http://127.0.0.1/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:127.0.0.1]/",
    "http://[2002:7f00:1::]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[::1]/",
    "http://2130706433/",
    "http://inside.example/",
    "http://user:pw@good.example/",
    "file:///etc/passwd",
    "gopher://good.example/",
    "//127.0.0.1/",
]


@pytest.mark.parametrize("target", TRAPS)
@pytest.mark.parametrize("hosts", [("*",), (".example",)])
def test_redirects_are_checked_again(target: str, hosts: tuple[str, ...]) -> None:
    net = Elsewhere({"good.example": [[PUBLIC]], "inside.example": [["10.0.0.1"]]})
    literal = target.split("//")[1].strip("/").split("/")[0].strip("[]")
    net._names.setdefault(literal, [[literal]])
    net.pages["/"] = moved(target)
    _refused(net, "http://good.example/", remote_hosts=hosts)
    assert net.connected == [PUBLIC]


def test_a_guard_that_trusts_redirects_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth: without the check of addresses it connects inside."""
    monkeypatch.setattr(module, "check_addresses", lambda found, host, param: found[0])
    net = Elsewhere({"good.example": [[PUBLIC]], "inside.example": [["10.0.0.1"]]})
    net.pages = {"/": moved("http://inside.example/secret"), "/secret": ok(b"secret")}
    assert _fetch(net, "http://good.example/")[1] == b"secret"
    assert net.connected == [PUBLIC, "10.0.0.1"]


def test_redirects_end() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    for i in range(5):
        net.pages[f"/{i}"] = moved(f"/{i + 1}")
    net.pages["/3"] = ok(b"data")
    assert _fetch(net, "http://good.example/0")[1] == b"data"
    net.pages["/3"] = moved("/4", 307)
    assert "3 times" in _refused(net, "http://good.example/0").message
    assert len(net.connected) == 8


def test_no_way_from_tls_to_none() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    net.pages = {"/": moved("http://good.example/plain"), "/plain": ok(b"data")}
    assert "TLS" in _refused(net, "https://good.example/").message


def test_bytes_are_counted_whatever_is_said() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    net.pages["/said"] = ok(bytes(5000))
    net.pages["/zip"] = ok(b"x", more="Content-Encoding: gzip\r\n")
    for path in ("/said", "/endless"):
        assert _refused(net, f"http://good.example{path}", remote_bytes=4000).status == 413
    assert _refused(net, "http://good.example/zip").code == "fetch_failed"


def test_time_is_bounded() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    start = time.monotonic()
    found = _refused(net, "http://good.example/trickle", remote_seconds=0.4)
    assert found.code == "fetch_timeout" and time.monotonic() - start < 15


def test_what_does_not_answer_as_it_should() -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    net.pages = {
        "/404": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
        "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc",
        "/nothing": b"",
        "/nonsense": b"SSH-2.0-OpenSSH\r\n\r\n",
        "/headers": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000,
        "/nowhere": b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
    }
    for path in net.pages:
        assert _refused(net, f"http://good.example{path}").code == "fetch_failed", path


def test_media_of_a_url_are_what_the_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Elsewhere({"good.example": [[PUBLIC]]})
    net.pages = {
        "/a.png": ok(bombs.picture()),
        "/page": ok(bombs.picture(), "text/html"),
        "/zip.mp4": ok(bombs.archive(), "video/mp4"),
    }
    monkeypatch.setattr(module, "NETWORK", net.network)
    config = ServerConfig(remote_hosts=("good.example",))

    async def run() -> None:
        async with net.serving():
            media = await load_media("http://good.example/a.png", "image", config)
            assert media.shot.pixels.shape == (48, 64, 3)
            for path, kind in (("page", "image"), ("zip.mp4", "video")):
                with pytest.raises(ApiError):
                    await load_media(f"http://good.example/{path}", kind, config)

    asyncio.run(run())
