"""Who calls: API keys, compared by their hashes in constant time, and where browsers come from."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from mmfast.serve.config import HASHED

Headers = list[tuple[bytes, bytes]]
_SUBPROTOCOL = "openai-insecure-api-key."  # how a browser's WebSocket sends a key


class Keys:
    """The keys of a server; only their hashes are kept.

    Args:
        keys: As they are, or as `sha256:` and the hash in hexadecimal.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [
            bytes.fromhex(key[len(HASHED) :])
            if key.startswith(HASHED)
            else hashlib.sha256(key.encode()).digest()
            for key in keys
        ]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def owner(self, key: bytes | None) -> str | None:
        """A name for the key that gives nothing away; None where it is not one of ours."""
        if not key:
            return None
        given, found = hashlib.sha256(key).digest(), False
        for known in self._hashes:  # all of them: the time tells nothing
            found |= hmac.compare_digest(given, known)
        return given.hex()[:16] if found else None


def values(headers: Headers, name: bytes) -> list[bytes]:
    """All values of a header."""
    return [value for key, value in headers if key == name]


def given_key(headers: Headers, websocket: bool) -> bytes | None:
    """The key that a request carries: bearer, password of a browser's prompt, or subprotocol."""
    sent = values(headers, b"authorization")
    if len(sent) > 1:
        return None
    if sent:
        scheme, _, rest = sent[0].partition(b" ")
        if scheme.lower() == b"bearer":
            return rest.strip()
        return _password(rest) if scheme.lower() == b"basic" else None
    if websocket:
        offered = b",".join(values(headers, b"sec-websocket-protocol")).split(b",")
        start = _SUBPROTOCOL.encode()
        return next((p.strip()[len(start) :] for p in offered if p.strip().startswith(start)), None)
    return None


def _password(value: bytes) -> bytes | None:
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return None


def from_elsewhere(headers: Headers, allowed: Iterable[str], local: bool) -> bool:
    """Whether a browser sends this for the page of another site.

    Args:
        headers: Of the request.
        allowed: Origins that may, such as `https://example.com`.
        local: The server listens to this machine only: a name that leads here, but is not one of
            this machine's, is another site's trick.
    """
    origins = values(headers, b"origin")
    if not origins:
        return False  # no browser, or nothing that changes anything
    origin = origins[0].decode("latin-1").lower()
    if len(origins) == 1 and origin in {each.lower().rstrip("/") for each in allowed}:
        return False
    hosts = values(headers, b"host")
    host = hosts[0].decode("latin-1").lower() if len(hosts) == 1 else ""
    if len(origins) > 1 or not host or _netloc(origin) != _without_port(origin, host):
        return True
    return local and not _is_local(host)


def _netloc(origin: str) -> str:
    try:
        return _without_port(origin, urlsplit(origin).netloc)
    except ValueError:
        return ""


def _without_port(origin: str, host: str) -> str:
    """A host without the port that its scheme has anyway."""
    return host.removesuffix(":443" if origin.startswith("https:") else ":80")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or loopback(name)
    except ValueError:
        return False


def loopback(name: str) -> bool:
    """Whether an address is one of this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
