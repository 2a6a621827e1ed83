"""Who a request is from, for every part of the server that the request reaches."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from mmfast.serve.config import HASHED
from mmfast.serve.guard.errors import ApiError, busy

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


_CALLERS = 10_000  # remembered; more only where addresses are made up


class Bucket:
    """Fills steadily up to a minute's worth; what is taken later than asked may overdraw it."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate, self._most = per_minute / 60.0, max(per_minute, 1.0)
        self._level, self._clock, self._then = self._most, clock, clock()

    def wait(self, amount: float) -> float:
        """Seconds until so much is there."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._then) * self._rate)
        self._then = now
        missing = min(amount, self._most) - self._level
        return max(0.0, missing / self._rate)

    def take(self, amount: float) -> None:
        """Take it, there or not."""
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
    running: int = 0  # at once


class CallerQuotas:
    """All callers of a server, in its event loop.

    Args:
        rates: Of each.
        clock: Seconds.
    """

    def __init__(self, rates: CallerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = rates, clock
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def enter(self, who: str) -> None:
        """One more request; `leave` must follow.

        Raises:
            ApiError: 429 with Retry-After.
        """
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
        """It is over."""
        caller = self._callers.get(who)
        if caller is not None:
            caller.running -= 1

    def spend(self, who: str, kind: str, amount: float) -> None:
        """So many `bytes` or `tokens` were used; the next request waits for what is overdrawn."""
        bucket = self._caller(who).buckets.get(kind)
        if bucket is not None:
            bucket.take(amount)

    def check(self, who: str, kind: str) -> ApiError | None:
        """The error, where a bucket is overdrawn."""
        bucket = self._caller(who).buckets.get(kind)
        wait = bucket.wait(0.0) if bucket is not None else 0.0
        text = f"over {getattr(self._rates, kind):g} {kind} a minute: wait"
        return busy(text, wait, "rate_limit_exceeded") if wait > 0 else None

    def _caller(self, who: str) -> _Caller:
        found = self._callers.pop(who, None)
        if found is None:
            kinds = ("requests", "bytes", "tokens")
            found = _Caller(
                {k: Bucket(getattr(self._rates, k), self._clock) for k in kinds if self._limits(k)}
            )
            while len(self._callers) >= _CALLERS:
                self._forget()
        self._callers[who] = found
        return found

    def _limits(self, kind: str) -> bool:
        return bool(getattr(self._rates, kind))

    def _forget(self) -> None:
        """Drop whoever has been quiet the longest."""
        idle = next((who for who, each in self._callers.items() if not each.running), None)
        self._callers.pop(idle if idle is not None else next(iter(self._callers)))


@dataclass
class Caller:
    """One request's caller.

    Attributes:
        id: Of the request, in its reply and its log line.
        quotas: Of the server.
        who: Whose quotas count: the key's, or the address's where no keys are asked for.
        tenant: Whose results are reused: a name of the key, "" where no keys are asked for.
        limited: Whether it counts as running.
        tokens: Of prompt and answer, as far as they were told here.
    """

    id: str
    quotas: CallerQuotas
    who: str = ""
    tenant: str = ""
    limited: bool = False
    tokens: int = 0

    def spend(self, tokens: int) -> None:
        """So many tokens were read and written; the caller's next request may have to wait."""
        self.tokens += tokens
        self.quotas.spend(self.who, "tokens", tokens)


def caller_of(scope: Any) -> Caller:
    """The caller of a request or a connection that came through a `Shield`."""
    found = scope.get("state", {}).get("mmfast")
    if not isinstance(found, Caller):
        raise TypeError("the application is not behind a Shield")
    return found


def client_of(scope: Any) -> str:
    """The address a request comes from; an IPv6 customer has a whole /64."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    if ":" in host:
        host = ":".join(host.split("%")[0].split(":")[:4])
    return f"ip:{host}"
