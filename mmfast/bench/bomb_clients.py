"""Clients that mean harm, each with the status that it was answered with."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import quote, unquote

from mmfast.bench import bombs
from mmfast.serve.guard.data_url import encode

_CHAT = "/v1/chat/completions"
_JSON = {"Content-Type": "application/json"}
_PATIENCE = 60.0  # seconds


@dataclass(frozen=True)
class Bomb:
    """One of them.

    Attributes:
        name: What it is.
        sent: Bytes that it has to send; 0 where it never ends.
        fire: Called with the server's port; returns the status.
        waits: The option of the server that says how long it is patient with this one.
    """

    name: str
    sent: int
    fire: Callable[[int], int]
    waits: str = ""


def chat(port: int, kind: str, url: str) -> int:
    """Ask about an image or a clip; the status."""
    return post(port, json.dumps(_asked(kind, url)).encode())


def _asked(kind: str, url: str) -> dict[str, Any]:
    part = {"type": f"{kind}_url", f"{kind}_url": {"url": url}}
    content = [part, {"type": "text", "text": "What is it?"}]
    return {"model": "echo", "messages": [{"role": "user", "content": content}]}


def post(port: int, body: Any, chunked: bool = False) -> int:
    """The status of a request."""
    sent = {**_JSON, **({"Transfer-Encoding": "chunked"} if chunked else {})}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    with contextlib.closing(connection):
        with contextlib.suppress(ConnectionError):  # it stops reading; what it says is there
            connection.request("POST", _CHAT, body, sent, encode_chunked=chunked)
        return connection.getresponse().status


def all_bombs() -> list[Bomb]:
    """All of them."""
    found = [_media(*each) for each in _files()]
    found += [Bomb(name, len(body), partial(post, body=body)) for name, body in _bodies()]
    found += [
        Bomb("endless body", 0, _endless),
        Bomb("10,000 headers", 100_000, _headers),
        Bomb("slow-loris, headers", 0, lambda port: _slow(port, _START), "header_seconds"),
        Bomb("slow-loris, body", 0, lambda port: _slow(port, _HALF), "body_seconds"),
    ]
    return found + [_address(*each) for each in _urls()]


def _media(name: str, kind: str, claimed: str, data: bytes) -> Bomb:
    body = json.dumps(_asked(kind, encode(data, claimed))).encode()
    return Bomb(name, len(body), lambda port: post(port, body))


def _files() -> Iterator[tuple[str, str, str, bytes]]:
    clip = bombs.mp4()
    yield "PNG of 500 MB", "image", "image/png", bombs.png()
    yield "mp4 of 4.4 GB", "video", "video/mp4", clip
    yield "mp4, cut in half", "video", "video/mp4", clip[: len(clip) // 2]
    yield "PNG, cut in half", "image", "image/png", bombs.picture(width=2000, height=2000)[:3000]
    yield "animated GIF of 3.6 GB", "video", "image/gif", bombs.gif()
    yield "animated WebP of 48 GB", "video", "image/webp", bombs.webp()
    yield "WebP of 16,383 squared", "image", "image/webp", bombs.webp(16_383, 3)
    yield "zip as a video", "video", "video/mp4", bombs.archive()
    yield "playlist as a video", "video", "video/mp4", b"#EXTM3U\nfile:///etc/passwd\n" * 9


def _bodies() -> Iterator[tuple[str, bytes]]:
    yield "JSON, 100,000 deep", b'{"messages":' + b"[" * 100_000
    yield "JSON of 4 million lists", b'{"messages":[' + b"[]," * 4_000_000 + b"[]]}"
    yield "base64 that is none", json.dumps(_asked("image", "data:image/png;base64,!!")).encode()


def _urls() -> Iterator[tuple[str, str]]:
    good = "http://good.example/to?"
    for where in (
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::ffff:127.0.0.1]/",
        "http://[2002:7f00:1::]/",
        "http://[64:ff9b::7f00:1]/",
        "http://inside.example/",
        "file:///etc/passwd",
    ):
        yield f"redirect to {where}", good + quote(where)
    yield "redirects without end", good + quote(good)
    yield "name that changes", "http://rebind.example/to?" + quote("http://rebind.example/picture")
    yield "name of two addresses", "http://half.example/picture"
    yield "endless file", "http://good.example/endless"
    for where in (
        "file:///etc/passwd",
        "/etc/passwd",
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0177.0.0.1/",
        "http://0x7f.1/",
        "http://[::ffff:7f00:1]/",
        "http://good.example@127.0.0.1/",
        "http://good.example\\@127.0.0.1/",
    ):
        yield where, where


def _address(name: str, url: str) -> Bomb:
    return Bomb(name, len(url), lambda port: chat(port, "image", url))


def _endless(port: int) -> int:
    def pieces() -> Iterator[bytes]:
        end = time.monotonic() + _PATIENCE
        yield b'{"messages": "'
        while time.monotonic() < end:
            yield b"a" * (1 << 16)

    return post(port, pieces(), chunked=True)


_START = b"GET / HTTP/1.1\r\n"
_HALF = f"POST {_CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()
_HALF += b"Content-Length: 1000\r\n\r\n{"


def _headers(port: int) -> int:
    lines = b"".join(b"x-%05d: a\r\n" % i for i in range(10_000))
    with socket.create_connection(("127.0.0.1", port), _PATIENCE) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        return _status(sock)


def _slow(port: int, start: bytes) -> int:
    """A byte now and then."""
    with socket.create_connection(("127.0.0.1", port), _PATIENCE) as sock:
        sock.sendall(start)
        sock.settimeout(0.1)
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                return _status(sock)
            sock.sendall(b"x")
        raise TimeoutError("the server waits for ever")


def _status(sock: socket.socket) -> int:
    line = sock.recv(4096).split(b"\r\n")[0].split()
    return int(line[1]) if len(line) > 1 else 0


class _Elsewhere(BaseHTTPRequestHandler):
    """`/to?URL` leads there, `/endless` never ends, all else is a picture."""

    def do_GET(self) -> None:
        """Answer."""
        path, _, where = self.path.partition("?")
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", unquote(where))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = bombs.picture()
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        if path != "/endless":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        with contextlib.suppress(OSError):
            while path == "/endless":
                self.wfile.write(bytes(1 << 16))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextlib.contextmanager
def elsewhere() -> Iterator[int]:
    """The server that the small internet is; its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
