"""Errors of one event: they are reported to the client, and the socket stays open."""

from __future__ import annotations

from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.guard.errors import api_error, scrub


class EventError(MmfastError):
    """An event that cannot be handled and had no effect.

    `message` is one line that names the value and the fix; `code` is for programs; `param` is the
    wrong part, such as `session.audio.output.voice`.
    """

    def __init__(
        self,
        message: str,
        code: str = "invalid_value",
        param: str | None = None,
        type: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.code, self.param, self.type = code, param, type


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an exception as the `error` of an event; one that is not ours reveals nothing."""
    if isinstance(error, EventError):
        found = {"type": error.type, "code": error.code, "param": error.param}
        return {"message": scrub(str(error)), **found}
    known = api_error(error)
    wrong = "invalid_request_error" if known.status < 500 else "server_error"
    code = known.code or "internal_error"
    return {"message": scrub(known.message), "type": wrong, "code": code, "param": known.param}
