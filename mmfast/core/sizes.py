"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from mmfast.core.errors import MmfastError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_bytes(size: str | int | None, name: str = "") -> int | None:
    """Read a size such as `"2GB"`, `"500 MB"`, `"1.5GiB"`, 4096; None is no limit.

    The MmfastError for anything else, or a negative size, names the option `name`.
    """
    if size is None:
        return None
    match = None if isinstance(size, bool) else _SIZE.fullmatch(str(size))
    if match is None:
        raise MmfastError(f"{name}{size!r} is no size; write bytes, '500MB', '2GB' or '1.5GiB'")
    unit: int = (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " ")
    return int(match[1]) * unit if match[1].isdecimal() else round(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """Write bytes for people: `1.53 GB`, `11.5 MB`."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
