"""Fetch media from allowed hosts: names resolved once, connections to the address that was checked.

No proxies, no cookies, no compression, nothing from the environment; redirects are new requests.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import h11

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.address import Target, check_addresses, check_url
from mmfast.serve.guard.data_url import too_large
from mmfast.serve.guard.errors import ApiError, busy

_HOPS = 3
_MOVED = (301, 302, 303, 307, 308)
_CONNECT = _LOOK_UP = 5.0  # seconds
_HEADERS = 32 << 10
_AT_ONCE = 16
_PIECE = 1 << 16
_LEADS = "the URL leads to"
_running = 0


@functools.cache
def _names() -> ThreadPoolExecutor:
    # Of their own: a name server that does not answer holds a thread for as long as it likes.
    return ThreadPoolExecutor(_AT_ONCE // 2, "mmfast-names")


async def _resolve(host: str, port: int) -> list[str]:
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    async with asyncio.timeout(_LOOK_UP):
        found = await asyncio.get_running_loop().run_in_executor(_names(), look_up)
    return [str(entry[4][0]) for entry in found]


async def _connect(
    address: str, port: int, host: str, secure: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not secure:
        return await asyncio.open_connection(address, port)
    return await asyncio.open_connection(address, port, ssl=_tls(), server_hostname=host)


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


@dataclass(frozen=True)
class Network:
    """How names become addresses and addresses connections; tests have their own.

    Attributes:
        resolve: (host, port) -> all addresses.
        connect: (address, port, host, whether TLS) -> the two ends; a certificate must be `host`'s.
    """

    resolve: Callable[[str, int], Awaitable[list[str]]] = _resolve
    connect: Callable[[str, int, str, bool], Awaitable[Any]] = _connect


NETWORK = Network()  # of this process


async def fetch(
    url: str, config: ServerConfig, param: str | None = None, network: Network | None = None
) -> tuple[str, bytes]:
    """Get what is behind a URL.

    Returns:
        What it claims to be, and its bytes.

    Raises:
        ApiError: 400: the URL, or one it leads to, is not allowed, or does not answer in time;
            413: there is more than allowed; 429: too many are fetched.
    """
    global _running
    if not config.remote_hosts:
        raise ApiError(
            400,
            "media from other hosts are off here: send a data: URL",
            code="remote_media_off",
            param=param,
        )
    if _running >= _AT_ONCE:
        raise busy(f"{_AT_ONCE} media are being fetched already", code="fetching")
    _running += 1
    try:
        async with asyncio.timeout(config.remote_seconds):
            return await _follow(url, config, param, network or NETWORK)
    except TimeoutError:
        text = f"fetching took over {config.remote_seconds:g} s: send a data: URL"
        raise ApiError(400, text, code="fetch_timeout", param=param) from None
    except (OSError, h11.RemoteProtocolError, h11.LocalProtocolError, UnicodeError):
        text = "the media's host does not answer as it should: check the URL"
        raise ApiError(400, text, code="fetch_failed", param=param) from None
    finally:
        _running -= 1


async def _follow(
    url: str, config: ServerConfig, param: str | None, network: Network
) -> tuple[str, bytes]:
    before: Target | None = None
    for _ in range(_HOPS + 1):
        try:
            target = check_url(url, config.remote_hosts, param)
            if before is not None and before.scheme == "https" and target.scheme == "http":
                raise _astray("one without TLS", param)
            address = check_addresses(
                await network.resolve(target.host, target.port), target.host, param
            )
        except ApiError as error:  # where a host leads to is not for everybody to know
            if before is None or error.message.startswith(_LEADS):
                raise
            raise _astray("one that is not allowed", param) from None
        found = await _get(target, address, config.remote_bytes, param, network)
        if not isinstance(found, str):
            return found
        before, url = target, urljoin(target.url, found)
    raise _astray(f"others over {_HOPS} times", param)


def _astray(where: str, param: str | None) -> ApiError:
    return ApiError(400, f"{_LEADS} {where}", code="url_not_allowed", param=param)


async def _get(
    target: Target, address: str, most: int, param: str | None, network: Network
) -> str | tuple[str, bytes]:
    """One request: where it leads, or what is there."""
    async with asyncio.timeout(_CONNECT):
        reader, writer = await network.connect(
            address, target.port, target.host, target.scheme == "https"
        )
    try:
        conn = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADERS)
        writer.write(_request(conn, target))
        await writer.drain()
        return await _answer(conn, reader, most, param)
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


def _request(conn: h11.Connection, target: Target) -> bytes:
    headers = [
        ("Host", target.host_header),
        ("User-Agent", "mmfast"),
        ("Accept", "image/*, video/*, audio/*"),
        ("Accept-Encoding", "identity"),
        ("Connection", "close"),
    ]
    request = h11.Request(method="GET", target=target.path, headers=headers)
    return (conn.send(request) or b"") + (conn.send(h11.EndOfMessage()) or b"")


async def _answer(
    conn: h11.Connection, reader: asyncio.StreamReader, most: int, param: str | None
) -> str | tuple[str, bytes]:
    body = bytearray()
    claimed = ""
    while True:
        event = conn.next_event()
        if event is h11.NEED_DATA:
            conn.receive_data(await reader.read(_PIECE))
        elif isinstance(event, h11.Response):
            headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in event.headers}
            if event.status_code in _MOVED and "location" in headers:
                return headers["location"]
            _check_reply(event.status_code, headers, most, param)
            claimed = headers.get("content-type", "").split(";")[0].strip().lower()
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > most:
                raise too_large(len(body), most, param)
        elif isinstance(event, h11.EndOfMessage):
            return claimed, bytes(body)
        elif isinstance(event, h11.ConnectionClosed):
            raise ConnectionError("closed early")


def _check_reply(status: int, headers: dict[str, str], most: int, param: str | None) -> None:
    """Refuse by status and headers."""
    if status != 200:
        text = f"the media's host answers {status}: check the URL"
        raise ApiError(400, text, code="fetch_failed", param=param)
    if headers.get("content-encoding", "identity") != "identity":
        text = "the media's host sends them compressed, which nobody asked for"
        raise ApiError(400, text, code="fetch_failed", param=param)
    length = headers.get("content-length", "")
    if length.isdigit() and len(length) < 19 and int(length) > most:
        raise too_large(int(length), most, param)
