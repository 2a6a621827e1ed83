"""Who a request is from, for every part of the server that the request reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mmfast.serve.guard.quotas import Quotas


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
    quotas: Quotas
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
