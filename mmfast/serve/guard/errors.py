"""Errors of the API: the format of OpenAI, one line, without paths of this machine."""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfast.core.errors import ContextError, MediaError, MmfastError, ModelError
from mmfast.serve.engine.base import BusyError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
# Advice for users of the library; bounded, since the text may come from a client.
_ADVICE = re.compile(r",? or raise (?:Limits\([^)]{0,200}\)|\w+=)")
_LONGEST, _READ = 500, 4000  # letters that are sent, and that are read
_TOP = (
    *("home", "root", "tmp", "usr", "var", "opt", "etc", "proc", "sys", "dev", "srv", "mnt"),
    *("media", "data", "run", "lib", "boot", "workspace", "Users"),
)
_OWN = [sys.prefix, sys.base_prefix, tempfile.gettempdir(), Path.cwd()]
with contextlib.suppress(RuntimeError):  # a user without a home
    _OWN.append(Path.home())
_FOUND = {*map(str, (*_OWN, Path(__file__).resolve().parents[3])), *("/" + name for name in _TOP)}
_ROOTS = sorted((root for root in _FOUND if len(root) > 1), key=len, reverse=True)
_PATHS = re.compile(
    r"(?<![\w:/.])(?:" + "|".join(map(re.escape, _ROOTS)) + r")(?:/[^\s'\",;:)\]]*)?(?![\w])"
    r"|\b[A-Za-z]:\\[^\s'\",;)\]]*"
)


class ApiError(MmfastError):
    """An error reply."""

    def __init__(
        self,
        status: int,
        message: str,  # one line that names the value and the fix
        type: str = "",  # type in OpenAI's API; derived from the status when empty
        code: str | None = None,  # code for programs
        param: str | None = None,  # the part of the request that is wrong
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        other = "server_error" if status >= 500 else "invalid_request_error"
        self.type = type or _TYPES.get(status, other)
        self.code, self.param = code, param
        self.headers = dict(headers or {})


def busy(message: str, retry_after: float = 1.0, code: str = "busy") -> ApiError:
    """Return the error 429 with the seconds to wait."""
    wait = str(max(1, round(retry_after + 0.499)))
    return ApiError(429, message, code=code, headers={"Retry-After": wait})


def bad_request(message: str, code: str = "invalid_value", param: str | None = None) -> ApiError:
    """Return the error 400 for a part of the request."""
    return ApiError(400, message, code=code, param=param)


def api_error(error: BaseException, param: str | None = None) -> ApiError:
    """Turn any exception into an error reply; one of another package reveals nothing."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return busy(str(error), error.retry_after)
    codes = {
        ContextError: "context_length_exceeded",
        MediaError: "invalid_media",
        ModelError: "model_cannot",
        MmfastError: "invalid_value",
    }
    for kind, code in codes.items():  # the base class last
        if isinstance(error, kind):
            return bad_request(str(error), code, param)
    return ApiError(500, "the server made an error; its log has it under this request's id")


_REASONS = {401: "auth", 403: "auth", 408: "slow", 413: "body", 429: "rate", 431: "headers"}


def reason(error: ApiError, more: Mapping[int, str] | None = None) -> str:
    """Return the reason of a refusal for the metrics; `more` names those of further statuses."""
    other = "failed" if error.status >= 500 else "invalid"
    return {**_REASONS, **(more or {})}.get(error.status, other)


def body(error: BaseException) -> dict[str, Any]:
    """Return the document of an error reply."""
    shown = api_error(error)
    fields = {name: getattr(shown, name) for name in ("type", "code", "param")}
    return {"error": {"message": scrub(shown.message), **fields}}


def reply(error: BaseException) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error reply."""
    shown = api_error(error)
    data = json.dumps(body(shown)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        *((k.lower().encode(), v.encode()) for k, v in shown.headers.items()),
    ]
    return shown.status, headers, data


def brief(value: Any) -> str:
    """Return the start of a value that a client sent, as Python writes it."""
    text = repr(value[:60]) if isinstance(value, str) else reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def scrub(message: str) -> str:
    """Return one line without paths of the server and without advice for its owner."""
    line = " ".join(_ADVICE.sub("", message[:_READ]).split())
    line = _PATHS.sub("<path>", line)
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
