"""A small application behind the guard on a real server, and servers elsewhere to fetch from."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.caller import caller_of
from mmfast.serve.guard.fetch import Network
from mmfast.serve.guard.shield import Shield, uvicorn_options

KEY = "correct-horse-battery"
AUTH = {"Authorization": f"Bearer {KEY}"}
PUBLIC = "93.184.215.14"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Counts bodies, streams when asked, fails when asked, echoes on WebSockets."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": f"{message['type']}.complete"})
    elif scope["type"] == "websocket":
        await _talk(receive, send)
    else:
        await _answer(scope, receive, send)


async def _talk(receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        if message["text"] == "fail":
            raise RuntimeError("as asked")
        await send({"type": "websocket.send", "text": message["text"]})


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/v1/fail":
        raise RuntimeError("secret of /root/.ssh")
    if scope["path"] == "/v1/wait":
        await asyncio.sleep(float(scope["query_string"]))
    if scope["path"] == "/v1/spend":
        caller_of(scope).spend(int(scope["query_string"]))
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/v1/stream":
        for i in range(3):
            await send({"type": "http.response.body", "body": b"%d\n" % i, "more_body": True})
            await asyncio.sleep(0.15)
    await send({"type": "http.response.body", "body": str(size).encode()})


@dataclass
class Guarded:
    """Where the server listens, and what it counted."""

    port: int
    shield: Shield
    rejected: list[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        sock.sendall(data)
        return sock


@contextlib.contextmanager
def guarded(app: Any = application, **options: Any) -> Iterator[Guarded]:
    """Serve an application behind the guard, on uvicorn, in a thread."""
    config = ServerConfig(**options)
    rejected: list[str] = []
    shield = Shield(app, config, rejected.append)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(shield, **uvicorn_options(config)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    while not server.started:
        thread.join(0.01)
    try:
        yield Guarded(listening.getsockname()[1], shield, rejected)
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Elsewhere:
    """The hosts of a small internet: names with addresses, all served by one server here.

    Args:
        names: Addresses of each name, a list for every time it is asked.
    """

    def __init__(self, names: dict[str, list[list[str]]]) -> None:
        self._names = {name: list(found) for name, found in names.items()}
        self.connected: list[str] = []
        self.asked: list[str] = []
        self.pages: dict[str, bytes] = {}
        self.requests: list[bytes] = []
        self.port = 0

    @property
    def network(self) -> Network:
        return Network(self._resolve, self._connect)

    async def _resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        found = self._names[host]
        return found.pop(0) if len(found) > 1 else found[0]

    async def _connect(self, address: str, port: int, host: str, secure: bool) -> Any:
        self.connected.append(address)
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(request)
            path = request.split()[1].decode()
            await self._reply(writer, path)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter, path: str) -> None:
        if path.startswith("/endless"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n\r\n")
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()
        if path.startswith("/trickle"):
            while True:
                writer.write(b"H")
                await asyncio.sleep(0.05)
        writer.write(self.pages[path])
        await writer.drain()

    @contextlib.asynccontextmanager
    async def serving(self) -> Any:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


def ok(data: bytes, kind: str = "image/png", more: str = "") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data


def moved(url: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {url}\r\nContent-Length: 0\r\n\r\n".encode()
