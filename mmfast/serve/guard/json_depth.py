"""Nesting and number of values of a JSON text, counted as it comes and before it is parsed.

A parser that recurses dies of depth, one that does not of a gigabyte of empty lists.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from mmfast.serve.guard.errors import ApiError

MOST_VALUES = 200_000
_PIECE = 1 << 16
# The rest of a text, and what ends it; nothing behind the end of a piece. No step goes back.
_REST = re.compile(rb"""[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)""", re.DOTALL)
_TEXT = re.compile(rb"""\"[^"\\]*+(?:\\.[^"\\]*+)*+("|\\?\Z)""", re.DOTALL)
_MARKS = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int64)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class Depth:
    """Counts a JSON text that comes in pieces; it need not be JSON.

    Args:
        most: Deepest nesting.
        values: Most texts, commas and brackets.
    """

    def __init__(self, most: int, values: int = MOST_VALUES) -> None:
        self._most, self._values, self._left = most, values, values
        self._depth, self._inside, self._skip = 0, False, False

    def feed(self, piece: bytes) -> None:
        """Count on.

        Raises:
            ApiError: 400: too deep, or too many values.
        """
        for start in range(0, len(piece), _PIECE):
            self._count(self._outside(piece[start : start + _PIECE]))

    def _outside(self, piece: bytes) -> bytes:
        """What of a piece lies outside of texts; notes whether one goes on behind it."""
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
            raise ApiError(
                400,
                f"what was sent has over {self._values:,} values: send less",
                code="too_many_values",
            )
        if len(marks):
            depths = self._depth + np.cumsum(_STEPS[marks])
            self._depth = int(depths[-1])
            if depths.max() > self._most:
                text = f"what was sent is nested deeper than {self._most}: send less"
                raise ApiError(400, text, code="too_deep")


def loads(text: str | bytes, most: int) -> Any:
    """Parse a JSON text of a client.

    Raises:
        ApiError: 400: it is too deep, too large, or no JSON.
    """
    Depth(most).feed(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise ApiError(400, "this is no JSON: send one JSON object", code="invalid_json") from None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
