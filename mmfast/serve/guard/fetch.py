"""Media from `data:` URLs and from allowed hosts.

Base64 is strict and measured before it is decoded; claimed media types are checked. Fetching is
protected against server-side request forgery: a name is resolved once, and the
connection goes to the address that was checked. No proxies, cookies or compression, nothing from
the environment; every redirect is checked like a new request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin, urlsplit

import h11

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.errors import ApiError, bad_request, busy

# Type and subtype, parameters, and base64; no other form is accepted.
_HEAD = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9.+-]+=[^;,]*)*);base64,", re.IGNORECASE)
_LONGEST_HEAD = 256
# Media type -> kinds that the first bytes may show; other types are not checked.
_CLAIMS = {
    "image/png": ("png",), "image/jpeg": ("jpeg",), "image/jpg": ("jpeg",), "image/gif": ("gif",),
    "image/webp": ("webp",), "image/bmp": ("bmp",), "image/tiff": ("tiff",),
    "image/avif": ("avif",), "video/mp4": ("mp4",), "video/quicktime": ("mp4",),
    "video/webm": ("mkv",), "video/x-matroska": ("mkv",), "video/x-msvideo": ("avi",),
    "audio/wav": ("wav",), "audio/x-wav": ("wav",), "audio/mpeg": ("mp3",), "audio/mp3": ("mp3",),
    "audio/flac": ("flac",), "audio/ogg": ("ogg",),
}  # fmt: skip


def parse_data_url(url: str, most: int, param: str | None = None) -> tuple[str, bytes]:
    """Return the media type and the bytes of a `data:` URL; `ApiError` 400 or 413 if it is bad."""
    head = _HEAD.match(url[:_LONGEST_HEAD])
    if head is None:
        raise bad_request(
            "a data: URL has the form data:image/png;base64,...: give a media type and base64",
            "invalid_data_url",
            param,
        )
    return (head[1] or "").lower(), decode_base64(url, most, param, head.end())


def decode_base64(text: str, most: int, param: str | None = None, start: int = 0) -> bytes:
    """Decode strict base64 from `start` on; 400 where it is malformed, 413 where too large."""
    size = (len(text) - start) // 4 * 3
    if size - 2 > most:
        raise too_large(size, most, param)
    try:
        data = binascii.a2b_base64(text[start:].encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise bad_request(
            "the base64 is broken: send it whole, without spaces", "invalid_base64", param
        ) from None
    if not data:
        raise bad_request("the media are empty: send them whole", "invalid_media", param)
    return data


def too_large(size: int, most: int, param: str | None) -> ApiError:
    """Return the error 413 for media of more than `most` bytes."""
    text = f"media of {size:,} bytes or more, the limit is {most:,}: cut or re-encode them"
    return ApiError(413, text, code="media_too_large", param=param)


def check_claim(claimed: str, kind: str, wanted: str, param: str | None = None) -> None:
    """Refuse media that differ from their media type or from the purpose of the field.

    `claimed` is the media type, `kind` follows from the first bytes (both "" where unknown), and
    `wanted` is `image`, `video` or `sound`.
    """
    top = claimed.partition("/")[0]
    allowed = {"image": ("image",), "video": ("video", "image"), "sound": ("audio", "video")}
    generic = top in ("", "application", "binary")  # application/octet-stream claims nothing
    right = generic or top in allowed[wanted]
    claims = _CLAIMS.get(claimed)
    if not right or (claims is not None and kind not in claims):
        raise bad_request(
            f"the {wanted} claims to be {claimed!r} but is {kind or 'something else'!s}: "
            f"give {wanted} data and its true media type",
            "media_type_mismatch",
            param,
        )


def data_url(data: bytes, claimed: str) -> str:
    """Return the `data:` URL of some bytes."""
    return f"data:{claimed};base64,{base64.b64encode(data).decode()}"


PORTS = {"http": 80, "https": 443}
_LONGEST = 2048
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\.?")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?")  # inet_aton takes it for a part of an address
# Addresses that stand for others, or for services of a cloud, and that `ipaddress` calls global.
_NEVER = tuple(
    ipaddress.ip_network(each)
    for each in (
        *("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96"),  # IPv4 in IPv6, in three ways
        *("64:ff9b::/96", "64:ff9b:1::/48"),  # NAT64, RFC 6052 and 8215
        *("2002::/16", "2001::/32", "192.88.99.0/24"),  # 6to4, Teredo, 6to4's relays
        *("fec0::/10", "100.64.0.0/10"),  # once site-local; shared with a carrier
        *("168.63.129.16/32", "192.0.0.0/24"),  # a cloud's own services
    )
)


@dataclass(frozen=True)
class CheckedUrl:
    """A checked URL without parts that two parsers could read differently."""

    scheme: str
    host: str
    port: int
    path: str  # with its query

    @property
    def host_header(self) -> str:
        """Value of the header `Host`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, as the base of a redirect."""
        return f"{self.scheme}://{self.host_header}{self.path}"


def check_url(url: str, allowed: Iterable[str], param: str | None = None) -> CheckedUrl:
    """Check a URL of a client or a redirect by its text alone; `ApiError` 400 if refused.

    `allowed` hosts are `example.com`, `example.com:8443`, `.example.com` for all below it, or `*`
    for every public host.
    """
    if len(url) > _LONGEST or not url.isascii() or not url.isprintable() or set(url) & set("\\ <>"):
        raise _refused("a URL has up to 2,048 ASCII characters without spaces and \\", param)
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").rstrip(".")
    except ValueError:
        raise _refused("the URL cannot be read", param) from None
    scheme = parts.scheme.lower()
    if scheme not in PORTS:
        raise _refused(f"scheme {scheme[:20]!r} is refused: give https", param)
    if "@" in parts.netloc:
        raise _refused("a URL with user and password is refused", param)
    if not _is_host(host):
        raise _refused(f"the host {host[:80]!r} is written in an unusual way", param)
    port = port or PORTS[scheme]
    if not _listed(host, port, port == PORTS[scheme], allowed):
        raise _refused(f"the host {host[:80]!r} is not among those allowed here", param)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CheckedUrl(scheme, host, port, path)


def _is_host(host: str) -> bool:
    """Return True for a name or an address in its usual spelling, such as no octal numbers."""
    try:  # a zone is of one machine
        return "%" not in host and str(ipaddress.ip_address(host)) == host
    except ValueError:
        last = host.rpartition(".")[2]
        return bool(_NAME.fullmatch(host)) and len(host) < 254 and not _NUMBER.fullmatch(last)


def _listed(host: str, port: int, usual: bool, allowed: Iterable[str]) -> bool:
    for each in allowed:
        entry = each.lower().removeprefix("*.") if each != "*" else "*"
        below = each.startswith((".", "*."))
        name = entry.lstrip(".")
        fits = entry == "*" or host == name or (below and host.endswith("." + name))
        if (fits and usual) or f"{host}:{port}" == entry:
            return True
    return False


def check_addresses(found: Iterable[str], host: str, param: str | None = None) -> str:
    """Return the first address to connect to; `ApiError` 400 unless all are public."""
    addresses = list(found)
    if not addresses:
        raise _refused(f"the host {host[:80]!r} is unknown", param, "fetch_failed")
    if not all(map(is_public, addresses)):
        raise _refused(f"the host {host[:80]!r} has an address that is not public", param)
    return addresses[0]


def is_public(address: str) -> bool:
    """Return True for an IP address of the open internet that stands for no other address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # also an address with a zone
        return False
    if any(found.version == net.version and found in net for net in _NEVER):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _refused(text: str, param: str | None, code: str = "url_not_allowed") -> ApiError:
    return ApiError(400, text, code=code, param=param)


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
    # Threads of their own, since a name server without answers can block them for long.
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
    """Resolution of names and opening of connections; tests replace both."""

    resolve: Callable[[str, int], Awaitable[list[str]]] = _resolve  # (host, port) -> all addresses
    # (address, port, host, TLS) -> reader and writer; the certificate must be of `host`
    connect: Callable[[str, int, str, bool], Awaitable[Any]] = _connect


NETWORK = Network()  # of this process


async def fetch(
    url: str, config: ServerConfig, param: str | None = None, network: Network | None = None
) -> tuple[str, bytes]:
    """Fetch a URL; return the media type and the bytes.

    `ApiError` 400: the URL, or one it leads to, is not allowed, or does not answer in time; 413:
    the file is too large; 429: too many are fetched.
    """
    global _running
    if not config.remote_hosts:
        raise bad_request(
            "media from other hosts are off here: send a data: URL", "remote_media_off", param
        )
    if _running >= _AT_ONCE:
        raise busy(f"{_AT_ONCE} media are being fetched already", code="fetching")
    _running += 1
    try:
        async with asyncio.timeout(config.remote_seconds):
            return await _follow(url, config, param, network or NETWORK)
    except TimeoutError:
        text = f"fetching took over {config.remote_seconds:g} s: send a data: URL"
        raise bad_request(text, "fetch_timeout", param) from None
    except (OSError, h11.RemoteProtocolError, h11.LocalProtocolError, UnicodeError):
        text = "the media's host does not answer as it should: check the URL"
        raise bad_request(text, "fetch_failed", param) from None
    finally:
        _running -= 1


async def _follow(
    url: str, config: ServerConfig, param: str | None, network: Network
) -> tuple[str, bytes]:
    before: CheckedUrl | None = None
    for _ in range(_HOPS + 1):
        try:
            target = check_url(url, config.remote_hosts, param)
            if before is not None and before.scheme == "https" and target.scheme == "http":
                raise _astray("one without TLS", param)
            address = check_addresses(
                await network.resolve(target.host, target.port), target.host, param
            )
        except ApiError as error:  # the target of a redirect is not revealed
            if before is None or error.message.startswith(_LEADS):
                raise
            raise _astray("one that is not allowed", param) from None
        found = await _get(target, address, config.remote_bytes, param, network)
        if not isinstance(found, str):
            return found
        before, url = target, urljoin(target.url, found)
    raise _astray(f"others over {_HOPS} times", param)


def _astray(where: str, param: str | None) -> ApiError:
    return bad_request(f"{_LEADS} {where}", "url_not_allowed", param)


async def _get(
    target: CheckedUrl, address: str, most: int, param: str | None, network: Network
) -> str | tuple[str, bytes]:
    """Send one request; return the target of a redirect, or media type and bytes."""
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


def _request(conn: h11.Connection, target: CheckedUrl) -> bytes:
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
    if status != 200:
        text = f"the media's host answers {status}: check the URL"
        raise bad_request(text, "fetch_failed", param)
    if headers.get("content-encoding", "identity") != "identity":
        text = "the media's host sends them compressed, but no encoding was requested"
        raise bad_request(text, "fetch_failed", param)
    length = headers.get("content-length", "")
    if length.isdigit() and len(length) < 19 and int(length) > most:
        raise too_large(int(length), most, param)
