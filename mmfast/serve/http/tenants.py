"""Whose request it is: the API key together with the `user` that its owner names."""

from __future__ import annotations

import hashlib

from starlette.requests import HTTPConnection


def tenant_of(connection: HTTPConnection, user: str | None = None) -> str:
    """A name that tells tenants apart and gives no key away."""
    scheme, _, key = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = ""
    return hashlib.sha256(f"{key}\n{user or ''}".encode("utf-8", "replace")).hexdigest()[:32]
