"""Which addresses may be opened, and RTSP: nothing unless allowed, and never a private host.

Names are resolved here, every address that a name has is checked, and the connection goes to the
address that was checked: a name that resolves differently the second time gains nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import av

from mmfast.core.errors import MediaError
from mmfast.frontends.guard import first_line, quote

PORTS = {"http": 80, "https": 443, "rtsp": 554, "rtsps": 322}
_RTSP_PROTOCOLS = {"rtsp": "rtsp,rtp,tcp", "rtsps": "rtsp,rtp,tcp,tls"}

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

Allowed = bool | Collection[str]


@dataclass(frozen=True)
class Address:
    """A checked network address."""

    url: SplitResult
    host: str
    port: int
    ip: str  # where the connection goes

    @property
    def name(self) -> str:
        """The address for messages: without user, password and query, which may be secret."""
        return shown(self.url)


def shown(url: SplitResult) -> str:
    """A URL for messages, without user, password and query."""
    host = (url.netloc or "").rpartition("@")[2]
    return quote(f"{url.scheme}://{host}{url.path}")


def check_address(text: str, allowed: Allowed) -> Address:
    """Check a URL before anything is opened.

    Args:
        text: The URL.
        allowed: False: no network. True: public hosts. A collection: these hosts only, and these
            also where they are private.

    Raises:
        MediaError: The network is off, the scheme or the host is not allowed, the host is
            unknown, or one of its addresses is private.
    """
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise MediaError(f"the address is not a URL ({error}): give {_examples()}") from None
    name, scheme = shown(url), url.scheme.lower()
    if scheme not in PORTS:
        raise MediaError(f"{name}: scheme {scheme!r} is refused; give {_examples()}")
    if not url.hostname or any(c.isspace() or ord(c) < 32 for c in text):
        raise MediaError(f"{name} is not an address: give {_examples()}")
    if allowed is False:
        raise MediaError(f"{name}: network sources are off; allow them with allow_network=True")
    host = url.hostname
    hosts = (allowed,) if isinstance(allowed, str) else allowed
    listed = None if hosts is True else {str(h).lower() for h in hosts}
    if listed is not None and host.lower() not in listed:
        raise MediaError(
            f"{name}: host {host!r} is not among those allowed ({', '.join(sorted(listed))})"
        )
    port = port or PORTS[scheme]
    ip = _resolve(name, host, port, private=listed is not None)
    return Address(url._replace(scheme=scheme), host, port, ip)


def _examples() -> str:
    return "rtsp://, rtsps://, http:// or https:// and a host"


def _resolve(name: str, host: str, port: int, private: bool) -> str:
    try:
        found = [
            str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
    except (OSError, UnicodeError) as error:
        raise MediaError(f"{name}: the host is unknown ({first_line(error)}): check it") from None
    bad = [ip for ip in found if not is_public(ip)]
    if bad and not private:
        raise MediaError(
            f"{name}: {bad[0]} is a private address; allow it with allow_network=[{host!r}]"
        )
    return found[0]


def is_public(ip: str) -> bool:
    """Say whether an IP address is one of the open internet."""
    address = ipaddress.ip_address(ip.split("%", 1)[0])
    if isinstance(address, ipaddress.IPv6Address):  # some stand for an address of version 4
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast


def open_rtsp(address: Address, timeout: float) -> Any:
    """Connect to an RTSP source over TCP.

    A server may send its client on to another one; FFmpeg follows, with these protocols only.

    Returns:
        PyAV's container.

    Raises:
        MediaError: The connection fails or takes longer than `timeout` seconds.
    """
    url, scheme = address.url, address.url.scheme
    user = url.netloc.rpartition("@")[0]
    # A certificate is issued to a name, so that under TLS the name must stay.
    host = address.host if scheme == "rtsps" else address.ip
    host = f"[{host}]" if ":" in host else host
    netloc = f"{user}@{host}:{address.port}" if user else f"{host}:{address.port}"
    options = {
        "rtsp_transport": "tcp",
        "timeout": str(round(timeout * 1e6)),
        "protocol_whitelist": _RTSP_PROTOCOLS[scheme],
        "allowed_media_types": "video",
    }
    try:
        return av.open(
            url._replace(netloc=netloc).geturl(),
            format="rtsp",
            options=options,
            timeout=(timeout, timeout),
        )
    except Exception as error:
        raise MediaError(
            f"{address.name} cannot be opened ({first_line(error)}): check that it is on and that "
            f"user and password are right"
        ) from None
