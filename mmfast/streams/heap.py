"""Gives memory that is free inside the heap back to the system.

Stored blocks live for hours while everything around them comes and goes with every frame, so
they leave holes behind: a process would grow although what it holds does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache


def give_back() -> bool:
    """Return free pages of the heap; takes milliseconds.

    Returns:
        Whether the C library can (glibc).
    """
    trim = _trim()
    if trim is None:
        return False
    trim(0)
    return True


@lru_cache(maxsize=1)
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
