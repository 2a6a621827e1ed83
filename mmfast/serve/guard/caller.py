"""The caller of a request: its key, its origin, and its quotas."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mmfast.serve.config import HASHED
from mmfast.serve.guard.errors import ApiError, busy

Headers = list[tuple[bytes, bytes]]
_SUBPROTOCOL = "openai-insecure-api-key."  # a WebSocket of a browser sends its key so


class Keys:
    """The keys of a server, kept as hashes; given in plain text or as `sha256:` with the hash."""

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
        """Return a name of the key that does not reveal it; None for an unknown key."""
        if not key:
            return None
        given, found = hashlib.sha256(key).digest(), False
        for known in self._hashes:  # all of them, so that the time reveals nothing
            found |= hmac.compare_digest(given, known)
        return given.hex()[:16] if found else None


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return all values of a header."""
    return [value for key, value in headers if key == name]


def given_key(headers: Headers, websocket: bool) -> bytes | None:
    """Return the key of a request: bearer token, basic password, or subprotocol."""
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
    """Return True if a browser sends this request for the page of another site.

    With `local` the server listens on this machine only, so any other name of it is an attack by
    DNS rebinding.
    """
    origins = values(headers, b"origin")
    if not origins:
        return False  # no browser, or a request without side effects
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
    """Return a host without the default port of its scheme."""
    return host.removesuffix(":443" if origin.startswith("https:") else ":80")


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or loopback(name)
    except ValueError:
        return False


def loopback(name: str) -> bool:
    """Return True for an address of this machine alone."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


KINDS = ("requests", "bytes", "tokens", "pixels")
_CALLERS = 10_000  # most callers to remember


class Bucket:
    """A token bucket of one minute; a late charge may overdraw it."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate, self._most = per_minute / 60.0, max(per_minute, 1.0)
        self._level, self._clock, self._then = self._most, clock, clock()

    def wait(self, amount: float) -> float:
        """Return the seconds until the amount is available."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._then) * self._rate)
        self._then = now
        missing = min(amount, self._most) - self._level
        return max(0.0, missing / self._rate)

    def take(self, amount: float) -> None:
        """Take an amount, which may overdraw the bucket."""
        self._level -= amount


@dataclass
class _Caller:
    buckets: dict[str, Bucket] = field(default_factory=dict)
    running: int = 0


@dataclass(frozen=True)
class CallerLimits:
    """Limits of one caller; 0 does not limit."""

    requests: float = 0.0  # a minute
    bytes: float = 0.0  # of bodies a minute
    tokens: float = 0.0  # of answers and prompts a minute
    pixels: float = 0.0  # of decoded media a minute
    running: int = 0  # at once


class CallerQuotas:
    """Quotas of all callers of a server, used in its event loop."""

    def __init__(self, rates: CallerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = rates, clock
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def enter(self, who: str) -> None:
        """Admit one more request, or raise `ApiError` 429; `leave` must follow."""
        caller, rates = self._caller(who), self._rates
        if rates.running and caller.running >= rates.running:
            raise busy(f"{rates.running} requests of this caller run already", 1.0, "concurrency")
        for name, bucket in caller.buckets.items():
            wait = bucket.wait(1.0)
            if wait > 0:
                most = getattr(rates, name)
                raise busy(f"over {most:g} {name} a minute: wait", wait, "rate_limit_exceeded")
        if "requests" in caller.buckets:
            caller.buckets["requests"].take(1.0)
        caller.running += 1

    def leave(self, who: str) -> None:
        """End a request."""
        caller = self._callers.get(who)
        if caller is not None:
            caller.running -= 1

    def spend(self, who: str, kind: str, amount: float) -> None:
        """Charge `bytes` or `tokens`; the next request waits until the bucket is refilled."""
        bucket = self._caller(who).buckets.get(kind)
        if bucket is not None:
            bucket.take(amount)

    def check(self, who: str, kind: str) -> ApiError | None:
        """Return an error if a bucket is overdrawn."""
        bucket = self._caller(who).buckets.get(kind)
        wait = bucket.wait(0.0) if bucket is not None else 0.0
        text = f"over {getattr(self._rates, kind):g} {kind} a minute: wait"
        return busy(text, wait, "rate_limit_exceeded") if wait > 0 else None

    def _caller(self, who: str) -> _Caller:
        found = self._callers.pop(who, None)
        if found is None:
            rates = {kind: getattr(self._rates, kind) for kind in KINDS}
            found = _Caller({k: Bucket(rate, self._clock) for k, rate in rates.items() if rate})
            while len(self._callers) >= _CALLERS:
                self._forget()
        self._callers[who] = found
        return found

    def _forget(self) -> None:
        """Drop the caller that has been idle longest."""
        idle = next((who for who, each in self._callers.items() if not each.running), None)
        self._callers.pop(idle if idle is not None else next(iter(self._callers)))


@dataclass
class Caller:
    """The caller of one request."""

    id: str  # id of the request, in its reply and its log line
    quotas: CallerQuotas
    who: str = ""  # name in the quotas: of the key, or of the address where no key is needed
    tenant: str = ""  # owner of reused results: a name of the key, "" where no key is needed
    limited: bool = False  # the request counts as running
    tokens: int = 0  # tokens of prompt and answer so far
    secrets: ClientSecrets | None = None  # of the server
    session: dict[str, Any] | None = None  # settings that came with a client secret

    def spend(self, tokens: int) -> None:
        """Charge tokens of prompt and answer; the next request of the caller may have to wait."""
        self.tokens += tokens
        self.quotas.spend(self.who, "tokens", tokens)


SECRET = "ek_"  # a client secret begins so


@dataclass(frozen=True)
class ClientSecret:
    """The owner of a key that is valid for a short time, and the settings of its sessions."""

    who: str
    tenant: str
    session: dict[str, Any]
    expires: float  # seconds since 1970


class ClientSecrets:
    """Short-lived keys of browsers for realtime sessions, kept as hashes; at most `most`."""

    def __init__(self, most: int = 10_000, clock: Callable[[], float] = time.time) -> None:
        self._most, self._clock = most, clock
        self._found: dict[bytes, ClientSecret] = {}

    def make(self, caller: Caller, seconds: float, session: dict[str, Any]) -> tuple[str, int]:
        """Return a new secret and its end in seconds since 1970; `ApiError` if too many are valid.

        Who holds it counts as the caller that asked for it.
        """
        now, value = self._clock(), SECRET + secrets.token_urlsafe(32)
        self._found = {key: each for key, each in self._found.items() if each.expires > now}
        if len(self._found) >= self._most:
            raise busy(f"{self._most:,} client secrets are valid already", 10.0, "client_secrets")
        found = ClientSecret(caller.who, caller.tenant, session, now + seconds)
        self._found[hashlib.sha256(value.encode()).digest()] = found
        return value, int(found.expires)

    def find(self, key: bytes) -> ClientSecret | None:
        """Return what a secret stands for; None where it is unknown, or its time is over."""
        found = self._found.get(hashlib.sha256(key).digest())
        return found if found is not None and found.expires > self._clock() else None


def caller_of(scope: Any) -> Caller:
    """Return the caller of a request or a connection that came through a `Shield`."""
    found = scope.get("state", {}).get("mmfast")
    if not isinstance(found, Caller):
        raise TypeError("the application is not behind a Shield")
    return found


def client_of(scope: Any) -> str:
    """Return the address of a request; of IPv6 the /64, since one customer has all of it."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    if ":" in host:
        host = ":".join(host.split("%")[0].split(":")[:4])
    return f"ip:{host}"
