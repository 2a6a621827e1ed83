"""Nesting and number of values of a JSON text, counted as it comes and before it is parsed.

A parser that recurses dies of depth, one that does not of a gigabyte of empty lists.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mmfast.serve.guard.errors import ApiError

_MARK = re.compile(rb'["\[\]{},]')
_END = re.compile(rb'["\\]')
MOST_VALUES = 200_000


class Depth:
    """Counts a JSON text that comes in pieces; it need not be JSON.

    Args:
        most: Deepest nesting.
        values: Most commas and brackets outside of texts.
    """

    def __init__(self, most: int, values: int = MOST_VALUES) -> None:
        self._most, self._left = most, values
        self._depth, self._inside, self._skip = 0, False, False

    def feed(self, piece: bytes) -> None:
        """Count on.

        Raises:
            ApiError: 400: too deep, or too many values.
        """
        at = 0
        while at < len(piece):
            at = self._text(piece, at) if self._inside else self._outside(piece, at)

    def _text(self, piece: bytes, at: int) -> int:
        """Go to the end of a text, base64 at the speed of a search."""
        if self._skip:
            self._skip = False
            return at + 1
        found = _END.search(piece, at)
        if found is None:
            return len(piece)
        if found[0] == b'"':
            self._inside = False
        else:
            self._skip = True
        return found.end()

    def _outside(self, piece: bytes, at: int) -> int:
        found = _MARK.search(piece, at)
        if found is None:
            return len(piece)
        mark = found[0]
        self._left -= 1
        if self._left < 0:
            raise ApiError(
                400, f"the body has over {MOST_VALUES:,} values: send less", code="too_many_values"
            )
        if mark == b'"':
            self._inside = True
        elif mark in b"[{":
            self._depth += 1
            if self._depth > self._most:
                raise ApiError(
                    400, f"the body is nested deeper than {self._most}: send less", code="too_deep"
                )
        elif mark in b"]}":
            self._depth -= 1
        return found.end()


def loads(text: str | bytes, most: int) -> Any:
    """Parse a JSON text of a client.

    Raises:
        ApiError: 400: it is too deep, too large, or no JSON.
    """
    Depth(most).feed(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, "this is no JSON: send one JSON object", code="invalid_json") from None
