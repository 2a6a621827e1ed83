"""Which URLs of a request may be fetched, and which addresses are of the open internet."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from mmfast.serve.guard.errors import ApiError

PORTS = {"http": 80, "https": 443}
_LONGEST = 2048
_NAME = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*\.?")
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\.?")  # what inet_aton takes for a part of an address
# Addresses that stand for others, or for the machine's own cloud, and count as global elsewhere.
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
class Target:
    """A checked URL, without anything that a parser could read in two ways."""

    scheme: str
    host: str
    port: int
    path: str  # with its query

    @property
    def host_header(self) -> str:
        """The host as the server is told."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The URL, for the next redirect."""
        return f"{self.scheme}://{self.host_header}{self.path}"


def check_url(url: str, allowed: Iterable[str], param: str | None = None) -> Target:
    """Check a URL by its text alone.

    Args:
        url: As a client or a redirect gives it.
        allowed: Hosts: `example.com`, `example.com:8443`, `.example.com` for all below it, or `*`
            for every public host.
        param: The part of the request.

    Raises:
        ApiError: 400: it is no plain http or https URL, or of a host that is not allowed.
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
    return Target(scheme, host, port, path)


def _is_host(host: str) -> bool:
    """A name or an address in its usual spelling: no octal, hexadecimal or single numbers."""
    try:
        return str(ipaddress.ip_address(host)) == host
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
    """The address to connect to: the first, where every one is public.

    Raises:
        ApiError: 400: a name has none, or one that is not of the open internet.
    """
    addresses = list(found)
    if not addresses:
        raise _refused(f"the host {host[:80]!r} is unknown", param, "fetch_failed")
    if not all(map(is_public, addresses)):
        raise _refused(f"the host {host[:80]!r} has an address that is not public", param)
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is one of the open internet, and stands for no other one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # also one with a zone
        return False
    if any(found.version == net.version and found in net for net in _NEVER):
        return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _refused(text: str, param: str | None, code: str = "url_not_allowed") -> ApiError:
    return ApiError(400, text, code=code, param=param)
