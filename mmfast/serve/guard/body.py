"""Limits of headers and bodies: size, time, and depth and number of values of JSON.

Bodies are counted as they come and never collected here. JSON is measured before it is parsed,
since deep nesting exhausts the stack of a parser, and a gigabyte of empty lists its memory.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import numpy as np

from mmfast.serve.config import ServerConfig
from mmfast.serve.guard.caller import Headers, values
from mmfast.serve.guard.errors import ApiError, bad_request, busy

MOST_VALUES = 200_000
_PIECE = 1 << 16
# The rest of a string and its end, within one piece; the patterns do not backtrack.
_REST = re.compile(rb"""[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)""", re.DOTALL)
_TEXT = re.compile(rb"""\"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)""", re.DOTALL)
_MARKS = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class JsonDepth:
    """Measures a JSON text that comes in pieces; the text may be invalid.

    `most` is the deepest nesting; of strings, commas and brackets there may be `MOST_VALUES`.
    """

    def __init__(self, most: int) -> None:
        self._most, self._left = most, MOST_VALUES
        self._depth, self._inside, self._skip = 0, False, False

    def feed(self, piece: bytes) -> None:
        """Measure the next piece. Beyond a limit, `ApiError` 400 is raised."""
        for start in range(0, len(piece), _PIECE):
            self._count(self._outside(piece[start : start + _PIECE]))

    def _outside(self, piece: bytes) -> bytes:
        """Return the part of a piece outside of strings; note a string that goes on."""
        at, parts = 0, []
        if self._inside:
            at = 1 if self._skip else 0
            rest = _REST.match(piece, at)
            at = self._ended(rest)
        while not self._inside and (text := _TEXT.search(piece, at)) is not None:
            parts.append(piece[at : text.start()])
            self._left -= 1
            at = self._ended(text)
        return b"".join(parts) + piece[at:]

    def _ended(self, text: Any) -> int:
        self._inside, self._skip = text[1] != b'"', text[1] == b"\\"
        return int(text.end())

    def _count(self, outside: bytes) -> None:
        marks = np.frombuffer(outside.translate(None, _OTHERS), np.uint8)
        self._left -= len(marks)
        if self._left < 0:
            raise bad_request(
                f"what was sent has over {MOST_VALUES:,} values: send less", "too_many_values"
            )
        if len(marks):
            depths = self._depth + np.cumsum(_STEPS[marks])
            self._depth = int(depths[-1])
            if depths.max() > self._most:
                text = f"what was sent is nested deeper than {self._most}: send less"
                raise bad_request(text, "too_deep")


def loads(text: str | bytes, most: int) -> Any:
    """Parse a JSON text of a client; `ApiError` 400 if it is too deep, too large, or not JSON."""
    JsonDepth(most).feed(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise bad_request("this is no JSON: send one JSON object", "invalid_json") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


Message = dict[str, Any]
_BODIES = ("POST", "PUT", "PATCH")
_FORM, _SDP = b"multipart/form-data", b"application/sdp"
KINDS: dict[str, tuple[bytes, ...]] = {
    f"/v1/audio/{name}": (_FORM,) for name in ("transcriptions", "translations")
}
KINDS |= {"/v1/realtime/calls": (_FORM, _SDP)}
UNDECLARED = 16 << 20  # most bytes of a body without a declared length


class Bodies:
    """Counts the bytes of all bodies that are being read or answered."""

    def __init__(self, most: int) -> None:
        self._most, self._now = most, 0

    def add(self, size: int) -> None:
        """Count bytes that came; `ApiError` 429 if there are too many."""
        if self._now + size > self._most:
            raise busy("the server is reading as much as it may", code="bodies")
        self._now += size

    def drop(self, size: int) -> None:
        """Count bytes that are no longer held."""
        self._now -= size


class BodyReceiver:
    """`receive` of a request with limits of size and time, and of its JSON."""

    def __init__(
        self,
        receive: Any,
        config: ServerConfig,
        json: bool = False,
        bodies: Bodies | None = None,
        endless: bool = False,
    ) -> None:
        self._receive = receive
        self._most = min(config.max_body_bytes, UNDECLARED if endless else config.max_body_bytes)
        self._bodies, self._held = bodies or Bodies(config.max_body_bytes), 0
        self._seconds = config.body_seconds
        self._deadline = asyncio.get_running_loop().time() + config.body_seconds
        self._depth = JsonDepth(config.max_json_depth) if json else None
        self.size, self.over = 0, False
        self.refused: ApiError | None = None  # error for which the rest is not read

    async def __call__(self) -> Message:
        """Return the next message."""
        if self.refused is not None:
            raise self.refused
        if self.over:  # the next message says that the client has gone
            message: Message = await self._receive()
            return message
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise self._refuse(_slow(self._seconds)) from None
        if message["type"] != "http.request":
            self.over = True
            return message
        self._count(message.get("body", b""))
        self.over = not message.get("more_body", False)
        return message

    def _count(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self._most:
            raise self._refuse(too_large(self._most))
        try:
            self._bodies.add(len(piece))
            self._held += len(piece)
            if self._depth is not None:
                self._depth.feed(piece)
        except ApiError as error:
            raise self._refuse(error) from None

    def _refuse(self, error: ApiError) -> ApiError:
        self.refused = error
        return error

    def close(self) -> None:
        """Stop counting the body, at the end of the request."""
        self._bodies.drop(self._held)
        self._held = 0

    async def drain(self, most: int = 8 << 20, seconds: float = 0.5) -> None:
        """Read on for a moment, since a client that is still sending would not see the reply."""
        try:
            async with asyncio.timeout(seconds):
                while not self.over and most > 0:
                    message = await self._receive()
                    most -= len(message.get("body", b""))
                    self.over = not message.get("more_body", False)
        except TimeoutError:
            return


def too_large(most: int) -> ApiError:
    """Return the error 413 for a body of more than `most` bytes."""
    text = f"the body is larger than {most:,} bytes: send less, and its Content-Length"
    return ApiError(413, text, code="body_too_large")


def _slow(seconds: float) -> ApiError:
    text = f"the body took over {seconds:g} s: send it faster, or less"
    return ApiError(408, text, code="body_too_slow")


def check_head(headers: Headers, config: ServerConfig) -> None:
    """Refuse a request by its headers alone: 431 for the headers, 413 for a declared length."""
    size = sum(len(key) + len(value) + 4 for key, value in headers)
    if len(headers) > config.max_headers or size > config.max_header_bytes:
        raise ApiError(
            431,
            f"{len(headers):,} headers of {size:,} bytes; {config.max_headers} of "
            f"{config.max_header_bytes:,} are allowed",
            code="headers_too_large",
        )
    for length in values(headers, b"content-length"):
        if not length.isdigit() or len(length) > 18:
            raise bad_request("Content-Length is no number", "invalid_header")
        if int(length) > config.max_body_bytes:
            raise too_large(config.max_body_bytes)


def has_body(headers: Headers) -> bool:
    """Return True if the headers announce a body."""
    sent = values(headers, b"content-length") not in ([], [b"0"])
    return sent or bool(values(headers, b"transfer-encoding"))


def check_type(method: str, path: str, headers: Headers) -> bool:
    """Return True if the body is JSON, as it must be below `/v1/` (415 for another type).

    Recordings to write down are forms; a call is offered as a form or as SDP.
    """
    given = values(headers, b"content-type")
    kind = given[0].split(b";")[0].strip().lower() if given else b""
    json = kind == b"application/json" or (kind.endswith(b"+json") and b"/" in kind)
    if method in _BODIES and has_body(headers) and path.startswith("/v1/"):
        kinds = KINDS.get(path, ())
        if not (kind in kinds if kinds else json) or len(given) > 1:
            shown = kind.decode("latin-1")[:60] or "missing"
            wanted = b" or ".join(kinds).decode() or "JSON, as application/json"
            text = f"Content-Type is {shown!r}: send {wanted}"
            raise ApiError(415, text, code="unsupported_media_type")
        if values(headers, b"content-encoding") not in ([], [b"identity"]):
            raise ApiError(415, "a compressed body is refused: send it plain", code="encoded_body")
    return json
